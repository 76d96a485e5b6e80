"""Chapter 1: the books of the naive KV cache, where each sequence holds just what it uses.

It grows by one token at a time and never holds a slot in reserve. That costs a copy at every step
(`memory/naive_store.py`); chapter 2 shows what it costs to avoid the copy.
"""

from __future__ import annotations

from minivllm.errors import OutOfMemory
from minivllm.memory.manager import SequenceMemory, Snapshot


class NaiveManager:
    """Counts tokens per sequence against one budget of num_slots.

    Invariant: the tokens of all sequences together never exceed num_slots.
    """

    def __init__(self, num_slots: int, bytes_per_token: int):
        self.num_slots = num_slots
        self.bytes_per_token = bytes_per_token
        self._tokens: dict[int, int] = {}
        self._held = 0

    def expect(self, seq_id: int, prompt_len: int, output_len: int) -> None:
        """Memory is taken as a sequence grows, so its length need not be known."""

    def fits_ever(self, n: int) -> bool:
        """Whether n tokens fit when nothing else is there."""
        return n <= self.num_slots

    def can_allocate(self, seq_id: int, n: int) -> bool:
        """Whether sequence seq_id can have n tokens in all now."""
        return n - self._tokens.get(seq_id, 0) <= self.num_slots - self._held

    def allocate(self, seq_id: int, n: int) -> None:
        """Let sequence seq_id have n tokens in all; it never shrinks. Raises OutOfMemory and changes nothing.

        self._tokens maps a sequence's id to the tokens it has; self._held is the sum of all of them.
        """
        before = self._tokens.get(seq_id, 0)
        if not self.can_allocate(seq_id, n):
            raise OutOfMemory(
                f"Sequence {seq_id} needs room for {n} tokens and has {before}; "
                f"of {self.num_slots} slots {self.snapshot().free} are free. Free another sequence first."
            )
        self._tokens[seq_id] = max(n, before)
        self._held += self._tokens[seq_id] - before

    def free(self, seq_id: int) -> None:
        """Give back all slots of a sequence; an unknown id does nothing."""
        self._held -= self._tokens.pop(seq_id, 0)

    def snapshot(self) -> Snapshot:
        """Every sequence, in the order in which they came."""
        sequences = tuple(SequenceMemory(seq_id, n, n) for seq_id, n in self._tokens.items())
        return Snapshot(self.num_slots, self.bytes_per_token, sequences)

    def check_integrity(self) -> None:
        """No sequence holds a negative number of slots, and together they hold no more than there are."""
        assert all(n >= 0 for n in self._tokens.values())
        assert sum(self._tokens.values()) == self._held <= self.num_slots
