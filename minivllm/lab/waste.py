"""Above the chapters: what held memory was held for, which is known once the lengths are.

The split is that of the PagedAttention paper (Kwon et al., SOSP '23, figure 2). Of the slots that a sequence
holds, some have a token, some will have one before it ends, and the rest never will:

    a prompt of 3 and 4 tokens to come, 16 slots reserved, after the second of them
    [ 5 used | 2 reserved for later | 9 internal waste ]

A block that several sequences share counts once. Cached blocks are free: no sequence holds them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from minivllm.memory.manager import Snapshot
from minivllm.memory.paged import PagedSnapshot


@dataclass(frozen=True)
class Split:
    """Held slots: with a token, waiting for one that came later, and never used."""

    used: int = 0
    reserved: int = 0
    waste: int = 0

    @property
    def held(self) -> int:
        """All of them."""
        return self.used + self.reserved + self.waste

    def __add__(self, other: Split) -> Split:
        return Split(self.used + other.used, self.reserved + other.reserved, self.waste + other.waste)

    def share(self, part: str) -> float | None:
        """A part's share of what was held, from 0 to 1; None where nothing was."""
        return getattr(self, part) / self.held if self.held else None


def split_held(snapshot: Snapshot, final: Mapping[int, int]) -> Split:
    """The slots held in a snapshot. final: sequence id -> tokens in memory when it ended.

    The last token that a sequence generates is never put into memory, so final is prompt + output - 1.
    """
    parts = Split()
    for sequence in snapshot.sequences:
        later = min(final[sequence.seq_id], sequence.held) - sequence.used
        parts += Split(sequence.used, later, sequence.held - sequence.used - later)
    return parts


def split_blocks(snapshot: PagedSnapshot, final: Mapping[int, int]) -> Split:
    """As `split_held`, block by block: of sequences that share one, that with most tokens in it counts."""
    size = snapshot.block_size
    used: dict[int, int] = {}
    filled: dict[int, int] = {}  # slots of a block that are used when its sequences end
    for s in snapshot.sequences:
        for i, block in enumerate(s.block_ids):
            now, end = (min(size, max(0, n - i * size)) for n in (s.used, final[s.seq_id]))
            used[block] = max(now, used.get(block, 0))
            filled[block] = max(now, end, filled.get(block, 0))
    now, end = sum(used.values()), sum(filled.values())
    return Split(now, end - now, len(used) * size - end)


def mean_split(snapshots: Iterable[Snapshot], final: Mapping[int, int]) -> Split:
    """All splits added up: its shares are those over time, a snapshot counting by what it holds."""
    return sum(
        (split_blocks(s, final) if isinstance(s, PagedSnapshot) else split_held(s, final) for s in snapshots),
        start=Split(),
    )
