"""Above the chapters: a picture of block tables: where a sequence's tokens are, and how they are found.

As in `draw.py`, the picture is a pure function of a snapshot onto a matplotlib figure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from minivllm.lab.draw import FREE, HATCH, LINE
from minivllm.lab.segments import colour, label
from minivllm.memory.paged import PagedSequenceMemory, PagedSnapshot

# isort: split
# Below draw.py, which says what to do where matplotlib is missing.
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import ConnectionPatch, Rectangle

WIDTH = 1.5  # of a slot; its height is 1
TABLE = 1.7  # width of a table's entry
ARROWS = 2.6  # width of the space between table and pool


def draw_block_tables(
    snapshot: PagedSnapshot, *, texts: Mapping[int, Sequence[str]] | None = None, title: str = ""
) -> Figure:
    """Each sequence's tokens in order, its block table, and the blocks of the pool that the table names. To a
    block that several share, each has an arrow; it is drawn as that with most tokens in it has it.

    texts: sequence id -> what to write for each of its tokens; without it, their positions. For a pool of
    at most about 20 blocks. Raises ValueError for a snapshot in which no sequence has a block.
    """
    rows = [(s, i) for s in snapshot.sequences for i in range(len(s.block_ids))]
    if not rows:
        raise ValueError("No sequence has a block, so there is no table to draw.")
    size, num_blocks = snapshot.block_size, snapshot.num_slots // snapshot.block_size
    left, pool = size * WIDTH, size * WIDTH + TABLE + ARROWS
    gaps = len(snapshot.sequences) - 1
    height = max(len(rows) + gaps, num_blocks)
    figure = Figure((7.2, 0.34 * height + 0.9), dpi=100, layout="constrained")
    ax = figure.subplots()
    ax.set(xlim=(-1.4, pool + left + 0.1), ylim=(height + 0.1, -1.3))
    ax.set_axis_off()
    for x, text in (
        (left / 2, "tokens, in order"),
        (left + TABLE / 2, "block\ntable"),
        (pool + left / 2, "the pool"),
    ):
        ax.text(x, -0.35, text, ha="center", va="bottom", fontsize=9, fontweight="bold")
    if title:
        ax.set_title(title, fontsize=10, loc="left")
    where: dict[int, list[tuple[float, PagedSequenceMemory, int]]] = {}
    for row, (s, i) in enumerate(rows):
        y = row + snapshot.sequences.index(s)
        where.setdefault(s.block_ids[i], []).append((y, s, i))
        if i == 0:
            ax.text(-0.3, y + 0.5, f"seq {label(s.seq_id)}", ha="right", va="center", fontsize=9)
        _block(ax, 0, y, s, i, size, texts)
        _cell(ax, left, y, TABLE, str(s.block_ids[i]), facecolor="white")
    for block in range(num_blocks):
        ax.text(pool - 0.15, block + 0.5, f"{block}", ha="right", va="center", fontsize=8, color="#555555")
        if block not in where:
            _block(ax, pool, block, None, 0, size, texts)
        else:
            _, owner, i = max(where[block], key=lambda at: at[1].used)
            _block(ax, pool, block, owner, i, size, texts)
            for entry, s, _ in where[block]:
                _arrow(ax, (left + TABLE, entry + 0.5), (pool - 0.75, block + 0.5), colour(s.seq_id))
    return figure


def _block(
    ax: Axes,
    x: float,
    y: float,
    owner: PagedSequenceMemory | None,
    index: int,
    size: int,
    texts: Mapping[int, Sequence[str]] | None,
) -> None:
    """One block's slots: with a token, held but unfilled, or free."""
    for offset in range(size):
        at, position = x + offset * WIDTH, index * size + offset
        if owner is None:
            _cell(ax, at, y, WIDTH, "", facecolor=FREE, edgecolor="#BBBBBB")
            continue
        light = tuple(0.45 * c + 0.55 for c in to_rgb(colour(owner.seq_id)))
        if position < owner.used:
            text = str(position) if texts is None else texts[owner.seq_id][position]
            _cell(ax, at, y, WIDTH, text, facecolor=light)
        else:
            _cell(ax, at, y, WIDTH, "", facecolor="white", hatch=HATCH, edgecolor="#777777")


def _cell(ax: Axes, x: float, y: float, width: float, text: str, **style: Any) -> None:
    style = {"edgecolor": LINE, "linewidth": 0.8, **style}
    ax.add_patch(Rectangle((x, y + 0.05), width, 0.9, **style))
    font = min(8.0, 62 / max(len(text), 1))
    ax.text(x + width / 2, y + 0.5, text, ha="center", va="center", fontsize=font, parse_math=False)


def _arrow(ax: Axes, start: tuple[float, float], end: tuple[float, float], fill: str) -> None:
    style: dict[str, Any] = {"arrowstyle": "-|>", "shrinkA": 1, "shrinkB": 1, "mutation_scale": 9}
    ax.add_patch(ConnectionPatch(start, end, "data", "data", color=fill, linewidth=1.4, **style))
