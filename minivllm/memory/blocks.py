"""Chapter 3: a pool of fixed-size blocks.

All blocks have one size, so any free block serves any request: a free block is never too small or in the
wrong place. What is left of fragmentation is the unfilled end of each sequence's last block.

The pool knows numbers only. Free blocks stand in a queue: taken from its head, given back at its tail,
so a block keeps its old contents as long as possible, and no code ever clears one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from minivllm.errors import OutOfBlocks


class BlockPool:
    """Blocks 0 to num_blocks - 1, each free or in use. Every operation takes O(1) a block.

    Invariant: free and in use are disjoint, and together all blocks.
    """

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        # An ordered dictionary is a doubly linked list with an index: O(1) at both ends and in the middle.
        self._free = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be taken now."""
        return len(self._free)

    def is_free(self, block_id: int) -> bool:
        """Whether a block of this number is free."""
        return block_id in self._free

    def allocate(self, n: int) -> list[int]:
        """Take n blocks, those free for longest first. Raises OutOfBlocks and takes none if too few are."""
        if n > len(self._free):
            raise OutOfBlocks(f"{n} blocks are needed and {len(self._free)} of {self.num_blocks} are free.")
        return [self._free.popitem(last=False)[0] for _ in range(n)]

    def take(self, block_id: int) -> None:
        """Take this very block out of the middle of the queue, as chapter 5 will: its contents are wanted.

        Raises OutOfBlocks when it is in use.
        """
        if block_id not in self._free:
            raise OutOfBlocks(f"Block {block_id} is not free.")
        del self._free[block_id]

    def free(self, block_ids: Sequence[int]) -> None:
        """Give blocks back, to be handed out again in this order. Raises ValueError and frees none when one
        of them is not in use."""
        wrong = [b for b in block_ids if b in self._free or not 0 <= b < self.num_blocks]
        if wrong or len(set(block_ids)) < len(block_ids):
            raise ValueError(
                f"Blocks {wrong or list(block_ids)} are given back twice, or were never handed out."
            )
        self._free.update(dict.fromkeys(block_ids))

    def check_integrity(self, in_use: Sequence[int]) -> None:
        """Raise AssertionError unless the free blocks and those that the caller has in use are all blocks."""
        assert len(set(in_use)) == len(in_use), "a block is in use twice"
        assert self._free.keys().isdisjoint(in_use), "a block is free and in use"
        assert len(self._free) + len(in_use) == self.num_blocks, "a block is lost"
