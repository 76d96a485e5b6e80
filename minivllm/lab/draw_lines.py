"""Above the chapters: a few lines over one axis: how a cost grows, where a gain ends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minivllm.lab.draw import LINE
from minivllm.lab.segments import PALETTE

# isort: split
# Below draw.py, which says what to do where matplotlib is missing.
from matplotlib.figure import Figure

# Lines differ in colour, marker and dashes: any one of the three is enough to tell them apart.
COLOURS = tuple(PALETTE[i] for i in (4, 5, 2, 6, 0, 1))
MARKERS, DASHES = ("o", "s", "^", "D", "v", "P"), ("-", "--", "-.", ":", "-", "--")


def draw_lines(
    lines: Mapping[str, Mapping[float, float]],
    *,
    xlabel: str,
    ylabel: str,
    title: str = "",
    log: str = "",
    marks: Mapping[str, float] | None = None,
) -> Figure:
    """Lines by name, each x -> y; returns the figure.

    log: the axes with a logarithmic scale: "", "x", "y" or "xy". marks: text -> the x of an upright line with
    that text. Raises ValueError where there are no lines, or more than six.
    """
    if not 1 <= len(lines) <= len(COLOURS) or not all(lines.values()):
        raise ValueError(
            f"{len(lines)} lines: from 1 to {len(COLOURS)} can be told apart, none of them empty."
        )
    figure = Figure((7, 3.6), dpi=100, layout="constrained")
    ax = figure.subplots()
    for i, (name, points) in enumerate(lines.items()):
        xs = sorted(points)
        style: dict[str, Any] = {"color": COLOURS[i], "marker": MARKERS[i], "linestyle": DASHES[i]}
        ax.plot(xs, [points[x] for x in xs], label=name, markersize=4, linewidth=1.6, **style)
    if "x" in log:
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_formatter(lambda x, _: f"{x:,.6g}")
    if "y" in log:
        ax.set_yscale("log")
    else:
        ax.set_ylim(bottom=0)
    for text, x in (marks or {}).items():
        ax.axvline(x, color=LINE, linewidth=1, linestyle=(0, (4, 2)), gid="mark")
        ax.annotate(text, (x, 1), (-3, -3), xycoords=("data", "axes fraction"), textcoords="offset points",
                    rotation=90, ha="right", va="top", fontsize=8)  # fmt: skip
    ax.set_xlabel(xlabel, fontsize=9)
    ax.set_ylabel(ylabel, fontsize=9)
    ax.set_title(title, fontsize=11, fontweight="bold", loc="left")
    ax.tick_params(labelsize=8)
    ax.grid(alpha=0.3)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, fontsize=8)
    return figure
