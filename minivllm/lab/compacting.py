"""Above the chapters: contiguous memory with compaction, to measure what that gains and what it moves.

Two managers beside the one of chapter 2: one that moves runs together whenever that lets a request in, and
one in which nothing has to be moved because nothing ever lies apart: the best that compaction could give.
"""

from __future__ import annotations

from minivllm.errors import OutOfMemory
from minivllm.memory.buddy import BuddyAllocator
from minivllm.memory.contiguous import (
    RESERVATIONS,
    ContiguousManager,
    ContiguousSequenceMemory,
    ContiguousSnapshot,
)


class CompactingManager(ContiguousManager):
    """A ContiguousManager that compacts before it refuses a run for which enough slots can be joined.

    num_compactions, moved: how often it did, and the tokens moved in all.
    """

    def __init__(self, num_slots: int, bytes_per_token: int, max_model_len: int, reservation: str = "max"):
        super().__init__(num_slots, bytes_per_token, max_model_len, reservation)
        self.num_compactions = 0
        self.moved = 0
        self._joined: int | None = None  # the longest run after a compaction; None: not known

    def can_allocate(self, seq_id: int, n: int) -> bool:
        """Whether sequence seq_id can have n tokens in all now, if need be after a compaction."""
        if super().can_allocate(seq_id, n):
            return True
        reserved = self._reserved.get(seq_id, self._most)
        if n > reserved or seq_id in self._start:
            return False
        run = BuddyAllocator.run_length(reserved)
        return run <= self._allocator.num_free and run <= self._longest_when_packed()

    def allocate(self, seq_id: int, n: int) -> None:
        """As without compaction, after one where that is needed. Raises OutOfMemory."""
        if not super().can_allocate(seq_id, n) and self.can_allocate(seq_id, n):
            self.moved += sum(move.length for move in self.compact())
            self.num_compactions += 1
        if seq_id not in self._start:
            self._joined = None
        super().allocate(seq_id, n)

    def free(self, seq_id: int) -> None:
        """Give back a sequence's run; an unknown id does nothing."""
        self._joined = None
        super().free(seq_id)

    def _longest_when_packed(self) -> int:
        if self._joined is None:
            packed = BuddyAllocator(self.num_slots)
            for length in sorted((s.held for s in self.snapshot().sequences), reverse=True):
                packed.allocate(length)
            self._joined = packed.largest_free_run
        return self._joined


class PackedManager:
    """Reserves by policy, to the slot, and never has a gap: a perfect allocator with compaction for nothing.

    A bound: no contiguous memory with this policy can let in more. Invariant: the reservations of all
    sequences together never exceed num_slots.
    """

    def __init__(self, num_slots: int, bytes_per_token: int, max_model_len: int, reservation: str = "max"):
        self.num_slots, self.bytes_per_token = num_slots, bytes_per_token
        self.max_model_len = max_model_len
        self._policy = RESERVATIONS[reservation]
        self._reserved: dict[int, int] = {}
        self._tokens: dict[int, int] = {}
        self._held = 0

    def expect(self, seq_id: int, prompt_len: int, output_len: int) -> None:
        """Say, when a sequence arrives, how long it will become."""
        self._reserved[seq_id] = self._policy(prompt_len, output_len, self.max_model_len)

    def fits_ever(self, n: int) -> bool:
        """Whether a sequence of n tokens fits when it is alone."""
        return n <= min(self.max_model_len, self.num_slots)

    def can_allocate(self, seq_id: int, n: int) -> bool:
        """Whether sequence seq_id can have n tokens in all now."""
        reserved = self._reserved[seq_id]
        return n <= reserved and (seq_id in self._tokens or reserved <= self.num_slots - self._held)

    def allocate(self, seq_id: int, n: int) -> None:
        """Let sequence seq_id have n tokens in all; the first time reserves for it. Raises OutOfMemory."""
        if not self.can_allocate(seq_id, n):
            raise OutOfMemory(
                f"Sequence {seq_id} has {self._reserved[seq_id]} slots reserved and needs {n}; "
                f"{self.num_slots - self._held} slots are free. Free another sequence first."
            )
        if seq_id not in self._tokens:
            self._held += self._reserved[seq_id]
        self._tokens[seq_id] = max(n, self._tokens.get(seq_id, 0))

    def free(self, seq_id: int) -> None:
        """Give back what a sequence has; an unknown id does nothing."""
        reserved = self._reserved.pop(seq_id, 0)
        if self._tokens.pop(seq_id, None) is not None:
            self._held -= reserved

    def snapshot(self) -> ContiguousSnapshot:
        """Every sequence, one behind the other."""
        sequences, start = [], 0
        for seq_id, used in self._tokens.items():
            held = self._reserved[seq_id]
            sequences.append(ContiguousSequenceMemory(seq_id, held, used, start, held))
            start += held
        rest = self.num_slots - start
        free = ((start, rest),) if rest else ()
        return ContiguousSnapshot(self.num_slots, self.bytes_per_token, tuple(sequences), rest, free)

    def check_integrity(self) -> None:
        """Raise AssertionError where reservations and tokens disagree."""
        assert all(self._tokens[i] <= self._reserved[i] for i in self._tokens)
        assert sum(self._reserved[i] for i in self._tokens) == self._held <= self.num_slots
