"""Chapter 5: blocks that keep their contents after they are free, and can be found by them.

The pool is that of chapter 4 with an index and lazy eviction: what a block holds is forgotten when, and only
when, the block is handed out again. Free blocks are of two kinds, and both count as free: nothing is kept at
the expense of a sequence that needs a block now.

                     allocate                 free, page registered
         +---------+ -------> +--------------+ -------------------> +-------------+
         |  empty  |          |    in use    |                      |   cached    |
         | count 0 | <------- |   count > 0  | <------------------- |   count 0   |
         +---------+   free   +--------------+    share: a hit      +-------------+
                                                  allocate: evicted

The model is vLLM's `BlockPool` (`vllm/v1/core/block_pool.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minivllm.memory.prefix_index import PrefixIndex
from minivllm.memory.ref_counts import RefCountedBlockPool


class CachingBlockPool(RefCountedBlockPool):
    """Blocks whose contents can be found until they are handed out again, least recently used first.

    Blocks with nothing to find are handed out before any cached one. In one common queue they would wait
    behind cached blocks that were freed earlier: a flood of prompts too short to fill a block would turn the
    whole queue over and evict every prefix, for nothing.

    Invariant: in the queue of free blocks, those with nothing to find stand before the cached ones.
    """

    def __init__(self, num_blocks: int, index: PrefixIndex[Any]):
        super().__init__(num_blocks)
        self.index = index

    def cached_blocks(self) -> list[int]:
        """Free blocks whose contents can be found, the next to be evicted first."""
        return [block for block in self._free if block in self.index]

    def allocate(self, n: int) -> list[int]:
        """Take n free blocks and forget their contents. Raises OutOfBlocks and takes none if too few are."""
        block_ids = super().allocate(n)
        for block in block_ids:
            if block in self.index:
                self.index.remove(block)
        return block_ids

    def share(self, block_ids: Sequence[int]) -> None:
        """One more holds these blocks, which are in use or cached; a cached one leaves the queue."""
        for block in block_ids:
            if self.is_free(block):
                assert block in self.index, f"block {block} is free and holds nothing"
                self.take(block)
            else:
                super().share([block])

    def free(self, block_ids: Sequence[int]) -> None:
        """One lets go of these blocks. The cached ones queue up in this order, to be evicted last; of the
        others, which go to the head of the queue, the last one given back is handed out first."""
        super().free(block_ids)
        for block in block_ids:
            if self.is_free(block) and block not in self.index:
                self._free.move_to_end(block, last=False)

    def forget(self) -> None:
        """Forget the contents of all cached blocks."""
        for block in self.cached_blocks():
            self.index.remove(block)

    def check_integrity(self, in_use: Sequence[int]) -> None:
        """Raise AssertionError where counts, queue and index disagree."""
        super().check_integrity(in_use)
        self.index.check_integrity(self.ref_count)
        cached = self.cached_blocks()
        assert list(self._free)[len(self._free) - len(cached) :] == cached, "a cached block is too early"
