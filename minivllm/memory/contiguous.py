"""Chapter 2: the books of contiguous KV memory: one run of slots per sequence, reserved when it starts.

A sequence's keys and values then lie side by side and are never copied to grow. The price is that room
must be reserved before anyone knows how long the sequence will become. Three policies, after the Orca
baselines of the PagedAttention paper (Kwon et al., SOSP '23, section 6.1), for a prompt of 100 tokens, 50
to come, and a longest context of 2,048:

    max       2,048     the longest that could be
    pow2      100 + 64  the true output length, rounded up to a power of two; in all, not above max
    oracle    100 + 50  the true output length, which no real system knows

The buddy allocator rounds each reservation up to a power of two once more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from minivllm.errors import InvalidOption, OutOfMemory
from minivllm.memory.buddy import BuddyAllocator
from minivllm.memory.manager import SequenceMemory, Snapshot

# policy -> slots to reserve, from (prompt_len, output_len, max_model_len)
RESERVATIONS: dict[str, Callable[[int, int, int], int]] = {
    "max": lambda prompt_len, output_len, max_model_len: max_model_len,
    "pow2": lambda prompt_len, output_len, max_model_len: min(
        prompt_len + BuddyAllocator.run_length(output_len), max_model_len
    ),
    "oracle": lambda prompt_len, output_len, max_model_len: prompt_len + output_len,
}


@dataclass(frozen=True)
class ContiguousSequenceMemory(SequenceMemory):
    """What a sequence has: held slots from start on, of which the policy asked for `reserved`."""

    start: int = 0
    reserved: int = 0


@dataclass(frozen=True)
class ContiguousSnapshot(Snapshot):
    """The state of a contiguous memory. largest_free_run: the longest run that could be handed out.

    free_runs: (start, length) of every free run, in order of start.
    """

    sequences: tuple[ContiguousSequenceMemory, ...]
    largest_free_run: int = 0
    free_runs: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Move:
    """Copy the keys and values of `length` tokens from one slot on to another."""

    source: int
    destination: int
    length: int


class ContiguousManager:
    """Reserves one run per sequence, by policy, and never moves it unless told to.

    Invariant: a sequence has no more tokens than reserved slots, and its run is as long as these need.
    """

    def __init__(self, num_slots: int, bytes_per_token: int, max_model_len: int, reservation: str = "max"):
        if reservation not in RESERVATIONS:
            raise InvalidOption(
                f"reservation={reservation!r} is not possible: it must be one of {', '.join(RESERVATIONS)}."
            )
        self.num_slots = num_slots
        self.bytes_per_token = bytes_per_token
        self.max_model_len = max_model_len
        self._policy = RESERVATIONS[reservation]
        self._allocator = BuddyAllocator(num_slots)
        self._longest_run = self._allocator.largest_free_run
        self._most = min(max_model_len, self._longest_run)  # for a sequence of which nothing was said
        self._reserved: dict[int, int] = {}
        self._start: dict[int, int] = {}
        self._tokens: dict[int, int] = {}

    def expect(self, seq_id: int, prompt_len: int, output_len: int) -> None:
        """Say, when a sequence arrives, how long it will become; the policy uses what it may know of that.

        Where a policy asks for more than the longest run there is, it gets that run.
        """
        if seq_id in self._start:
            raise ValueError(f"Sequence {seq_id} has its run already; say what to expect before it starts.")
        reserved = self._policy(prompt_len, output_len, self.max_model_len)
        self._reserved[seq_id] = max(prompt_len + output_len, min(reserved, self._longest_run))

    def fits_ever(self, n: int) -> bool:
        """Whether a sequence of n tokens fits when it is alone."""
        return n <= self.max_model_len and BuddyAllocator.run_length(n) <= self._longest_run

    def can_allocate(self, seq_id: int, n: int) -> bool:
        """Whether sequence seq_id can have n tokens in all now."""
        reserved = self._reserved.get(seq_id, self._most)
        if n > reserved:
            return False
        return (
            seq_id in self._start or BuddyAllocator.run_length(reserved) <= self._allocator.largest_free_run
        )

    def allocate(self, seq_id: int, n: int) -> None:
        """Let sequence seq_id have n tokens in all; the first time reserves its run. Raises OutOfMemory."""
        reserved = self._reserved.get(seq_id, self._most)
        if n > reserved:
            raise OutOfMemory(f"Sequence {seq_id} has {reserved} slots reserved; {n} tokens do not fit.")
        if seq_id not in self._start:
            self._start[seq_id] = self._allocator.allocate(reserved)
        self._reserved[seq_id] = reserved
        self._tokens[seq_id] = max(n, self._tokens.get(seq_id, 0))

    def free(self, seq_id: int) -> None:
        """Give back a sequence's run; an unknown id does nothing."""
        if seq_id in self._start:
            self._allocator.free(self._start.pop(seq_id))
            del self._tokens[seq_id]
        self._reserved.pop(seq_id, None)

    def start(self, seq_id: int) -> int:
        """The slot of a sequence's first token."""
        return self._start[seq_id]

    def compact(self) -> list[Move]:
        """Move runs together, longest first, so that all free slots join. The tensors are to be moved so too.

        Chapter 2 measures why no engine does this between steps: bytes moved are tokens x bytes_per_token.
        """
        packed = BuddyAllocator(self.num_slots)
        moves = []
        by_length = sorted(self._start, key=lambda i: (-self._allocator.held(self._start[i]), self._start[i]))
        for seq_id in by_length:
            source, self._start[seq_id] = self._start[seq_id], packed.allocate(self._reserved[seq_id])
            if source != self._start[seq_id]:
                moves.append(Move(source, self._start[seq_id], self._tokens[seq_id]))
        self._allocator = packed
        return moves

    def snapshot(self) -> ContiguousSnapshot:
        """Every sequence, in the order in which they came."""
        sequences = tuple(
            ContiguousSequenceMemory(
                i, self._allocator.held(start), self._tokens[i], start, self._reserved[i]
            )
            for i, start in self._start.items()
        )
        largest, free = self._allocator.largest_free_run, tuple(self._allocator.free_runs)
        return ContiguousSnapshot(self.num_slots, self.bytes_per_token, sequences, largest, free)

    def check_integrity(self) -> None:
        """Raise AssertionError where runs, reservations and tokens disagree."""
        self._allocator.check_integrity()
        assert self._start.keys() == self._tokens.keys() <= self._reserved.keys()
        for seq_id, start in self._start.items():
            assert self._tokens[seq_id] <= self._reserved[seq_id] <= self._allocator.held(start)
        assert self._allocator.num_free + self.snapshot().held == self.num_slots
