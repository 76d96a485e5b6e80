"""Chapter 1: the accounting half of a KV memory, apart from the tensors.

Who may have how much is decided on integers alone; the tensors live in a `KVStore` (`memory/store.py`).
The two meet in nothing but ids and token counts. So a scheduler can plan, and a test can try thousands
of plans a second, without a tensor: nothing here imports torch.

A slot is room for one token: its keys and values in every layer. The counts below are the books of the
memory. Their main reader is the scheduler of chapter 6; until then the ladder is.

Rules for every manager: a question changes nothing; `allocate` does all that was asked or nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class SequenceMemory:
    """What one sequence has of the memory, in token slots: held for it, and used by its tokens."""

    seq_id: int
    held: int
    used: int


@dataclass(frozen=True)
class Snapshot:
    """The state of a KV memory at one moment, in token slots; bytes are slots x bytes_per_token."""

    num_slots: int
    bytes_per_token: int
    sequences: tuple[SequenceMemory, ...]

    @property
    def held(self) -> int:
        """Slots that no other sequence could take now."""
        return sum(s.held for s in self.sequences)

    @property
    def used(self) -> int:
        """Slots that hold the key and value of a token."""
        return sum(s.used for s in self.sequences)

    @property
    def free(self) -> int:
        """Slots that any sequence could take."""
        return self.num_slots - self.held

    @property
    def held_bytes(self) -> int:
        """Bytes of the held slots."""
        return self.held * self.bytes_per_token

    @property
    def used_bytes(self) -> int:
        """Bytes of the slots with a token."""
        return self.used * self.bytes_per_token

    @property
    def free_bytes(self) -> int:
        """Bytes of the free slots."""
        return self.free * self.bytes_per_token


class KVManager(Protocol):
    """The accounting half of a KV memory; n counts the tokens that a sequence is to have in memory."""

    def expect(self, seq_id: int, prompt_len: int, output_len: int) -> None:
        """Say, when a sequence arrives, how many tokens of prompt and output it may have in memory.

        The last token of the output is never put there, so output_len is one less than the tokens to
        generate. Memory that grows need not know.
        """
        ...

    def fits_ever(self, n: int) -> bool:
        """Whether a sequence of n tokens fits when it is alone."""
        ...

    def can_allocate(self, seq_id: int, n: int) -> bool:
        """Whether `allocate(seq_id, n)` would work now."""
        ...

    def allocate(self, seq_id: int, n: int) -> None:
        """See that sequence seq_id has room for n tokens in all. Raises OutOfMemory and changes nothing."""
        ...

    def free(self, seq_id: int) -> None:
        """Give back all that a sequence holds; an unknown id does nothing."""
        ...

    def snapshot(self) -> Snapshot:
        """The state now."""
        ...

    def check_integrity(self) -> None:
        """Raise AssertionError where the books do not balance."""
        ...


class RecomputeManager:
    """The books of a memory that keeps nothing: everything fits, nothing is held."""

    def __init__(self, num_slots: int, bytes_per_token: int):
        self.num_slots = num_slots
        self.bytes_per_token = bytes_per_token

    def expect(self, seq_id: int, prompt_len: int, output_len: int) -> None:
        """Nothing is reserved, so nothing need be known."""

    def fits_ever(self, n: int) -> bool:
        """Always."""
        return True

    def can_allocate(self, seq_id: int, n: int) -> bool:
        """Always."""
        return True

    def allocate(self, seq_id: int, n: int) -> None:
        """Nothing is kept, so nothing is taken."""

    def free(self, seq_id: int) -> None:
        """Nothing is held, so nothing is given back."""

    def snapshot(self) -> Snapshot:
        """All slots free, always."""
        return Snapshot(self.num_slots, self.bytes_per_token, ())

    def check_integrity(self) -> None:
        """Empty books balance."""
