"""Chapter 5: finding a block by its contents: a hash for each full block that stands for all before it.

The keys and values in a block depend on its tokens and on every token before them. So a block is named by a
digest of its tokens and of its parent's digest; equal digests mean equal prefixes:

    block_size 4      tokens 5 1 8 8 | 2 7 7 3 | 9 4
    d0 = sha256(root, 5 1 8 8)      d1 = sha256(d0, 2 7 7 3)      9 4 fills no block: it has none

To find the longest cached prefix, look up d0, d1, ... until one is missing. sha256 of fixed bytes and not
Python's `hash`: it is the same in every process, and nobody can make up a prompt that collides.

The idea is that of vLLM's automatic prefix caching (`vllm/v1/core/kv_cache_utils.py`, `BlockHash`).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Protocol, TypeVar

K = TypeVar("K")  # the name of a page
ROOT = bytes(32)  # the parent of a first block


class PrefixIndex(Protocol[K]):
    """Which block holds which page, where a page is the tokens of one full block at their place in a prefix.

    Invariant: a block holds at most one page. What happens to the block is the pool's business.
    """

    def make_key(self, parent: K | None, page: Sequence[int], cache_salt: str | None) -> K:
        """The name of a page that follows this parent; None: it is the first."""
        ...

    def find(self, keys: Sequence[K]) -> list[int]:
        """The blocks of the longest prefix of these pages that can be found."""
        ...

    def insert(self, keys: Sequence[K], block_ids: Sequence[int], i: int) -> None:
        """Let page i of a sequence be found, whose pages have these keys and stand in these blocks."""
        ...

    def remove(self, block_id: int) -> None:
        """Forget a block's page."""
        ...

    def __contains__(self, block_id: int) -> bool:
        """Whether a block's page can be found."""
        ...

    def check_integrity(self, ref_count: Sequence[int]) -> None:
        """Raise AssertionError where pages and blocks disagree."""
        ...


def page_digest(parent: bytes, page: Sequence[int], extra_keys: Sequence[str] = ()) -> bytes:
    """sha256 over the parent's digest, the tokens as little-endian int64, and the extra keys.

    Each extra key stands behind its length, which keeps ("ab", "c") and ("a", "bc") apart.
    """
    digest = hashlib.sha256(parent + struct.pack(f"<{len(page)}q", *page))
    for extra in extra_keys:
        data = extra.encode(errors="surrogatepass")
        digest.update(struct.pack("<q", len(data)) + data)
    return digest.digest()


class HashIndex:
    """Blocks by the digest of their page.

    Twins are two blocks with one digest: two equal prompts were computed in one step. Both can be found, so
    when one is evicted the other stands in. None is given up for the other: that would change the block
    table of a running sequence, which a step that is under way may be reading.
    """

    def __init__(self) -> None:
        self._blocks: dict[bytes, dict[int, None]] = {}  # digest -> its blocks, the oldest first
        self._digest: dict[int, bytes] = {}

    def make_key(self, parent: bytes | None, page: Sequence[int], cache_salt: str | None) -> bytes:
        """A page's digest; the salt goes into the first, and through the chain into all."""
        first = parent is None and cache_salt is not None
        return page_digest(parent or ROOT, page, [cache_salt] if first and cache_salt is not None else [])

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """The blocks of the pages up to the first that no block holds."""
        found: list[int] = []
        for key in keys:
            if key not in self._blocks:
                break
            found.append(next(iter(self._blocks[key])))
        return found

    def insert(self, keys: Sequence[bytes], block_ids: Sequence[int], i: int) -> None:
        """Let page i be found; again for the same page does nothing."""
        key, block = keys[i], block_ids[i]
        assert self._digest.get(block, key) == key, f"block {block} holds another page"
        self._digest[block] = key
        self._blocks.setdefault(key, {})[block] = None

    def remove(self, block_id: int) -> None:
        """Forget a block's digest, and leave its twins."""
        key = self._digest.pop(block_id)
        del self._blocks[key][block_id]
        if not self._blocks[key]:
            del self._blocks[key]

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._digest

    def check_integrity(self, ref_count: Sequence[int]) -> None:
        """Raise AssertionError unless both tables say the same."""
        found = {block: key for key, blocks in self._blocks.items() for block in blocks}
        assert found == self._digest, "digests and blocks disagree"
        assert all(self._blocks.values()), "a digest has no block"
