"""Chapter 4: blocks that several sequences share: reference counts and copy-on-write.

Several answers to one prompt, or the beams of a beam search, begin with the same tokens. Their block tables
may point to the same blocks; a count on each block says how many do. To write into a block that others
read too, a sequence first takes a block of its own and copies what stands there: copy-on-write.

    block_size 4, prompt of 6 tokens, forked once         after the child has one token more
    parent [7, 2]      block 7: count 2                   parent [7, 2]      block 7: count 2
    child  [7, 2]      block 2: count 2, half full        child  [7, 5]      2 -> 5 copied, both count 1

The books only list the copies; the tensor half makes them before it computes the step. Until the list is
fetched, a listed copy counts as a reader of its source: so no source is handed out and overwritten too early.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from minivllm.errors import OutOfBlocks
from minivllm.memory.paged import PagedManager, PagedSequenceMemory, PagedSnapshot, num_blocks_for
from minivllm.memory.ref_counts import RefCountedBlockPool


@dataclass(frozen=True)
class SharedSnapshot(PagedSnapshot):
    """The state of a memory with shared blocks, each of them counted once."""

    sequences: tuple[PagedSequenceMemory, ...]

    @property
    def ref_count(self) -> Counter[int]:
        """For each block in use, the number of sequences that hold it."""
        return Counter(block for s in self.sequences for block in s.block_ids)

    @property
    def held(self) -> int:
        """Slots of the blocks in use."""
        return len(self.ref_count) * self.block_size

    @property
    def used(self) -> int:
        """Slots in use with a token; those of a shared block count once."""
        filled: dict[int, int] = {}
        for s in self.sequences:
            for i, block in enumerate(s.block_ids):
                most = min(self.block_size, max(0, s.used - i * self.block_size))
                filled[block] = max(most, filled.get(block, 0))
        return sum(filled.values())


class SharingManager(PagedManager):
    """Paged memory whose sequences can be forked.

    num_copies: blocks copied on write so far. promised: blocks that are free and spoken for.

    Invariant: a sequence writes only into blocks that no other sequence has.
    """

    pool: RefCountedBlockPool

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        bytes_per_token: int,
        pool: RefCountedBlockPool | None = None,
    ):
        pool = RefCountedBlockPool(num_blocks) if pool is None else pool
        super().__init__(num_blocks, block_size, bytes_per_token, pool)
        self.num_copies = 0
        self.promised: dict[int, int] = {}
        self._copies: dict[int, int] = {}  # copies to make: block written -> block read

    @property
    def num_free_blocks(self) -> int:
        """Blocks that are free and promised to nobody."""
        return self.pool.num_free_blocks - sum(self.promised.values())

    def fits_ever(self, n: int, num_seqs: int = 1, shared: int = 0) -> bool:
        """Whether num_seqs sequences of n tokens fit alone, their first `shared` tokens being the same.

        Only full blocks stay shared to the end.
        """
        common = shared // self.block_size
        each = num_blocks_for(n, self.block_size) - common
        return common + num_seqs * each <= self.pool.num_blocks

    def fork(self, parent_id: int, child_id: int) -> None:
        """Give a new sequence all that another has, without copying any of it."""
        self.adopt(child_id, self._tables[parent_id], self._num_tokens[parent_id])
        self.promised.pop(parent_id, None)

    def adopt(self, seq_id: int, block_ids: Sequence[int], n: int) -> None:
        """Let a sequence without memory hold these blocks as its table, with n tokens in them.

        Each block gets one holder more. Who took the blocks from the pool to fill them still holds them, and
        lets go with `pool.free` when all sequences have theirs.
        """
        assert not self._tables.get(seq_id), f"sequence {seq_id} has blocks already"
        assert len(block_ids) == num_blocks_for(n, self.block_size), "blocks and tokens do not agree"
        self.pool.share(block_ids)
        self._tables[seq_id] = list(block_ids)
        self._num_tokens[seq_id] = n

    def num_blocks_to_fork(self, n: int, num_seqs: int) -> int:
        """Blocks that a sequence of n tokens and its num_seqs - 1 forks need for their next token.

        Where a last block is shared, all but one copy it; where it is full, each needs a new one.
        """
        return num_seqs - 1 if n % self.block_size else num_seqs

    def promise(self, seq_id: int, num_blocks: int) -> None:
        """Keep so many free blocks for the forks of a sequence, until it is forked or freed; 0 keeps none."""
        self.promised[seq_id] = num_blocks
        if num_blocks == 0:
            del self.promised[seq_id]

    def num_missing_blocks(self, seq_id: int, n: int) -> int:
        """Blocks that a sequence lacks for n tokens in all, the one that it must copy to among them."""
        return super().num_missing_blocks(seq_id, n) + self._must_copy(seq_id, n)

    def can_allocate(self, seq_id: int, n: int) -> bool:
        """Whether sequence seq_id can have n tokens in all now, and write those that are new."""
        return self.num_missing_blocks(seq_id, n) <= self.num_free_blocks

    def allocate(self, seq_id: int, n: int) -> None:
        """Let a sequence have n tokens in all and write those that are new. Raises OutOfBlocks."""
        must_copy = self._must_copy(seq_id, n)
        missing = super().num_missing_blocks(seq_id, n) + must_copy
        if missing > 0:
            self._take_blocks(seq_id, n, missing, must_copy)
        self._num_tokens[seq_id] = max(n, self._num_tokens.get(seq_id, 0))

    def take_copies(self) -> list[tuple[int, int]]:
        """The copies to make before anything is written, (block read, block written), for the last time."""
        copies = [(source, block) for block, source in self._copies.items()]
        self._copies.clear()
        for source, _ in copies:
            self.pool.free([source])
        return copies

    def free(self, seq_id: int) -> None:
        """Let go of a sequence's blocks, the last first; an unknown id does nothing."""
        self.promised.pop(seq_id, None)
        if self._tables.get(seq_id):
            self._cancel_copy(self._tables[seq_id])
        super().free(seq_id)

    def filled_blocks(self, seq_id: int, n: int) -> list[int]:
        """The blocks in which a sequence's first n tokens stand now, before the listed copies are made."""
        table = self._tables.get(seq_id, [])[: num_blocks_for(n, self.block_size)]
        return [self._copies.get(block, block) for block in table]

    def num_blocks(self, seq_ids: Iterable[int]) -> tuple[int, int]:
        """Blocks that sequences have together, and that they would have if none were shared."""
        tables = [self._tables.get(seq_id, []) for seq_id in seq_ids]
        return len(set().union(*tables)), sum(map(len, tables))

    def snapshot(self) -> SharedSnapshot:
        """Every sequence, in the order in which they came."""
        found = super().snapshot()
        return SharedSnapshot(found.num_slots, found.bytes_per_token, found.sequences, found.block_size)

    def check_integrity(self) -> None:
        """Raise AssertionError where tables, copies and pool disagree."""
        tables = [block for table in self._tables.values() for block in table]
        self.pool.check_integrity([*tables, *self._copies.values()])
        for seq_id, table in self._tables.items():
            assert len(table) == num_blocks_for(self._num_tokens[seq_id], self.block_size)
        assert self.num_free_blocks >= 0, "more is promised than is free"

    def _take_blocks(self, seq_id: int, n: int, missing: int, must_copy: bool) -> None:
        if missing > self.num_free_blocks:
            raise OutOfBlocks(
                f"Sequence {seq_id} needs {missing} more blocks of {self.block_size} for {n} tokens; "
                f"{self.num_free_blocks} of {self.pool.num_blocks} are free. Free a sequence first."
            )
        new = self.pool.allocate(missing)
        table = self._tables.setdefault(seq_id, [])
        if must_copy:
            self._copies[new[0]] = table[-1]  # the source's count stays: the copy reads it now
            table[-1] = new.pop(0)
            self.num_copies += 1
        table.extend(new)

    def _must_copy(self, seq_id: int, n: int) -> bool:
        """Whether the first new token goes into a block that another sequence has too."""
        num_tokens = self._num_tokens.get(seq_id, 0)
        if n <= num_tokens or num_tokens % self.block_size == 0:
            return False
        block = self._tables[seq_id][-1]
        if (count := self.pool.ref_count[block]) == 1:
            return False
        return count - list(self._copies.values()).count(block) > 1  # less those that only copy it

    def _cancel_copy(self, table: list[int]) -> None:
        """Where the copy into one of these blocks was not made yet, the table has the source again."""
        for i, block in enumerate(table):
            if block in self._copies:
                table[i] = self._copies.pop(block)
                self.num_copies -= 1
                self.pool.free([block])
