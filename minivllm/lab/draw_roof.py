"""Above the chapters: the roofline as a picture: roofs, ridges, and work as numbered points below them.

As in `draw.py`, a pure function onto a matplotlib figure.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any, cast

from minivllm.lab.draw import LINE
from minivllm.lab.roofline import Machine, Point, format_si

# isort: split
# Below draw.py, which says what to do where matplotlib is missing.
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, NullFormatter

OTHER_ROOFS = (("#D55E00", "--"), ("#009E73", "-."), ("#CC79A7", ":"), ("#E69F00", (0, (6, 1, 1, 1, 1, 1))))
ROOF, POINT = "#0072B2", "#E69F00"
MARKERS = "osD^vP"
WIDTH = 92  # characters of a line of the legend


def draw_roofline(machine: Machine, points: Sequence[Point], *, others: Sequence[Machine] = ()) -> Figure:
    """FLOP/s over FLOP/byte, both on log scales: the machine's roof, other roofs dashed, and the work.

    Work that was timed is a filled point at what it achieved; other work is a hollow point on the roof, at
    the most it can be. The legend says what each number is.
    """
    points, others = list(points), list(others)
    figure = Figure((7, 3.5 + 0.19 * (len(points) + len(others) + 1)), dpi=100, layout="constrained")
    cast(ConstrainedLayoutEngine, figure.get_layout_engine()).set(w_pad=0.08, h_pad=0.08)
    ax = figure.subplots()
    roofs = [machine, *others]
    at = [*(roof.ridge for roof in roofs), *(point.intensity for point in points)]
    left, right = min(at) / 4, max(at) * 6
    heights = [machine.roof(left), *(point.flops_per_second or machine.roof(left) for point in points)]
    bottom, top = min(heights) / 2.5, 3 * max(roof.flops_per_second for roof in roofs)
    ax.set(xscale="log", yscale="log", xlim=(left, right), ylim=(bottom, top))
    for i, roof in enumerate(roofs):
        color, dashes = OTHER_ROOFS[(i - 1) % len(OTHER_ROOFS)] if i else (ROOF, "-")
        look: dict[str, Any] = {"color": color, "linestyle": dashes, "linewidth": 1.6 if i else 2.6}
        xs = [left, roof.ridge, right]
        ax.plot(xs, [roof.roof(x) for x in xs], label=_describe(roof), gid=f"roof {roof.name}", **look)
        _mark_ridge(ax, roof, color, named=roof is machine)
    _mark_sides(ax, machine, left, right)
    for number, point in enumerate(points, start=1):
        _draw_point(ax, machine, number, point)
    _label(ax)
    style: dict[str, Any] = {"frameon": False, "fontsize": 8, "handlelength": 2.6, "labelspacing": 0.35}
    legend = figure.legend(loc="outside lower center", alignment="left", **style)
    for text in legend.get_texts():
        text.set_parse_math(False)
    return figure


def _mark_ridge(ax: Axes, roof: Machine, color: str, named: bool) -> None:
    where = (roof.ridge, roof.flops_per_second)
    ax.plot(*where, marker="o", markersize=5, color=color, linestyle="", gid="ridge")
    if named:
        place: dict[str, Any] = {"xytext": (0, 6), "textcoords": "offset points", "ha": "center"}
        ax.annotate(f"ridge {_number(roof.ridge)}", where, gid="ridge", fontsize=9, **place)


def _mark_sides(ax: Axes, machine: Machine, left: float, right: float) -> None:
    """Which of the two rates holds work back, on either side of the machine's ridge."""
    ax.axvline(machine.ridge, color="#999999", linewidth=0.8, linestyle=":", zorder=0.5)
    for text, ha, shift in (("memory-bound", "right", -6), ("compute-bound", "left", 6)):
        place: dict[str, Any] = {
            "xytext": (shift, 5),
            "textcoords": "offset points",
            "ha": ha,
            "va": "bottom",
        }
        x = ax.get_xaxis_transform()
        ax.annotate(text, (machine.ridge, 0), xycoords=x, fontsize=8.5, color="#555555", gid="side", **place)


def _draw_point(ax: Axes, machine: Machine, number: int, point: Point) -> None:
    roof, achieved = machine.roof(point.intensity), point.flops_per_second
    if achieved is None:
        text = f"at most {format_si(roof, 'FLOP/s')}, not measured"
    else:
        text = f"{format_si(achieved, 'FLOP/s')}, {achieved / roof:.0%} of the roof"
    label = f"{number}  {point.label}: {_number(point.intensity)} FLOP/byte, {text}"
    look: dict[str, Any] = {
        "marker": MARKERS[(number - 1) % len(MARKERS)],
        "markersize": 8,
        "markeredgecolor": LINE,
        "markerfacecolor": "white" if achieved is None else POINT,
        "linestyle": "",
        "zorder": 3,
    }
    y = roof if achieved is None else achieved
    ax.plot([point.intensity], [y], label=_fold(label), gid=f"point {number}", **look)
    place: dict[str, Any] = {"xytext": (7, -4), "textcoords": "offset points", "va": "top", "gid": "number"}
    ax.annotate(str(number), (point.intensity, y), fontsize=9, fontweight="bold", **place)


def _describe(roof: Machine) -> str:
    rates = f"{format_si(roof.flops_per_second, 'FLOP/s')}, {format_si(roof.bytes_per_second, 'B/s')}"
    return _fold(f"{roof.name}, {roof.dtype}, {roof.source}: {rates}, ridge at {_number(roof.ridge)}")


def _fold(text: str) -> str:
    return textwrap.fill(text, WIDTH, subsequent_indent="    ")


def _number(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def _label(ax: Axes) -> None:
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,g}"))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: format_si(y, "").rstrip() if y > 0 else ""))
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_minor_formatter(NullFormatter())
    ax.set_xlabel("intensity: FLOPs for each byte moved (log scale)", fontsize=9)
    ax.set_ylabel("FLOP/s (log scale)", fontsize=9)
    ax.tick_params(labelsize=9)
    ax.grid(which="major", color="#E5E5E5", linewidth=0.7)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
