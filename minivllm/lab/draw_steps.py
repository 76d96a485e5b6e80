"""Above the chapters: pictures of what an engine did: who computed when, and what memory it took.

As in `draw.py`, every picture is a pure function onto a matplotlib figure, and what a timeline draws is
first computed as plain data, in `timeline.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

from minivllm.lab.draw import HATCH, LINE
from minivllm.lab.segments import byte_unit, label
from minivllm.lab.timeline import Bar, Preemption, timeline

# isort: split
# Below draw.py, which says what to do where matplotlib is missing.
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

if TYPE_CHECKING:
    from minivllm.lab.record import StepRecord
    from minivllm.step import Step

# kind -> (colour, share of the row's height, hatch)
KINDS = {
    "prefill": ("#E69F00", 0.8, None),
    "recompute": ("#F3CBA7", 0.8, HATCH),
    "decode": ("#0072B2", 0.36, None),
}
LABELS = {
    "prefill": "prefill: several tokens, or the first",
    "recompute": "recompute: tokens that memory had before",
    "decode": "decode: one token",
}
BLUE, PREEMPTED, WAITING = "#0072B2", "#D55E00", "#999999"


def draw_timeline(steps: Iterable[Step], *, ax: Axes | None = None, by: str = "time") -> Figure:
    """One row per request, one bar per step that any of its sequences took part in; returns the figure.

    by="time": the x axis is in ms or s since the first step began; by="step": the number of the step.
    Where there are too many bars to tell apart, equal ones of steps in a row are drawn as one.
    Raises ValueError where no step has a request.
    """
    steps = list(steps)
    found = timeline(steps, by)
    if not found.request_ids:
        raise ValueError("A timeline needs a step with a request in it.")
    num_rows = len(found.request_ids)
    if ax is None:
        ax = _figure(9, min(0.24 * num_rows, 9) + 1.2).subplots()
    row_of = {i: row for row, i in enumerate(found.request_ids)}
    ends = [bar.end for bar in found.bars] + [wait.end for wait in found.waits]
    last = max([*ends, *(p.start for p in found.preemptions)])
    scale, axis = _time_unit(last) if by == "time" else (1, "step")
    height_in_points = ax.get_window_extent().height * 72 / ax.figure.dpi
    many = len(steps) > 150 or height_in_points / num_rows < 6
    drawn = _joined(found.bars) if many else found.bars
    for kind, (colour, height, hatch) in KINDS.items():
        bars = [(bar.start, bar.end, row_of[bar.request_id]) for bar in drawn if bar.kind == kind]
        if not bars:
            continue  # constrained layout fails with empty artists
        start, end, row = np.array(bars, dtype=float).reshape(-1, 3).T
        top, bottom = row - height / 2, row + height / 2
        corners = [(start * scale, top), (end * scale, top), (end * scale, bottom), (start * scale, bottom)]
        verts = np.stack([np.stack(corner, axis=-1) for corner in corners], axis=1)
        edge: dict[str, Any] = {
            "linewidths": 0 if many else 0.5,
            "edgecolors": "white" if not hatch else LINE,
        }
        ax.add_collection(
            PolyCollection(
                cast(Any, verts),
                facecolors=colour,
                hatch=hatch,
                gid=kind,
                snap=False if many else None,
                **edge,
            )
        )
    if found.waits:
        lines = [
            [(t * scale, row_of[wait.request_id]) for t in (wait.start, wait.end)] for wait in found.waits
        ]
        ax.add_collection(LineCollection(lines, colors=WAITING, linewidths=1.2, gid="waiting", zorder=0.9))
    for swapped in (False, True):
        lost = [p for p in found.preemptions if p.swapped == swapped]
        if lost:
            x, y = [p.start * scale for p in lost], [row_of[p.request_id] for p in lost]
            ax.add_line(_mark(x, y, swapped, clip_on=False))
    first = 0 if by == "time" else steps[0].index - 0.5
    ax.set(
        xlim=(first, max(last * scale, first + 1e-9)),
        ylim=(num_rows - 0.4, -0.6),
        xlabel=axis,
        ylabel="request id",
    )
    if by == "step":
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    rows = range(0, num_rows, math.ceil(11 * num_rows / height_in_points))
    ax.set_yticks(rows, [label(found.request_ids[row]) for row in rows])
    _finish(ax, _timeline_legend(found.preemptions), 3)
    return cast(Figure, ax.figure)


def _mark(x: Sequence[float], y: Sequence[float], swapped: bool, **style: Any) -> Line2D:
    """Where requests were preempted: a cross, or a triangle, out to the CPU, where they were swapped."""
    name = "swapped out" if swapped else "preempted"
    return Line2D(x, y, linestyle="", marker="v" if swapped else "x", markersize=6, markeredgewidth=1.8,
                  color=PREEMPTED, label=name, gid=name, **style)  # fmt: skip


def _timeline_legend(preemptions: Sequence[Preemption]) -> list[Any]:
    bars = [
        Patch(facecolor=fill, edgecolor=LINE if hatch else "white", hatch=hatch, label=LABELS[kind])
        for kind, (fill, _, hatch) in KINDS.items()
    ]
    marks = [_mark([], [], swapped) for swapped in sorted({False, *(p.swapped for p in preemptions)})]
    return [*bars, Line2D([], [], color=WAITING, linewidth=1.2, label="waiting"), *marks]


def draw_utilisation(records: Iterable[StepRecord], *, ax: Axes | None = None) -> Figure:
    """Bytes held and used over time under the memory's budget; below, requests running and waiting.

    A value holds from the start of its step to the start of the next. A given ax must come from subplots:
    it is parted in two. Raises ValueError for no records, and for an ax that cannot be parted.
    """
    records = list(records)
    if not records:
        raise ValueError("A picture of utilisation needs at least one record.")
    upper = _figure(9, 4.2).subplots() if ax is None else ax
    place = upper.get_subplotspec()
    if place is None:
        raise ValueError("ax must come from subplots: it is parted in two.")
    parts = place.subgridspec(2, 1, height_ratios=(3, 1))
    upper.set_subplotspec(parts[0])
    figure = cast(Figure, upper.figure)
    lower = figure.add_subplot(parts[1], sharex=upper)
    zero, end = records[0].step.start, records[-1].step.end
    scale, label = _time_unit(end - zero)
    edges = [(t - zero) * scale for t in (*(r.step.start for r in records), end)]
    snapshots = [record.snapshot for record in records]
    size, unit = byte_unit(max(s.num_slots * s.bytes_per_token for s in snapshots))
    held = [snapshot.held_bytes / size for snapshot in snapshots]
    used = [snapshot.used * snapshot.bytes_per_token / size for snapshot in snapshots]
    budget = [snapshot.num_slots * snapshot.bytes_per_token / size for snapshot in snapshots]
    in_use: dict[str, Any] = {"edgecolor": BLUE, "linewidth": 0.8, "fill": True}
    line: dict[str, Any] = {"baseline": None, "linewidth": 1.6}
    upper.stairs(budget, edges, label="budget", gid="budget", color=LINE, linestyle="--", **line)
    upper.stairs(held, edges, label="held", gid="held", facecolor="#D6E9F5", hatch=HATCH, **in_use)
    upper.stairs(used, edges, label="used", gid="used", facecolor=BLUE, **in_use)
    running = [len({part.request_id for part in record.step.scheduled}) for record in records]
    waiting = [len(record.step.waiting) for record in records]
    lower.stairs(running, edges, label="running", gid="running", color="#009E73", **line)
    lower.stairs(waiting, edges, label="waiting", gid="waiting", color=PREEMPTED, linestyle=":", **line)
    upper.set(xlim=(0, max(edges[-1], 1e-9)), ylim=(0, 1.06 * max(budget)), ylabel=f"KV memory ({unit})")
    upper.tick_params(labelbottom=False)
    lower.set(ylim=(0, 1.15 * max(1, *running, *waiting)), xlabel=label, ylabel="requests")
    lower.yaxis.set_major_locator(MaxNLocator(3, integer=True))
    _finish(upper, None, 3)
    _finish(lower, None, 2)
    return figure


def _joined(bars: Sequence[Bar]) -> list[Bar]:
    """Bars of one request and kind in steps in a row as one bar, or its edges would hide it."""
    joined: list[Bar] = []
    latest: dict[int, Bar] = {}
    for bar in bars:
        before = latest.get(bar.request_id)
        if before is not None:
            if (before.kind, before.step + 1) == (bar.kind, bar.step):
                bar = bar._replace(start=before.start)
            else:
                joined.append(before)
        latest[bar.request_id] = bar
    return [*joined, *latest.values()]


def _figure(width: float, height: float) -> Figure:
    figure = Figure((width, height), dpi=100, layout="constrained")
    cast(ConstrainedLayoutEngine, figure.get_layout_engine()).set(w_pad=0.1, h_pad=0.08)
    return figure


def _time_unit(seconds: float) -> tuple[float, str]:
    """(units per second, label of the axis)."""
    return (1, "time since the first step (s)") if seconds >= 2 else (1000, "time since the first step (ms)")


def _finish(ax: Axes, handles: list[Any] | None, columns: int) -> None:
    ax.spines[["top", "right"]].set_visible(False)
    ax.tick_params(labelsize=8)
    above: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0.2}
    ax.legend(handles=handles, ncols=columns, frameon=False, fontsize=9, **above)
