"""Above the chapters: pictures of the buddy allocator: how a run is split, and how two are joined again.

The real allocator does the work. What lies between two of its states, one halving at a time, follows from
the run that was split and the run that came of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from minivllm.errors import OutOfMemory
from minivllm.lab.draw import FREE, HATCH, LINE
from minivllm.lab.segments import PALETTE
from minivllm.memory.buddy import BuddyAllocator

# isort: split
# Below draw.py, which says what to do where matplotlib is missing.
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

Run: TypeAlias = tuple[int, int]  # start, length


@dataclass(frozen=True)
class BuddyState:
    """One row of the picture: free runs, and (name, start, slots asked for, length) of each run in use."""

    title: str
    free: tuple[Run, ...]
    used: tuple[tuple[str, int, int, int], ...]


def trace_buddy(num_slots: int, operations: Iterable[tuple[str, int]]) -> list[BuddyState]:
    """Let a BuddyAllocator do the operations, (name, slots to allocate) or (name, 0) to free, one by one.

    Returns the states after each, and before it those that each halving or joining alone would leave.
    """
    allocator = BuddyAllocator(num_slots)
    used: dict[str, tuple[int, int]] = {}  # name -> (start, slots asked for)

    def state(title: str, free: Sequence[Run]) -> BuddyState:
        rows = ((name, start, n, allocator.held(start)) for name, (start, n) in used.items())
        return BuddyState(title, tuple(free), tuple(rows))

    states = [state(f"{num_slots} free slots", allocator.free_runs)]
    for name, n in operations:
        before = allocator.free_runs
        if n:
            title = f"{name} = allocate({n})"
            try:
                start = allocator.allocate(n)
            except OutOfMemory:
                states.append(state(f"allocate({n}): OutOfMemory", before))
                continue
            inner = (start, allocator.held(start))
            outer = _around(start, before)
            rest = [run for run in before if run != outer]
            steps = _halvings(outer, inner)
            states += [state(f"split {outer[1] >> i}", sorted(rest + runs)) for i, runs in enumerate(steps)]
            used[name] = start, n
        else:
            title = f"free({name})"
            start, _ = used[name]
            inner = (start, allocator.held(start))
            allocator.free(start)
            del used[name]
            outer = _around(start, allocator.free_runs)
            rest = [run for run in allocator.free_runs if run != outer]
            steps = _halvings(outer, inner)[::-1]  # from all apart to one cut
            sizes = [inner[1] << i for i in range(len(steps))]
            titles = [title, *(f"join two of {size}" for size in sizes)]
            frees = [*(sorted(rest + runs) for runs in steps), allocator.free_runs]
            states += [state(t, free) for t, free in zip(titles[:-1], frees[:-1], strict=True)]
            title = titles[-1]
        states.append(state(title, allocator.free_runs))
    return states


def _around(slot: int, runs: Iterable[Run]) -> Run:
    return next((start, length) for start, length in runs if start <= slot < start + length)


def _halvings(outer: Run, inner: Run) -> list[list[Run]]:
    """The runs that outer is cut into by one halving, by two, ... until inner is one of them."""
    steps, (start, length), halves = [], outer, list[Run]()
    while length > inner[1]:
        length //= 2
        left, right = (start, length), (start + length, length)
        start = (left if inner[0] < right[0] else right)[0]
        halves.append(right if start == left[0] else left)
        steps.append([*halves, (start, length)])
    return steps


def draw_buddy(states: Sequence[BuddyState]) -> Figure:
    """One row for each state, from top to bottom: every run is a box with its length in it.

    Raises ValueError for no states.
    """
    if not states:
        raise ValueError("A picture of a buddy allocator needs at least one state.")
    num_slots = max(start + length for start, length in _runs(states[0]))
    figure = Figure((9, 0.36 * len(states) + 0.9), dpi=100, layout="constrained")
    ax = figure.subplots()
    colours: dict[str, str] = {}
    for row, state in enumerate(states):
        ax.text(-0.015 * num_slots, row, state.title, ha="right", va="center", fontsize=9, family="monospace")
        for start, length in state.free:
            ax.add_patch(Rectangle((start, row - 0.38), length, 0.76, facecolor=FREE, edgecolor="#777777"))
            ax.text(
                start + length / 2, row, f"{length}", ha="center", va="center", fontsize=9, color="#555555"
            )
        for name, start, n, length in state.used:
            fill = colours.setdefault(name, PALETTE[len(colours) % len(PALETTE)])
            light = tuple(0.3 * c + 0.7 for c in to_rgb(fill))
            box: dict[str, Any] = {"height": 0.76, "edgecolor": LINE}
            ax.add_patch(Rectangle((start, row - 0.38), n, facecolor=fill, **box))
            if length > n:
                ax.add_patch(
                    Rectangle((start + n, row - 0.38), length - n, facecolor=light, hatch=HATCH, **box)
                )
            text = f"{name}: {n}" + (f" + {length - n}" if length > n else "")
            halo: dict[str, Any] = {
                "boxstyle": "round,pad=0.15",
                "facecolor": "white",
                "edgecolor": "none",
                "alpha": 0.85,
            }
            ax.text(start + length / 2, row, text, ha="center", va="center", fontsize=9, bbox=halo)
    ax.set(xlim=(0, num_slots), ylim=(len(states) - 0.5, -0.5), xlabel="slot")
    ax.set_yticks([])
    ax.set_xticks(range(0, num_slots + 1, max(1, num_slots // 8)))
    ax.tick_params(labelsize=8)
    ax.spines[:].set_visible(False)
    handles = [
        Patch(facecolor="#777777", edgecolor=LINE, label="asked for"),
        Patch(facecolor="#E4E4E4", edgecolor=LINE, hatch=HATCH, label="rounding, to a power of two"),
        Patch(facecolor=FREE, edgecolor="#777777", label="a free run and its length"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def _runs(state: BuddyState) -> list[Run]:
    return [*state.free, *((start, length) for _, start, _, length in state.used)]
