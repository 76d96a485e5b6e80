"""Chapter 4: the block pool of chapter 3 with a count on each block: how many hold it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from minivllm.memory.blocks import BlockPool


class RefCountedBlockPool(BlockPool):
    """Blocks with a count of those that hold them. A block is free again when the last has let go.

    Invariant: ref_count[b] is 0 if and only if b is free.
    """

    def __init__(self, num_blocks: int):
        super().__init__(num_blocks)
        self.ref_count = [0] * num_blocks

    def allocate(self, n: int) -> list[int]:
        """Take n free blocks, each with a count of 1. Raises OutOfBlocks and takes none if too few are."""
        block_ids = super().allocate(n)
        for block in block_ids:
            self.ref_count[block] = 1
        return block_ids

    def take(self, block_id: int) -> None:
        """Take this very block, with a count of 1. Raises OutOfBlocks when it is in use."""
        super().take(block_id)
        self.ref_count[block_id] = 1

    def share(self, block_ids: Sequence[int]) -> None:
        """One more holds these blocks, which are in use."""
        for block in block_ids:
            assert self.ref_count[block] > 0, f"block {block} is free and cannot be shared"
            self.ref_count[block] += 1

    def free(self, block_ids: Sequence[int]) -> None:
        """One lets go of these blocks. Raises ValueError and changes nothing when one is not in use."""
        wrong = [b for b in block_ids if not 0 <= b < self.num_blocks or self.ref_count[b] == 0]
        if wrong or len(set(block_ids)) < len(block_ids):
            raise ValueError(
                f"Blocks {wrong or list(block_ids)} are given back twice, or were never handed out."
            )
        for block in block_ids:
            self.ref_count[block] -= 1
        super().free([block for block in block_ids if self.ref_count[block] == 0])

    def check_integrity(self, in_use: Sequence[int]) -> None:
        """Raise AssertionError unless every count is the number of times that a block stands in in_use."""
        held = Counter(in_use)
        assert all(count == held[block] for block, count in enumerate(self.ref_count)), "a count is wrong"
        super().check_integrity(list(held))
