"""Chapter 3: the books of a paged KV memory: which blocks hold which tokens.

A sequence's blocks may lie anywhere; its block table lists them in the order of its tokens. Token number
i stands in block table[i // block_size] at offset i % block_size:

    block_size 4, a sequence of 10 tokens, table [7, 2, 5]
    block 7: tokens 0-3      block 2: tokens 4-7      block 5: tokens 8-9, two slots unfilled
    token 9 -> slot 5 * 4 + 1 = 21
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from minivllm.errors import OutOfBlocks
from minivllm.memory.blocks import BlockPool
from minivllm.memory.manager import SequenceMemory, Snapshot


def num_blocks_for(n: int, block_size: int) -> int:
    """Blocks that n tokens fill, the last of them perhaps in part."""
    return -(-n // block_size)


def slot_mapping(block_table: Sequence[int], block_size: int, start: int, end: int) -> list[int]:
    """The slots of tokens start to end - 1: slot = block_id * block_size + offset."""
    return [block_table[i // block_size] * block_size + i % block_size for i in range(start, end)]


@dataclass(frozen=True)
class PagedSequenceMemory(SequenceMemory):
    """What a sequence has, and in which blocks, in the order of its tokens."""

    block_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class PagedSnapshot(Snapshot):
    """The state of a paged memory."""

    sequences: tuple[PagedSequenceMemory, ...]
    block_size: int = 1


class PagedManager:
    """Gives each sequence the blocks that its tokens need, and no more.

    pool: where the blocks come from; None: a pool of num_blocks.

    Invariant: sequence i has num_blocks_for(its tokens) blocks, and no block is in two tables.
    """

    def __init__(self, num_blocks: int, block_size: int, bytes_per_token: int, pool: BlockPool | None = None):
        self.block_size = block_size
        self.bytes_per_token = bytes_per_token
        self.pool = BlockPool(num_blocks) if pool is None else pool
        self._tables: dict[int, list[int]] = {}
        self._num_tokens: dict[int, int] = {}

    def expect(self, seq_id: int, prompt_len: int, output_len: int) -> None:
        """Memory is taken as a sequence grows, so its length need not be known."""

    def fits_ever(self, n: int) -> bool:
        """Whether n tokens fit when nothing else is there."""
        return num_blocks_for(n, self.block_size) <= self.pool.num_blocks

    def num_missing_blocks(self, seq_id: int, n: int) -> int:
        """Blocks that sequence seq_id lacks for n tokens in all; 0 where it has enough."""
        return max(0, num_blocks_for(n, self.block_size) - len(self._tables.get(seq_id, ())))

    def can_allocate(self, seq_id: int, n: int) -> bool:
        """Whether sequence seq_id can have n tokens in all now."""
        return self.num_missing_blocks(seq_id, n) <= self.pool.num_free_blocks

    def allocate(self, seq_id: int, n: int) -> None:
        """Let sequence seq_id have n tokens in all; it never shrinks. Raises OutOfBlocks."""
        missing = self.num_missing_blocks(seq_id, n)
        if missing > self.pool.num_free_blocks:
            raise OutOfBlocks(
                f"Sequence {seq_id} needs {missing} more blocks of {self.block_size} for {n} tokens; "
                f"{self.pool.num_free_blocks} of {self.pool.num_blocks} are free. Free a sequence first."
            )
        self._tables.setdefault(seq_id, []).extend(self.pool.allocate(missing))
        self._num_tokens[seq_id] = max(n, self._num_tokens.get(seq_id, 0))

    def free(self, seq_id: int) -> None:
        """Give back a sequence's blocks, the last first; an unknown id does nothing."""
        self.pool.free(self._tables.pop(seq_id, [])[::-1])
        self._num_tokens.pop(seq_id, None)

    @property
    def tables(self) -> Mapping[int, Sequence[int]]:
        """The block tables themselves, by sequence id: not copies, so they are to be read only.

        A table is the same list as long as its sequence keeps its memory. `allocate` changes it from the
        block of the first new token on: it grows at its end, and where others read that block too (chapter
        4) another takes its place.
        """
        return self._tables

    def block_table(self, seq_id: int) -> list[int]:
        """A sequence's blocks in the order of its tokens (a copy)."""
        return list(self._tables[seq_id])

    def snapshot(self) -> PagedSnapshot:
        """Every sequence, in the order in which they came."""
        sequences = tuple(
            PagedSequenceMemory(seq_id, len(table) * self.block_size, self._num_tokens[seq_id], tuple(table))
            for seq_id, table in self._tables.items()
        )
        num_slots = self.pool.num_blocks * self.block_size
        return PagedSnapshot(num_slots, self.bytes_per_token, sequences, self.block_size)

    def check_integrity(self) -> None:
        """Raise AssertionError where tables and pool disagree."""
        self.pool.check_integrity([block for table in self._tables.values() for block in table])
        for seq_id, table in self._tables.items():
            assert len(table) == num_blocks_for(self._num_tokens[seq_id], self.block_size)
