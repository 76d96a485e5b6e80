"""Above the chapters: what all of a KV memory was used for over time, as figure 2 of Kwon et al. divides it.

[ tokens | reserved | over-reserved | rounding | free ]
  ^ a request asked for these three ^            ^ nobody holds these
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from minivllm.lab.waste import Split, split_held
from minivllm.memory.contiguous import ContiguousSequenceMemory
from minivllm.memory.manager import Snapshot


@dataclass(frozen=True)
class PaperSplit:
    """Shares of the whole KV memory over time, from 0 to 1; together 1.

    tokens: slots with a token. reserved: slots that a later token of the same request fills.
    over_reserved: what a request asked for and never fills; with blocks, the end of its last one.
    rounding: what the allocator gave beyond what was asked for. free: held by nobody.
    """

    tokens: float
    reserved: float
    over_reserved: float
    rounding: float
    free: float

    @property
    def internal(self) -> float:
        """Held by a request and never filled: internal fragmentation as allocators have it."""
        return self.over_reserved + self.rounding

    @property
    def external(self) -> float:
        """Held by nobody. While a request waits: in runs too short for it, or kept by the watermark."""
        return self.free

    def figure_2(self) -> dict[str, float]:
        """The four parts of figure 2, under the names in PUBLISHED_FIGURE_2.

        The figure has no internal part for Orca (Oracle), whose requests ask for no slot too many; so the
        buddy allocator's rounding is in its "external fragmentation & others".
        """
        return {
            "tokens": self.tokens,
            "reserved": self.reserved,
            "internal": self.over_reserved,
            "external": self.rounding + self.free,
        }


@dataclass
class SplitCounter:
    """Adds snapshots up. final: sequence id -> tokens in memory when it ends."""

    final: Mapping[int, int]
    held: Split = field(default_factory=Split)
    rounding: int = 0
    slots: int = 0

    def add(self, snapshot: Snapshot) -> None:
        """Count one snapshot."""
        self.held += split_held(snapshot, self.final)
        self.slots += snapshot.num_slots
        self.rounding += sum(
            s.held - s.reserved for s in snapshot.sequences if isinstance(s, ContiguousSequenceMemory)
        )

    def shares(self) -> PaperSplit:
        """The shares of all slots counted, so far at least one."""
        return PaperSplit(
            tokens=self.held.used / self.slots,
            reserved=self.held.reserved / self.slots,
            over_reserved=(self.held.waste - self.rounding) / self.slots,
            rounding=self.rounding / self.slots,
            free=(self.slots - self.held.held) / self.slots,
        )
