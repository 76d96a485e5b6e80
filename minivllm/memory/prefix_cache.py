"""Chapter 5: prefix caching: a block keeps its contents after it is free, and can be found by them.

Many prompts begin alike: a system prompt, the turns of a chat so far. What an earlier request computed for
the same first tokens need not be computed again, if its blocks can be found (`prefix_index.py`, or the
tree of `radix.py`).

The blocks are those of `prefix_pool.py`. What is new here: a sequence begins with blocks that are there
already, and the blocks that it fills are registered. The model is vLLM's `KVCacheManager`
(`vllm/v1/core/kv_cache_manager.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from minivllm.errors import InvalidOption, OutOfBlocks, PrefixCacheInUse
from minivllm.memory.paged import num_blocks_for
from minivllm.memory.prefix_index import HashIndex, PrefixIndex
from minivllm.memory.prefix_pool import CachingBlockPool
from minivllm.memory.prefix_stats import PrefixCacheStats
from minivllm.memory.radix import RadixIndex
from minivllm.memory.sharing import SharedSnapshot, SharingManager

INDEXES: dict[str, type[PrefixIndex[Any]]] = {"hash": HashIndex, "radix": RadixIndex}


@dataclass(frozen=True)
class PrefixSnapshot(SharedSnapshot):
    """The state of a memory with cached blocks; cached: free blocks that can be found, next to go first."""

    cached: tuple[int, ...] = ()


class PrefixCachingManager(SharingManager):
    """Shared paged memory that finds again what it has computed. index: "hash" or "radix".

    A sequence's tokens only grow and its salt stays the same, until it is freed. A block table never
    changes under a running sequence: equal blocks are not merged.

    Invariant: a block that can be found is full, and its keys and values were computed.
    """

    pool: CachingBlockPool

    def __init__(self, num_blocks: int, block_size: int, bytes_per_token: int, index: str = "hash"):
        if index not in INDEXES:
            raise InvalidOption(f'prefix_cache is {index!r}; it can be "hash" or "radix".')
        super().__init__(
            num_blocks, block_size, bytes_per_token, CachingBlockPool(num_blocks, INDEXES[index]())
        )
        self.stats = PrefixCacheStats()
        self._keys: dict[int, list[Any]] = {}  # a waiting sequence is asked for often, and hashed once
        self._num_registered: dict[int, int] = {}

    def match(self, seq_id: int, token_ids: Sequence[int], cache_salt: str | None = None) -> list[int]:
        """The blocks of the longest cached prefix of these tokens, without the block of the last token.

        That token at least is computed, for its logits choose the next one. So k full blocks and no more hit
        k - 1 at best. The answer holds until the pool changes.
        """
        most = max(0, len(token_ids) - 1) // self.block_size
        return self.pool.index.find(self._page_keys(seq_id, token_ids, cache_salt)[:most])

    def can_begin(self, seq_id: int, n: int, hits: Sequence[int]) -> bool:
        """Whether a sequence without memory can have n tokens, its first blocks being these hits.

        A hit on a cached block takes that block off the free ones, just as a new block does.
        """
        cached = sum(self.pool.is_free(block) for block in hits)
        new = num_blocks_for(n, self.block_size) - len(hits)
        return cached + new <= self.num_free_blocks

    def begin(self, seq_id: int, n: int, hits: Sequence[int]) -> None:
        """Give a sequence without memory its hits, then new blocks up to n tokens. Raises OutOfBlocks.

        The hits come first: a new block could otherwise be one of them, evicted.
        """
        if not self.can_begin(seq_id, n, hits):
            raise OutOfBlocks(
                f"Sequence {seq_id} needs blocks of {self.block_size} for {n} tokens, {len(hits)} of them "
                f"cached; {self.num_free_blocks} of {self.pool.num_blocks} are free. Free a sequence first."
            )
        found = self.pool.index.find(self._keys.get(seq_id, [])[: len(hits)])
        assert found == list(hits), "the pool has changed since these hits were matched, or another's were"
        self.adopt(seq_id, hits, len(hits) * self.block_size)
        self._num_registered[seq_id] = len(hits)
        self.allocate(seq_id, n)

    def register(self, seq_id: int, token_ids: Sequence[int], cache_salt: str | None = None) -> None:
        """Let the full blocks of a sequence be found, whose first tokens are these and are computed.

        Takes O(1) for each block that is full since the last call.
        """
        assert len(token_ids) <= self._num_tokens[seq_id], "more tokens are computed than have memory"
        keys = self._page_keys(seq_id, token_ids, cache_salt)
        full = len(token_ids) // self.block_size
        for i in range(self.num_registered(seq_id), full):
            self.pool.index.insert(keys, self._tables[seq_id], i)
        self._num_registered[seq_id] = max(full, self.num_registered(seq_id))

    def num_registered(self, seq_id: int) -> int:
        """Full blocks of a sequence that are registered already."""
        return self._num_registered.get(seq_id, 0)

    def fork(self, parent_id: int, child_id: int) -> None:
        """Give a new sequence all that another has, without copying any of it."""
        super().fork(parent_id, child_id)
        self._num_registered[child_id] = self.num_registered(parent_id)
        self._keys[child_id] = self._keys.get(parent_id, [])[: self.num_registered(parent_id)]

    def free(self, seq_id: int) -> None:
        """Let go of a sequence's blocks, the last first, and of what is known of its tokens."""
        super().free(seq_id)
        self._keys.pop(seq_id, None)
        self._num_registered.pop(seq_id, None)

    def reset(self) -> None:
        """Forget all cached contents. Raises PrefixCacheInUse and forgets none while any block is held."""
        held = self.pool.num_blocks - self.pool.num_free_blocks
        if held:
            raise PrefixCacheInUse(
                f"{held} of {self.pool.num_blocks} blocks are held by sequences; the prefix cache can be "
                "reset when none is. Finish or abort all requests first."
            )
        self.pool.forget()

    def snapshot(self) -> PrefixSnapshot:
        """Every sequence, in the order in which they came, and the cached blocks."""
        found = super().snapshot()
        cached = tuple(self.pool.cached_blocks())
        return PrefixSnapshot(
            found.num_slots, found.bytes_per_token, found.sequences, found.block_size, cached
        )

    def _page_keys(self, seq_id: int, token_ids: Sequence[int], cache_salt: str | None) -> list[Any]:
        """The keys of a sequence's full pages, and perhaps of more; those asked for before are kept."""
        keys, size = self._keys.setdefault(seq_id, []), self.block_size
        for i in range(len(keys), len(token_ids) // size):
            page = token_ids[i * size : (i + 1) * size]
            keys.append(self.pool.index.make_key(keys[-1] if keys else None, page, cache_salt))
        return keys
