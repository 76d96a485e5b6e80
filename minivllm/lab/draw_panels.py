"""Above the chapters: a column of small line charts, narrow enough to be read on a telephone.

As everywhere in `lab`, a picture is a pure function onto a matplotlib figure.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from minivllm.errors import InvalidOption
from minivllm.lab.draw_lines import COLOURS, DASHES, LINE, MARKERS

# isort: split
# Below draw.py, which says what to do where matplotlib is missing.
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

WIDTH, PANEL_HEIGHT = 4.8, 2.9  # inches: at 390 pixels a letter of 9 points is 10 pixels high
TITLE_WIDTH = 62  # characters on one line


@dataclass(frozen=True)
class Panel:
    """One chart. lines: name -> x -> y. levels: text -> the y of a level line with that text.

    second: lines with an axis of their own at the right, and ylabel2 is its label. notes: texts below the
    title, such as which points were left out. log: the axes with a logarithmic scale.
    """

    title: str
    xlabel: str
    ylabel: str
    lines: Mapping[str, Mapping[float, float]]
    levels: Mapping[str, float] = field(default_factory=dict)
    second: Mapping[str, Mapping[float, float]] = field(default_factory=dict)
    ylabel2: str = ""
    note: str = ""
    log: str = "xy"


def draw_panels(panels: Sequence[Panel], title: str) -> Figure:
    """The charts one below another under one title; a panel without points says "not measured yet".

    Raises InvalidOption for a panel with more than six lines.
    """
    figure = Figure((WIDTH, PANEL_HEIGHT * len(panels) + 0.6), dpi=100, layout="constrained")
    for ax, panel in zip(figure.subplots(len(panels), squeeze=False)[:, 0], panels, strict=True):
        _draw(ax, panel)
    figure.suptitle(textwrap.fill(title, TITLE_WIDTH), fontsize=8.5, parse_math=False)
    return figure


def _draw(ax: Axes, panel: Panel) -> None:
    num_lines = len(panel.lines) + len(panel.second)
    if num_lines > len(COLOURS):
        raise InvalidOption(f"{num_lines} lines: at most {len(COLOURS)} can be told apart.")
    handles = _draw_lines(ax, panel.lines, 0)
    if panel.second:
        right = ax.twinx()
        handles += _draw_lines(right, panel.second, len(panel.lines))
        _scale(right, panel.log.replace("x", ""))
        right.set_ylabel(panel.ylabel2, fontsize=9)
        right.tick_params(labelsize=8)
        right.spines[["top"]].set_visible(False)
    for text, y in panel.levels.items():
        ax.axhline(y, color=LINE, linewidth=1.2, linestyle=(0, (4, 2)), gid=f"level {text}")
        ax.annotate(text, (1, y), (-2, 3), xycoords=("axes fraction", "data"), textcoords="offset points",
                    ha="right", va="bottom", fontsize=8)  # fmt: skip
    if not any(panel.lines.values()):
        ax.annotate("not measured yet", (0.5, 0.5), xycoords="axes fraction", ha="center", style="italic")
    else:
        _scale(ax, panel.log)
        xs = sorted({x for points in (*panel.lines.values(), *panel.second.values()) for x in points})
        ax.set_xticks(xs, [_short(x) for x in xs], rotation=45 if len(xs) > 7 else 0)
        ax.xaxis.set_minor_locator(NullLocator())
    above = 18 if len(handles) > 1 else 6  # points; the legend stands between title and axes
    ax.set_title(panel.title, fontsize=10, fontweight="bold", loc="left", pad=above)
    ax.set_xlabel(f"{panel.xlabel}\n{panel.note}" if panel.note else panel.xlabel, fontsize=9)
    ax.set_ylabel(panel.ylabel, fontsize=9)
    ax.tick_params(labelsize=8)
    ax.grid(alpha=0.3)
    ax.spines[["top"] if panel.second else ["top", "right"]].set_visible(False)
    if len(handles) > 1:
        place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (-0.03, 0.98), "columnspacing": 1.2}
        ax.legend(handles=handles, frameon=False, fontsize=8, ncols=3, **place)


def _draw_lines(ax: Axes, lines: Mapping[str, Mapping[float, float]], first: int) -> list[Any]:
    handles = []
    for i, (name, points) in enumerate(lines.items(), start=first):
        xs = sorted(points)
        style: dict[str, Any] = {"color": COLOURS[i], "marker": MARKERS[i], "linestyle": DASHES[i]}
        handles += ax.plot(
            xs, [points[x] for x in xs], label=name, gid=name, markersize=4, linewidth=1.6, **style
        )
    return handles


def _scale(ax: Axes, log: str) -> None:
    if "x" in log:
        ax.set_xscale("log", base=2)
    if "y" in log:
        ax.set_yscale("log")
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: _short(y)))
        ax.yaxis.set_minor_locator(NullLocator())
    else:
        ax.set_ylim(0, 1.1 * ax.dataLim.ymax)


def _short(x: float) -> str:
    """128, 1k for 1,024 and 1,000, 1M for their squares; three digits of what is no whole number of these."""
    for unit, letter in ((2**20, "M"), (1e6, "M"), (2**10, "k"), (1000, "k")):
        if x >= unit and x % unit == 0:
            return f"{x / unit:g}{letter}"
    return f"{x:,.3g}" if x < 1000 else f"{x:,.0f}"
