"""Above the chapters: pictures of a KV memory: who has which slots, and how many of them hold tokens.

Every picture is a pure function of snapshots onto a matplotlib figure: no pyplot, no file, no state. What
is drawn is first computed as plain data, in `segments.py`. `draw_steps.py` draws what happens over time.

Memory reads like a hex dump: rows of slots, addresses from left to right, then down. A sequence has the
colour of its id modulo the palette, and its id as a number; what is held but unused is hatched as well. A
block that several sequences share has the first one's colour, dots, and its reference count behind the id,
"5 x3"; a free block that a prefix cache can still find has a light hatch of its own.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias, cast

from minivllm.errors import InvalidOption
from minivllm.lab.segments import Segment, colour, format_bytes, label, segments
from minivllm.memory.contiguous import ContiguousSnapshot
from minivllm.memory.manager import Snapshot
from minivllm.memory.paged import PagedSnapshot
from minivllm.memory.prefix_cache import PrefixSnapshot
from minivllm.memory.sharing import SharedSnapshot

try:
    from matplotlib.axes import Axes
    from matplotlib.collections import PolyCollection
    from matplotlib.colors import to_rgb
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.patches import Patch
    from matplotlib.patheffects import withStroke
    from matplotlib.transforms import ScaledTranslation
except ImportError as error:
    raise InvalidOption('Pictures need matplotlib. Install it: pip install "minivllm[lab]"') from error

FREE, HATCH, LINE = "#F1F1F1", "/////", "#333333"
SHARED_HATCH, CACHED_HATCH = "....", "\\\\"
NOT_PHYSICAL = "placement not physical: each sequence has its own tensors"
NOTHING = "nothing is kept, all slots are free"

_Quad: TypeAlias = list[
    tuple[float, float]
]  # (slot within the row, row): upper left, upper right, the two below


def draw_memory_map(
    snapshot: Snapshot, *, ax: Axes | None = None, title: str | None = None, slots_per_row: int | None = None
) -> Figure:
    """One memory as rows of slots, on a figure of its own or on ax; returns the figure.

    slots_per_row is rounded up to whole blocks. Raises ValueError for a memory without slots.
    """
    title = "KV memory" if title is None else title
    if ax is None:
        return draw_film_strip([snapshot], titles=[title], slots_per_row=slots_per_row)
    per_row = _slots_per_row([snapshot], slots_per_row)
    figure = cast(Figure, ax.figure)
    extent, point = ax.get_window_extent(), figure.dpi / 72
    width, height = extent.width / point, extent.height / point
    _draw_map(ax, snapshot, title, per_row, -(-snapshot.num_slots // per_row), width, height)
    below = ax.transAxes + ScaledTranslation(0, -36 / 72, figure.dpi_scale_trans)
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, 0), bbox_transform=below, **_legend([snapshot]))
    return figure


def draw_memory_maps(
    named: Mapping[str, Snapshot], *, columns: int | None = None, slots_per_row: int | None = None
) -> Figure:
    """Several memories side by side, name -> snapshot, all at one scale."""
    names, snapshots = list(named), list(named.values())
    return draw_film_strip(snapshots, titles=names, columns=columns, slots_per_row=slots_per_row)


def draw_film_strip(
    snapshots: Iterable[Snapshot],
    *,
    titles: Sequence[str] | None = None,
    columns: int | None = None,
    slots_per_row: int | None = None,
) -> Figure:
    """Memory maps in reading order: one scale, one legend, a sequence in the same colour everywhere.

    Titles are 0, 1, 2, ... unless given. Raises ValueError for no snapshots, for a memory without slots,
    and where the titles are not as many as the snapshots.
    """
    snapshots = list(snapshots)
    titles = [f"snapshot {i}" for i in range(len(snapshots))] if titles is None else list(titles)
    _check_count("columns", columns)
    if not snapshots or len(titles) != len(snapshots):
        raise ValueError(f"{len(titles)} titles for {len(snapshots)} snapshots: give at least one of each.")
    per_row = _slots_per_row(snapshots, slots_per_row)
    num_rows = max(-(-snapshot.num_slots // per_row) for snapshot in snapshots)
    columns = (
        min(columns, len(snapshots))
        if columns
        else (len(snapshots) if len(snapshots) < 4 else 2 if len(snapshots) == 4 else 3)
    )
    down = -(-len(snapshots) // columns)
    width = 10 if columns > 1 or per_row > 16 else 7
    height = min(num_rows * (0.45 if num_rows < 4 else 0.28), 6.5 if down == 1 else 3.2)
    figure = Figure((width, down * (height + 1.1) + 0.6), dpi=100, layout="constrained")
    cast(ConstrainedLayoutEngine, figure.get_layout_engine()).set(w_pad=0.1, h_pad=0.08)
    axes = figure.subplots(down, columns, squeeze=False).ravel()
    for ax, snapshot, title in zip(axes, snapshots, titles, strict=False):
        _draw_map(ax, snapshot, title, per_row, num_rows, 72 * (width / columns - 0.7), 72 * height)
    for i, ax in enumerate(axes):
        if i >= len(snapshots):
            ax.set_axis_off()
        elif i % columns and _unit(snapshots[i]) == _unit(snapshots[i - 1]):
            ax.set_ylabel("")  # as to its left
    figure.legend(loc="outside lower center", **_legend(snapshots))
    return figure


def _slots_per_row(snapshots: Sequence[Snapshot], asked: int | None) -> int:
    """Whole blocks of every snapshot. Unless asked, about four times the square root of all slots."""
    if any(snapshot.num_slots < 1 for snapshot in snapshots):
        raise ValueError("A memory without slots has no picture.")
    _check_count("slots_per_row", asked)
    grain = math.lcm(*(_unit(snapshot)[0] for snapshot in snapshots))
    longest = -(-max(snapshot.num_slots for snapshot in snapshots) // grain) * grain
    per_row = grain if asked is None else -(-asked // grain) * grain
    while asked is None and per_row**2 < 16 * longest:
        per_row *= 2
    return min(longest, per_row)


def _check_count(name: str, value: object) -> None:
    if value is not None and (
        not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 2**20
    ):
        raise InvalidOption(f"{name}={value!r} is not possible: it must be a whole number of at least 1.")


def _unit(snapshot: Snapshot) -> tuple[int, str]:
    """What addresses count: (slots, name)."""
    return (snapshot.block_size, "block") if isinstance(snapshot, PagedSnapshot) else (1, "slot")


def _summary(snapshot: Snapshot) -> str:
    """The books in words; the parts may be put on different lines."""

    slots = {"held": f"{snapshot.held:,} slots", "used": f"{snapshot.used:,}", "free": f"{snapshot.free:,}"}
    parts = [
        f"{name} {count} ({format_bytes(getattr(snapshot, name) * snapshot.bytes_per_token)})"
        for name, count in slots.items()
    ]
    if snapshot.held == 0:
        parts.append(NOTHING)
    else:
        of_held, of_all = snapshot.used / snapshot.held, snapshot.used / snapshot.num_slots
        parts.append(f"utilisation {of_held:.0%} of held, {of_all:.0%} of all")
    if cached := _num_cached(snapshot):
        parts.append(f"cached, of the free, {cached:,} blocks")
    if shared := _num_shared(snapshot):
        parts.append(f"shared {shared:,} blocks")
    if isinstance(snapshot, ContiguousSnapshot):
        parts.append(f"longest free run {snapshot.largest_free_run:,}")
    elif not isinstance(snapshot, PagedSnapshot) and snapshot.held:
        parts.append(NOT_PHYSICAL)
    unbroken = [part if part == NOT_PHYSICAL else part.replace(" ", "\N{NO-BREAK SPACE}") for part in parts]
    return " · ".join(unbroken)


def _num_shared(snapshot: Snapshot) -> int:
    """Blocks with a reference count of 2 or more."""
    return isinstance(snapshot, SharedSnapshot) and sum(n > 1 for n in snapshot.ref_count.values())


def _num_cached(snapshot: Snapshot) -> int:
    """Free blocks that can be found by their contents."""
    return isinstance(snapshot, PrefixSnapshot) and len(snapshot.cached)


def _quads(start: int, length: int, per_row: int) -> list[_Quad]:
    """Rectangles over the slots, cut where rows end; row r lies about y = r."""
    quads: list[_Quad] = []
    end = start + length
    while start < end:
        row, x = divmod(start, per_row)
        stop = min(end, start - x + per_row)
        right, top, bottom = x + stop - start, row - 0.42, row + 0.42
        quads.append([(x, top), (right, top), (right, bottom), (x, bottom)])
        start = stop
    return quads


def _draw_map(
    ax: Axes, snapshot: Snapshot, title: str, per_row: int, num_rows: int, width: float, height: float
) -> None:
    """One map, to the scale of num_rows rows of per_row slots; width and height of the axes in points."""
    slot, found = width / per_row, segments(snapshot)
    taken = [(s, s.seq_id) for s in found if s.seq_id is not None]
    used = [(i, quad) for s, i in taken for quad in _quads(s.start, s.used, per_row)]
    held = [(i, quad) for s, i in taken for quad in _quads(s.start + s.used, s.length - s.used, per_row)]
    each = range(snapshot.num_slots if slot > 7 else 0)  # lines between slots, where they are wide enough
    thin = 0.8 if slot * _unit(snapshot)[0] > 8 else 0.4

    def add(name: str, quads: list[_Quad], **style: Any) -> None:
        collection = PolyCollection(quads, gid=name, **style)
        collection.set_clip_on(False)  # or the outermost lines would be half as thick
        ax.add_collection(collection, autolim=False)

    def whole(chosen: Iterable[Segment]) -> list[_Quad]:
        return [quad for s in chosen for quad in _quads(s.start, s.length, per_row)]

    free = whole(s for s in found if s.seq_id is None)
    add("free", free, facecolors=FREE, edgecolors="#BBBBBB", linewidths=thin / 2)
    if cached := whole(s for s in found if s.cached):
        add("cached", cached, facecolors="white", edgecolors="#BBBBBB", linewidths=0, hatch=CACHED_HATCH)
    light = [tuple(0.3 * c + 0.7 for c in to_rgb(colour(i))) for i, _ in held]
    add("held", [q for _, q in held], facecolors=light, edgecolors="#777777", linewidths=0, hatch=HATCH)
    add("used", [q for _, q in used], facecolors=[colour(i) for i, _ in used], linewidths=0)
    slots = [quad for i in each for quad in _quads(i, 1, per_row)]
    add("slots", slots, facecolors="none", edgecolors="#FFFFFF99", linewidths=0.5)
    if shared := whole(s for s in found if s.ref_count > 1):
        add("shared", shared, facecolors="none", edgecolors="#FFFFFF", linewidths=0, hatch=SHARED_HATCH)
    add("outline", whole(s for s, _ in taken), facecolors="none", edgecolors=LINE, linewidths=thin)
    for s, i in taken:
        places = _quads(s.start, s.used, per_row), _quads(s.start, s.length, per_row)
        texts = [f"{label(i)} x{s.ref_count}", f"x{s.ref_count}"] if s.ref_count > 1 else [label(i)]
        for text in texts:
            if _write_id(ax, text, places, slot, min(9, 0.55 * height / num_rows)):
                break
    ax.set(xlim=(0, per_row), ylim=(num_rows - 0.5, -0.5))
    _label(ax, snapshot, per_row, num_rows, width, height)
    lines = [line.strip(" ·") for line in textwrap.wrap(_summary(snapshot), max(24, int(width / 4.2)))]
    ax.set_title("\n".join(lines), fontsize=8, loc="left")
    above = ax.transAxes + ScaledTranslation(0, (6 + 9.8 * len(lines)) / 72, ax.figure.dpi_scale_trans)
    bold: dict[str, Any] = {"fontsize": 11, "fontweight": "bold", "gid": "title", "parse_math": False}
    ax.text(0, 1, title, transform=above, **bold)


def _write_id(ax: Axes, text: str, places: Iterable[list[_Quad]], slot: float, font: float) -> bool:
    """Write the id into the widest rectangle of the first place that has room for it; whether one has."""
    for quads in filter(None, places):
        (left, y), (right, _), *_ = max(quads, key=lambda quad: quad[1][0] - quad[0][0])
        size = min(font, ((right - left) * slot - 2) / (0.66 * len(text)))
        if size >= 6:
            halo = withStroke(linewidth=2, foreground="white")
            ax.text((left + right) / 2, y + 0.42, text, fontsize=size, gid="seq_id", path_effects=[halo],
                    ha="center", va="center_baseline")  # fmt: skip
            return True
    return False


def _label(ax: Axes, snapshot: Snapshot, per_row: int, num_rows: int, width: float, height: float) -> None:
    """Addresses as on a hex dump: the label of a row and of a column add up."""
    unit, name = _unit(snapshot)
    across, rows = per_row // unit, -(-snapshot.num_slots // per_row)
    every = 1 << max(0, math.ceil(math.log2(across * 24 / width)))
    columns = range(0, across, every)
    ax.set_xticks([(i + 0.5) * unit for i in columns], [f"{i:,}" for i in columns], fontsize=8)
    every = 1 << max(0, math.ceil(math.log2(num_rows * 11 / height)))
    firsts = range(0, rows, every)
    ax.set_yticks(firsts, [f"{i * across:,}" for i in firsts] if num_rows > 1 else [""], fontsize=8)
    of_slots = f" (1 block = {unit} slot{'s' * (unit > 1)})" if name == "block" else ""
    ax.set_xlabel(f"{name} within its row{of_slots}", fontsize=8)
    ax.set_ylabel(f"first {name}\nof the row" if num_rows > 1 else "", fontsize=8)
    ax.tick_params(length=2 if num_rows > 1 else 0)
    ax.spines[:].set_visible(False)


def _legend(snapshots: Sequence[Snapshot]) -> dict[str, Any]:
    """What is shared or cached is explained only where there is some."""
    used = Patch(facecolor="#777777", edgecolor=LINE, label="used: holds a token")
    held = Patch(facecolor="#E4E4E4", edgecolor="#777777", hatch=HATCH, label="held, but unused")
    free = Patch(facecolor=FREE, edgecolor="#BBBBBB", label="free")
    handles = [used, held, free]
    if any(map(_num_shared, snapshots)):
        label = "shared, xN: by N sequences"
        handles.append(Patch(facecolor="#777777", edgecolor="#FFFFFF", hatch=SHARED_HATCH, label=label))
    if any(map(_num_cached, snapshots)):
        label = "cached: free, and can be found"
        handles.append(Patch(facecolor="white", edgecolor="#BBBBBB", hatch=CACHED_HATCH, label=label))
    style = {"ncols": 3, "frameon": False, "fontsize": 9, "title_fontsize": 9}
    return {
        "handles": handles,
        "title": "colour and number: the sequence (colours repeat, numbers do not)",
        **style,
    }
