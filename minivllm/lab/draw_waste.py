"""Above the chapters: a picture of what contiguous memory is held for, slot by slot.

A sequence's run has up to four parts: tokens, slots that a later token will fill, slots that the policy asked
for and no token fills, and what the allocator added to round the run up. Outside the runs lie free slots;
those in runs too short for the request that waits are of no use to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from minivllm.lab.draw import FREE, LINE
from minivllm.lab.segments import colour
from minivllm.memory.contiguous import ContiguousSnapshot

# isort: split
# Below draw.py, which says what to do where matplotlib is missing.
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

# kind -> (label, hatch)
PARTS = {
    "used": ("holds a token", None),
    "later": ("reserved: a later token fills it", "////"),
    "never": ("internal: asked for, never filled", "xxxx"),
    "rounding": ("internal: the allocator's rounding", "oo"),
    "useless": ("external: free, but too short a run", "...."),
    "free": ("free", None),
}


class Part(NamedTuple):
    """Slots start to start + length - 1, all of one kind (of PARTS); seq_id None: of no sequence."""

    kind: str
    seq_id: int | None
    start: int
    length: int


def waste_parts(snapshot: ContiguousSnapshot, final: Mapping[int, int], wanted: int = 0) -> list[Part]:
    """Every slot once, in order of address.

    final: sequence id -> tokens in memory when it ends. wanted: the run, in slots, that the request in front
    of the queue needs; 0: nobody waits.
    """
    found = []
    for s in snapshot.sequences:
        last = min(final[s.seq_id], s.reserved)
        ends = {"used": s.used, "later": last, "never": s.reserved, "rounding": s.held}
        at = 0
        for kind, end in ends.items():
            found.append(Part(kind, s.seq_id, s.start + at, max(0, end - at)))
            at = max(at, end)
    found += [
        Part("useless" if length < wanted else "free", None, start, length)
        for start, length in snapshot.free_runs
    ]
    return sorted((part for part in found if part.length), key=lambda part: part.start)


def draw_waste(parts: Sequence[Part], *, slots_per_row: int = 64) -> Figure:
    """The parts as rows of slots, each with its number of slots in it; raises ValueError for none."""
    if not parts:
        raise ValueError("A memory without slots has no picture.")
    num_slots = parts[-1].start + parts[-1].length
    num_rows = -(-num_slots // slots_per_row)
    figure = Figure((9, 0.55 * num_rows + 1.4), dpi=100, layout="constrained")
    ax = figure.subplots()
    for part in parts:
        _draw_part(ax, part, slots_per_row)
    ax.set(xlim=(0, min(num_slots, slots_per_row)), ylim=(num_rows - 0.5, -0.6), xlabel="slot within its row")
    ax.set_yticks(range(num_rows), [f"{row * slots_per_row:,}" for row in range(num_rows)])
    ax.set_ylabel("first slot of the row" if num_rows > 2 else "")
    ax.tick_params(labelsize=8)
    ax.spines[:].set_visible(False)
    handles = [
        Patch(facecolor=_fill(kind, "#777777"), edgecolor=LINE, hatch=hatch, label=label)
        for kind, (label, hatch) in PARTS.items()
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def _draw_part(ax: Axes, part: Part, per_row: int) -> None:
    of = FREE if part.seq_id is None else colour(part.seq_id)
    start, end = part.start, part.start + part.length
    while start < end:
        row, x = divmod(start, per_row)
        length = min(end - start, per_row - x)
        style: dict[str, Any] = {
            "facecolor": _fill(part.kind, of),
            "hatch": PARTS[part.kind][1],
            "edgecolor": LINE,
        }
        ax.add_patch(Rectangle((x, row - 0.36), length, 0.72, linewidth=0.7, **style))
        if length >= 0.025 * per_row:
            box: dict[str, Any] = {
                "boxstyle": "round,pad=0.12",
                "facecolor": "white",
                "edgecolor": "none",
                "alpha": 0.9,
            }
            ax.text(x + length / 2, row, f"{length}", ha="center", va="center", fontsize=9, bbox=box)
        start += length


def _fill(kind: str, of: str) -> tuple[float, float, float]:
    weight = {"used": 1.0, "later": 0.35, "never": 0.15, "rounding": 0.15}.get(kind)
    if weight is None:
        return to_rgb(FREE)
    red, green, blue = (weight * c + 1 - weight for c in to_rgb(of))
    return red, green, blue
