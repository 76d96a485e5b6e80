"""Chapter 5: prefix caching by hash and by tree, against a model that knows what is in each slot."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections import OrderedDict
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minivllm.errors import InvalidOption, OutOfBlocks, PrefixCacheInUse
from minivllm.memory.paged import num_blocks_for, slot_mapping
from minivllm.memory.prefix_cache import PrefixCachingManager
from minivllm.memory.prefix_index import ROOT, HashIndex, page_digest
from minivllm.memory.prefix_pool import CachingBlockPool
from minivllm.memory.prefix_stats import PrefixCacheStats
from minivllm.memory.radix import RadixIndex
from minivllm.memory.ref_counts import RefCountedBlockPool

both = pytest.mark.parametrize("index", ["hash", "radix"])


def books(manager: PrefixCachingManager) -> str:
    """All that an observer could see: tables, counts, the free queue, and what can be found."""
    pool, index = manager.pool, manager.pool.index
    state = [manager._tables, manager._num_tokens, manager._copies, manager.promised, manager._num_registered]
    state += [list(pool._free), pool.ref_count, manager.stats]
    if isinstance(index, HashIndex):
        state += [index._blocks, index._digest]
    else:
        assert isinstance(index, RadixIndex)
        state += [[(node.start, node.pages, node.block_ids) for node in index.nodes()]]
    return repr(state)


def run(manager: PrefixCachingManager, seq_id: int, tokens: list[int], salt: str | None = None) -> int:
    """Begin a sequence, compute all its tokens and register them; returns the number of hits."""
    hits = manager.match(seq_id, tokens, salt)
    manager.begin(seq_id, len(tokens), hits)
    manager.register(seq_id, tokens, salt)
    manager.check_integrity()
    return len(hits)


class PrefixCaching(RuleBasedStateMachine):
    """Sequences with like beginnings arrive, begin, grow, fork and end, in any order.

    What stands in a slot is the whole list of tokens up to its own, as keys and values depend on them all.
    The model knows what can be found, and when each block was last let go of; nothing else.
    """

    index = "hash"

    @initialize(num_blocks=st.integers(1, 12), block_size=st.integers(1, 3))
    def start(self, num_blocks, block_size):
        self.size, self.num_blocks = block_size, num_blocks
        self.manager = PrefixCachingManager(num_blocks, block_size, bytes_per_token=1, index=self.index)
        self.memory: dict[int, tuple[int, ...]] = {}  # slot -> the tokens up to its own
        self.tokens: dict[int, list[int]] = {}  # sequence -> its tokens, computed or not
        self.salt: dict[int, str | None] = {}
        self.computed: dict[int, int] = {}  # running sequence -> tokens in memory
        self.planned: dict[int, int] = {}  # running sequence -> tokens in memory after this step
        self.registered: dict[int, int] = {}
        self.findable: dict[int, tuple] = {}  # block -> (salt, all tokens up to its last), the oldest first
        self.reads: dict[int, int] = {}  # block written -> block read, not copied yet
        self.released: dict[int, int] = {}  # free block -> when it was let go of
        self.ids, self.clock = count(), count()

    def taken(self) -> set[int]:
        tables = (self.manager.block_table(seq_id) for seq_id in self.computed)
        return {block for table in tables for block in table} | set(self.reads.values())

    def cached(self) -> list[int]:
        """Free blocks that can be found, the next to be evicted first."""
        return sorted(set(self.findable) - self.taken(), key=self.released.__getitem__)

    def hits(self, seq_id: int) -> list[int]:
        """The first block that holds each full page, as far as there is one."""
        tokens, found = self.tokens[seq_id], []
        for end in range(self.size, len(tokens), self.size):
            page = (self.salt[seq_id], tuple(tokens[:end]))
            block = next((block for block, holds in self.findable.items() if holds == page), None)
            if block is None:
                break
            found.append(block)
        return found

    def has_a_place(self, seq_id: int, i: int) -> bool:
        """Whether page i of a sequence can be found from now on; in a tree, once, below the one above."""
        table = self.manager.block_table(seq_id)
        if self.index == "hash" or table[i] in self.findable:
            return True
        page = (self.salt[seq_id], tuple(self.tokens[seq_id][: (i + 1) * self.size]))
        return page not in self.findable.values() and (i == 0 or table[i - 1] in self.findable)

    def take_blocks(self, taken: set[int], cached: list[int], n: int) -> None:
        """n blocks were handed out beside those taken: the empty ones, then the least recently used."""
        new, empty = self.taken() - taken, self.num_blocks - len(taken) - len(cached)
        assert len(new) == n
        assert new & set(self.findable) == set(cached[: max(0, n - empty)])
        for block in new:
            self.findable.pop(block, None)

    def let_go(self, blocks: list[int]) -> None:
        """These were let go of in this order, by one holder."""
        taken = self.taken()
        for block in blocks:
            if block not in taken:
                self.released[block] = next(self.clock)

    def allocate(self, seq_id: int, has: int, n: int) -> bool:
        """As in chapter 4; what is new is which blocks lose their contents."""
        before, taken, cached = books(self.manager), self.taken(), self.cached()
        table = self.manager.block_table(seq_id)
        missing = self.manager.num_missing_blocks(seq_id, n)
        fits = missing <= self.num_blocks - len(taken)
        assert self.manager.can_allocate(seq_id, n) == fits
        if not fits:
            with pytest.raises(OutOfBlocks):
                self.manager.allocate(seq_id, n)
            assert books(self.manager) == before
            return False
        self.manager.allocate(seq_id, n)
        if table and self.manager.block_table(seq_id)[len(table) - 1] != table[-1]:
            self.reads[self.manager.block_table(seq_id)[len(table) - 1]] = table[-1]
        self.take_blocks(taken, cached, missing)
        return True

    @rule(data=st.data(), tail=st.lists(st.integers(0, 2), min_size=1, max_size=8))
    def arrive(self, data, tail):
        """A prompt of any kind, or one that goes on from another."""
        seq_id = next(self.ids)
        other = data.draw(st.sampled_from([None, *self.tokens]))
        keep = 0 if other is None else data.draw(st.integers(0, len(self.tokens[other])))
        self.tokens[seq_id] = [*(self.tokens[other][:keep] if keep else []), *tail]
        self.salt[seq_id] = data.draw(st.sampled_from([None, None, None, ""]))
        if keep and data.draw(st.booleans()):
            self.salt[seq_id] = self.salt[other]

    @precondition(lambda self: bool(set(self.tokens) - set(self.computed)))
    @rule(data=st.data())
    def begin(self, data):
        seq_id = data.draw(st.sampled_from(sorted(set(self.tokens) - set(self.computed))))
        tokens, before, taken = self.tokens[seq_id], books(self.manager), self.taken()
        hits = self.manager.match(seq_id, tokens, self.salt[seq_id])
        assert hits == self.hits(seq_id) == self.manager.match(seq_id, tokens, self.salt[seq_id])
        for j, slot in enumerate(slot_mapping(hits, self.size, 0, len(hits) * self.size)):
            assert self.memory[slot] == tuple(tokens[: j + 1]), "a hit on foreign contents"
        n = data.draw(st.integers(len(hits) * self.size + 1, len(tokens)))
        new = num_blocks_for(n, self.size) - len(hits)
        fits = new + len(set(hits) - taken) <= self.num_blocks - len(taken)
        assert self.manager.can_begin(seq_id, n, hits) == fits
        assert books(self.manager) == before
        cached = [block for block in self.cached() if block not in hits]
        if not fits:
            with pytest.raises(OutOfBlocks, match=f"{len(hits)} of them cached"):
                self.manager.begin(seq_id, n, hits)
            assert books(self.manager) == before
            return
        self.manager.begin(seq_id, n, hits)
        self.computed[seq_id], self.planned[seq_id] = len(hits) * self.size, n
        self.registered[seq_id] = len(hits)
        assert self.manager.block_table(seq_id)[: len(hits)] == hits
        self.take_blocks(taken | set(hits), cached, new)

    @precondition(lambda self: bool(set(self.computed) - set(self.planned)))
    @rule(data=st.data(), token=st.integers(0, 2))
    def grow(self, data, token):
        """The next chunk of a prompt, or one token after its end."""
        seq_id = data.draw(st.sampled_from(sorted(set(self.computed) - set(self.planned))))
        has = self.computed[seq_id]
        if has == len(self.tokens[seq_id]):
            self.tokens[seq_id].append(token)
        n = data.draw(st.integers(has + 1, len(self.tokens[seq_id])))
        if self.allocate(seq_id, has, n):
            self.planned[seq_id] = n

    @precondition(lambda self: bool(set(self.computed) - set(self.planned)))
    @rule(data=st.data())
    def fork(self, data):
        parent = data.draw(st.sampled_from(sorted(set(self.computed) - set(self.planned))))
        child = next(self.ids)
        self.manager.fork(parent, child)
        self.tokens[child] = self.tokens[parent][: self.computed[parent]]
        self.salt[child], self.computed[child] = self.salt[parent], self.computed[parent]
        self.registered[child] = self.registered[parent]

    @precondition(lambda self: self.computed)
    @rule(data=st.data(), back=st.booleans())
    def end(self, data, back):
        """A sequence ends, or is preempted and waits again."""
        seq_id = data.draw(st.sampled_from(sorted(self.computed)))
        table = self.manager.block_table(seq_id)
        self.manager.free(seq_id)
        del self.computed[seq_id], self.registered[seq_id]
        self.planned.pop(seq_id, None)
        for i, block in enumerate(table):
            table[i] = self.reads.pop(block, block)
        self.let_go(table[::-1])
        if not back:
            del self.tokens[seq_id], self.salt[seq_id]

    @rule(late=st.booleans())
    def step(self, late):
        """Copy, write, and register what is full; if late, at a later step."""
        pool = self.manager.pool
        for block in range(self.num_blocks):
            if pool.is_free(block) and block not in self.findable:
                self.memory.update(dict.fromkeys(slot_mapping([block], self.size, 0, self.size), ()))
        sources = []
        for source, block in self.manager.take_copies():
            assert self.reads.pop(block) == source
            sources.append(source)
            for offset in range(self.size):
                self.memory[block * self.size + offset] = self.memory.get(source * self.size + offset, ())
        self.let_go(sources)
        for seq_id, n in self.planned.items():
            start, table = self.computed[seq_id], self.manager.block_table(seq_id)
            for j, slot in enumerate(slot_mapping(table, self.size, start, n), start):
                assert slot // self.size not in self.findable, "a block that can be found is written"
                self.memory[slot] = tuple(self.tokens[seq_id][: j + 1])
            self.computed[seq_id] = n
        self.planned.clear()
        for seq_id, n in self.computed.items():
            tokens, table = self.tokens[seq_id], self.manager.block_table(seq_id)
            held = [self.memory[slot] for slot in slot_mapping(table, self.size, 0, n)]
            assert held == [tuple(tokens[: j + 1]) for j in range(n)]
            if not late:
                self.manager.register(seq_id, tokens[:n], self.salt[seq_id])
                for i in range(self.registered[seq_id], n // self.size):
                    if self.has_a_place(seq_id, i):
                        page = (self.salt[seq_id], tuple(tokens[: (i + 1) * self.size]))
                        assert self.findable.setdefault(table[i], page) == page
                self.registered[seq_id] = n // self.size
            assert self.manager.num_registered(seq_id) == self.registered[seq_id]

    @rule()
    def reset(self):
        before, held = books(self.manager), len(self.taken())
        if held:
            with pytest.raises(PrefixCacheInUse, match=f"{held} of {self.num_blocks} blocks are held"):
                self.manager.reset()
            assert books(self.manager) == before
        else:
            self.manager.reset()
            self.findable.clear()

    @invariant()
    def the_books_balance(self):
        if not hasattr(self, "manager"):
            return
        self.manager.check_integrity()
        snapshot = self.manager.snapshot()
        assert list(snapshot.cached) == self.cached()
        assert self.manager.num_free_blocks == self.num_blocks - len(self.taken())
        assert {block for block in range(self.num_blocks) if block in self.manager.pool.index} == set(
            self.findable
        )
        for block, (_, tokens) in self.findable.items():
            slots = slot_mapping([block], self.size, 0, self.size)
            assert [self.memory[slot] for slot in slots] == [
                tokens[: len(tokens) - self.size + j + 1] for j in range(self.size)
            ]

    def teardown(self):
        if hasattr(self, "manager"):
            for seq_id in self.tokens:
                self.manager.free(seq_id)
            self.manager.take_copies()
            self.manager.reset()
            self.manager.check_integrity()
            assert not any(self.manager.pool.ref_count)
            assert self.manager.snapshot().cached == ()
            assert not self.manager._keys, "the tokens of a sequence outlive it"


class PrefixTree(PrefixCaching):
    """The same in a tree, where each page has one place."""

    index = "radix"


PrefixCaching.TestCase.settings = settings(deadline=None, max_examples=80, stateful_step_count=30)
PrefixTree.TestCase.settings = PrefixCaching.TestCase.settings
test_by_hash_a_hit_is_right_and_as_long_as_lru_allows = PrefixCaching.TestCase
test_by_tree_a_hit_is_right_and_as_long_as_lru_allows = PrefixTree.TestCase


# The digest


def by_hand(tokens: list[int], block_size: int, salt: str | None) -> list[str]:
    digest, digests = bytes(32), []
    for start in range(0, len(tokens) - block_size + 1, block_size):
        data = digest
        for token in tokens[start : start + block_size]:
            data += token.to_bytes(8, "little", signed=True)
        if start == 0 and salt is not None:
            data += len(salt.encode()).to_bytes(8, "little") + salt.encode()
        digest = hashlib.sha256(data).digest()
        digests.append(digest.hex())
    return digests


@given(
    tokens=st.lists(st.integers(-(2**40), 2**40), max_size=20),
    block_size=st.integers(1, 6),
    salt=st.none() | st.text(st.characters(codec="utf-8"), max_size=5),
)
def test_digests_are_sha256_of_parent_tokens_and_salt(tokens, block_size, salt):
    manager = PrefixCachingManager(1, block_size, bytes_per_token=1)
    keys = manager._page_keys(0, tokens, salt)
    assert [key.hex() for key in keys] == by_hand(tokens, block_size, salt)


@pytest.mark.parametrize("seed", ["0", "1", "4242"])
def test_digests_are_the_same_in_every_process(seed):
    tokens, salt = [50_000, 7, 7, 123_456, 0, 1, 2, 3], "tenant-é"
    code = (
        "from minivllm.memory.prefix_cache import PrefixCachingManager as M\n"
        f"print(*[key.hex() for key in M(1, 3, 1)._page_keys(0, {tokens}, {salt!r})])"
    )
    root = Path(__file__).parent.parent
    env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(root), "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=root)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == by_hand(tokens, 3, salt)


@given(
    one=st.tuples(st.lists(st.integers(0, 3), min_size=2, max_size=2), st.lists(st.text("ab\0", max_size=3))),
    two=st.tuples(st.lists(st.integers(0, 3), min_size=2, max_size=2), st.lists(st.text("ab\0", max_size=3))),
)
def test_digests_are_equal_where_tokens_and_extra_keys_are(one, two):
    assert (page_digest(ROOT, *one) == page_digest(ROOT, *two)) == (one == two)


def test_extra_keys_that_join_to_the_same_text_are_told_apart():
    extras = [("ab", "c"), ("a", "bc"), ("abc",), ("abc", ""), ("", "abc"), ()]
    assert len({page_digest(ROOT, [1, 2], extra) for extra in extras}) == len(extras)


def test_the_digest_of_a_page_depends_on_every_token_before_it():
    first, other = page_digest(ROOT, [1, 2]), page_digest(ROOT, [1, 3])
    assert page_digest(first, [5, 6]) != page_digest(other, [5, 6])
    assert page_digest(first, [5, 6]) != page_digest(ROOT, [5, 6])


# Hits


@both
@pytest.mark.parametrize("block_size", [1, 3, 4])
@pytest.mark.parametrize("k", [1, 2, 5])
@pytest.mark.parametrize("more", [-1, 0, 1])
def test_one_token_at_least_is_left_to_compute(index, block_size, k, more):
    tokens = list(range(k * block_size + more))
    manager = PrefixCachingManager(20, block_size, bytes_per_token=1, index=index)
    assert manager.match(0, tokens) == []
    if tokens:
        run(manager, 0, tokens)
    hits = manager.match(1, tokens)
    assert len(hits) == max(0, len(tokens) - 1) // block_size
    assert len(hits) * block_size < max(1, len(tokens))
    assert len(manager.match(2, [*tokens, 99])) == len(tokens) // block_size


@both
def test_what_is_not_registered_is_never_hit(index):
    """Chunks of a long prompt: what is allocated for a chunk under way must not be found."""
    manager, tokens = PrefixCachingManager(8, 2, bytes_per_token=1, index=index), list(range(9))
    manager.begin(0, 9, manager.match(0, tokens))
    assert manager.match(1, tokens) == []
    manager.register(0, tokens[:5])
    assert manager.match(1, tokens) == manager.block_table(0)[:2]
    manager.free(0)
    assert len(manager.match(1, tokens)) == 2
    manager.check_integrity()
    assert len(manager.snapshot().cached) == 2


@both
def test_more_tokens_than_have_memory_are_not_registered(index):
    manager = PrefixCachingManager(8, 2, bytes_per_token=1, index=index)
    manager.begin(0, 3, [])
    with pytest.raises(AssertionError, match="more tokens are computed than have memory"):
        manager.register(0, [1, 2, 3, 4])


@both
def test_a_sequence_that_is_asked_again_with_more_tokens_finds_more(index):
    manager, tokens = PrefixCachingManager(8, 2, bytes_per_token=1, index=index), list(range(9))
    run(manager, 0, tokens)
    lengths = [len(manager.match(1, tokens[:n])) for n in (0, 1, 4, 5, 9, 3, 9)]
    assert lengths == [0, 0, 1, 2, 4, 1, 4]
    manager.free(1)
    assert manager.match(1, [5, 6, 7, 8]) == []


@both
def test_salts_are_separate(index):
    manager, tokens = PrefixCachingManager(40, 2, bytes_per_token=1, index=index), list(range(9))
    salts = [None, "", "a", "b"]
    for seq_id, salt in enumerate(salts):
        assert run(manager, seq_id, tokens, salt) == 0
    for seq_id, salt in enumerate(salts):
        assert manager.match(100 + seq_id, tokens, salt) == manager.block_table(seq_id)[:4]
    assert manager.match(200, tokens, "c") == []


@both
def test_a_fork_registers_what_it_alone_has_computed(index):
    manager, tokens = PrefixCachingManager(12, 2, bytes_per_token=1, index=index), [1, 2, 3, 4, 5]
    manager.begin(0, 5, [])
    manager.register(0, tokens[:2])
    manager.fork(0, 1)
    assert manager.num_registered(1) == 1
    for seq_id, token in ((0, 6), (1, 7)):
        manager.allocate(seq_id, 6)
        manager.take_copies()
        manager.register(seq_id, [*tokens, token])
        manager.register(seq_id, [*tokens, token])
    manager.check_integrity()
    assert manager.num_registered(0) == manager.num_registered(1) == 3
    for seq_id, token in ((0, 6), (1, 7)):
        assert manager.match(9 + seq_id, [*tokens, token, 0]) == manager.block_table(seq_id)
    assert manager.block_table(0)[:2] == manager.block_table(1)[:2]


@both
def test_adopted_blocks_are_found_when_they_are_registered(index):
    """A group comes back: what is still cached is held first, the rest is filled and adopted."""
    manager, tokens = PrefixCachingManager(4, 2, bytes_per_token=1, index=index), [1, 2, 3, 4, 5]
    run(manager, 0, tokens[:3])
    manager.free(0)
    hits = manager.match(7, tokens)
    manager.pool.share(hits)
    new = manager.pool.allocate(2)
    manager.adopt(7, [*hits, *new], 5)
    manager.adopt(8, [*hits, *new], 5)
    manager.pool.free([*hits, *new])
    manager.check_integrity()
    assert manager.num_free_blocks == 1
    assert manager.num_registered(7) == 0
    for seq_id in (7, 8):
        manager.register(seq_id, tokens)
    manager.check_integrity()
    assert manager.match(9, tokens) == [*hits, new[0]]


# Admission


@both
def test_a_hit_on_a_cached_block_is_charged(index):
    manager, tokens = PrefixCachingManager(4, 2, bytes_per_token=1, index=index), list(range(7))
    run(manager, 0, tokens)
    manager.free(0)
    hits = manager.match(1, tokens)
    assert (len(hits), manager.num_free_blocks) == (3, 4)
    assert manager.can_begin(1, 8, hits)
    assert not manager.can_begin(1, 9, hits)
    manager.allocate(5, 1)
    assert not manager.can_begin(1, 7, manager.match(1, tokens))
    manager.free(5)
    manager.promise(99, 1)
    assert not manager.can_begin(1, 7, manager.match(1, tokens))


@both
def test_a_hit_on_a_block_in_use_is_free_of_charge(index):
    manager, tokens = PrefixCachingManager(5, 2, bytes_per_token=1, index=index), list(range(7))
    run(manager, 0, tokens)
    manager.begin(1, 7, manager.match(1, tokens))
    assert manager.num_free_blocks == 0
    manager.check_integrity()


@both
def test_hits_are_taken_before_new_blocks_are(index):
    """The hits are the next blocks in the queue: an allocation before them would hand them out."""
    manager, tokens = PrefixCachingManager(3, 2, bytes_per_token=1, index=index), list(range(5))
    run(manager, 0, tokens)
    manager.free(0)
    manager.allocate(5, 1)  # the block with nothing to find
    hits = manager.match(1, [0, 1, 9])
    manager.begin(1, 3, hits)
    assert manager.block_table(1)[0] == hits[0]
    assert len(set(manager.block_table(1))) == 2
    assert manager.match(2, tokens) == hits
    manager.check_integrity()


@both
def test_hits_that_are_evicted_since_are_refused(index):
    manager, tokens = PrefixCachingManager(3, 2, bytes_per_token=1, index=index), list(range(5))
    run(manager, 0, tokens)
    manager.free(0)
    hits = manager.match(1, tokens)
    run(manager, 2, [7, 7, 7, 7, 7])
    manager.free(2)
    with pytest.raises(AssertionError, match="the pool has changed"):
        manager.begin(1, 5, hits)
    manager.check_integrity()


@both
def test_a_sequence_that_gives_up_its_hits_may_begin_again(index):
    manager, tokens = PrefixCachingManager(4, 2, bytes_per_token=1, index=index), list(range(5))
    run(manager, 0, tokens)
    manager.free(0)
    manager.begin(1, 5, manager.match(1, tokens))
    manager.free(1)
    assert (manager.num_free_blocks, manager.num_registered(1)) == (4, 0)
    manager.begin(1, 5, manager.match(1, tokens))
    assert manager.num_registered(1) == 2
    manager.check_integrity()


# Eviction


@both
def test_a_block_that_is_handed_out_again_is_not_found(index):
    manager = PrefixCachingManager(3, 2, bytes_per_token=1, index=index)
    run(manager, 0, [1, 2, 3, 4, 5])
    manager.free(0)
    manager.begin(1, 6, [])
    assert manager.match(2, [1, 2, 3, 4, 5]) == []
    manager.free(1)
    assert manager.match(2, [1, 2, 3, 4, 5]) == []
    assert manager.snapshot().cached == ()
    manager.check_integrity()


@both
def test_the_end_of_a_prefix_is_evicted_before_its_beginning(index):
    manager, tokens = PrefixCachingManager(5, 2, bytes_per_token=1, index=index), list(range(9))
    run(manager, 0, tokens)
    manager.free(0)
    for seq_id, left in enumerate((4, 3, 2, 1, 0), 1):  # the first takes the block with nothing to find
        manager.allocate(seq_id, 1)
        assert len(manager.match(99, tokens)) == left
        manager.check_integrity()


@both
def test_the_least_recently_used_prefix_is_evicted_first(index):
    manager = PrefixCachingManager(6, 2, bytes_per_token=1, index=index)
    for seq_id, first in enumerate((10, 20, 30)):
        run(manager, seq_id, [first, 0, 1])
        manager.free(seq_id)
    assert run(manager, 3, [10, 0, 1]) == 1  # used again
    manager.free(3)
    manager.begin(4, 8, [])
    assert [len(manager.match(50 + first, [first, 0, 1])) for first in (10, 20, 30)] == [1, 0, 1]


class OneQueuePool(CachingBlockPool):
    """Free blocks in one queue, whether anything can be found in them or not."""

    def free(self, block_ids):
        RefCountedBlockPool.free(self, block_ids)


@both
@pytest.mark.parametrize(
    "pool, survives", [(CachingBlockPool, True), (OneQueuePool, False)], ids=["two", "one"]
)
def test_a_prefix_survives_a_flood_of_prompts_that_leave_nothing_to_find(index, pool, survives):
    manager = PrefixCachingManager(8, 4, bytes_per_token=1, index=index)
    manager.pool = pool(8, manager.pool.index)
    hot = list(range(13))
    run(manager, 0, hot)
    manager.free(0)
    for seq_id in range(1, 30):
        manager.begin(seq_id, 3, manager.match(seq_id, [seq_id, 0, 0]))
        manager.register(seq_id, [seq_id, 0, 0])
        manager.free(seq_id)
    assert len(manager.match(99, hot)) == (3 if survives else 0)


@both
@pytest.mark.parametrize("every, survives", [(1, True), (2, True), (4, False)], ids=["1", "2", "4"])
def test_a_prefix_that_is_used_survives_a_flood_of_others(index, every, survives):
    """Each cold prompt leaves two cached blocks; 9 blocks hold the hot prefix and those of three of them."""
    manager, hot = PrefixCachingManager(9, 2, bytes_per_token=1, index=index), [1, 2, 3, 4, 5]
    run(manager, 0, hot)
    manager.free(0)
    hits = []
    for seq_id in range(1, 40):
        run(manager, seq_id, [100 + seq_id, 0, 0, 0, 0])
        manager.free(seq_id)
        if seq_id % every == 0:
            hits.append(run(manager, 1000 + seq_id, hot))
            manager.free(1000 + seq_id)
    assert set(hits) == ({2} if survives else {0})


# Twins


def twins(index: str) -> tuple[PrefixCachingManager, list[int]]:
    """Two equal prompts, computed in one step."""
    manager, tokens = PrefixCachingManager(8, 2, bytes_per_token=1, index=index), [1, 2, 3, 4, 5]
    for seq_id in (0, 1):
        manager.begin(seq_id, 5, manager.match(seq_id, tokens))
    for seq_id in (0, 1):
        manager.register(seq_id, tokens)
    manager.check_integrity()
    assert not set(manager.block_table(0)) & set(manager.block_table(1))
    assert manager.match(9, tokens) == manager.block_table(0)[:2]
    return manager, tokens


def test_by_hash_both_twins_can_be_found_and_one_stands_in_for_the_other():
    manager, tokens = twins("hash")
    second = manager.block_table(1)[:2]
    manager.free(0)
    manager.begin(2, 10, [])  # evicts those of the first
    manager.check_integrity()
    assert manager.match(9, tokens) == second
    assert manager.block_table(1)[:2] == second, "a table does not change"
    manager.free(2)
    manager.free(1)
    assert manager.match(9, tokens) == second


def test_by_hash_what_follows_a_twin_can_be_found():
    manager, tokens = twins("hash")
    manager.allocate(1, 7)
    manager.register(1, [*tokens, 6, 7])
    assert manager.match(9, [*tokens, 6, 7]) == [*manager.block_table(0)[:2], manager.block_table(1)[2]]


def test_in_a_tree_the_second_twin_and_what_follows_it_stay_out():
    manager, tokens = twins("radix")
    manager.allocate(1, 7)
    manager.register(1, [*tokens, 6, 7])
    manager.check_integrity()
    assert manager.match(9, [*tokens, 6, 7]) == manager.block_table(0)[:2]
    assert manager.num_registered(1) == 3
    manager.free(0)
    manager.free(1)
    manager.check_integrity()
    assert len(manager.snapshot().cached) == 2


def test_in_a_tree_a_twin_in_the_middle_of_a_run_stays_out():
    manager, tokens = PrefixCachingManager(20, 2, bytes_per_token=1, index="radix"), [1, 2, 3, 4, 5, 6]
    run(manager, 0, tokens[:3])
    for seq_id in (1, 2):
        manager.begin(seq_id, 6, manager.match(seq_id, tokens))
    for seq_id in (1, 2):
        manager.register(seq_id, tokens)
        manager.check_integrity()
    assert manager.match(9, [*tokens, 7]) == manager.block_table(1)
    assert shape(manager)[()] == [tokens]


# The tree


def shape(manager: PrefixCachingManager) -> dict[tuple[int, ...], list[list[int]]]:
    """For each path from the root, by its tokens: the tokens of the runs below."""
    index = manager.pool.index
    assert isinstance(index, RadixIndex)

    def tokens(node):
        return [token for _, page in node.pages for token in page]

    paths: dict[int, tuple[int, ...]] = {}
    found = {}
    for node in index.nodes():
        paths[id(node)] = (*(paths[id(node.parent)] if node.parent else ()), *tokens(node))
        found[paths[id(node)]] = sorted(map(tokens, node.children.values()))
    return found


def test_the_tree_is_the_one_in_the_picture():
    manager = PrefixCachingManager(20, 2, bytes_per_token=1, index="radix")
    run(manager, 0, [1, 2, 3, 4, 5, 6])
    assert shape(manager)[()] == [[1, 2, 3, 4, 5, 6]]
    run(manager, 1, [1, 2, 3, 4, 9, 9])
    assert shape(manager)[()] == [[1, 2, 3, 4]]
    assert shape(manager)[(1, 2, 3, 4)] == [[5, 6], [9, 9]]
    run(manager, 2, [1, 2, 7, 7])
    assert shape(manager)[()] == [[1, 2]]
    assert shape(manager)[(1, 2)] == [[3, 4], [7, 7]]
    assert shape(manager)[(1, 2, 3, 4)] == [[5, 6], [9, 9]]


def test_a_split_is_at_a_page_and_never_within_one():
    manager = PrefixCachingManager(20, 3, bytes_per_token=1, index="radix")
    run(manager, 0, [1, 2, 3, 4, 5, 6])
    assert run(manager, 1, [1, 2, 3, 4, 5, 7, 8]) == 1
    assert shape(manager)[(1, 2, 3)] == [[4, 5, 6], [4, 5, 7]]
    assert run(manager, 2, [1, 2, 9, 4]) == 0
    assert shape(manager)[()] == [[1, 2, 3], [1, 2, 9]]


def test_a_leaf_is_evicted_page_by_page_from_its_end():
    """Pages of three tokens: two blocks that are needed cost two pages, not one or six."""
    manager, tokens = PrefixCachingManager(4, 3, bytes_per_token=1, index="radix"), list(range(12))
    run(manager, 0, tokens)
    manager.free(0)
    manager.begin(1, 6, [])
    assert shape(manager)[()] == [tokens[:6]]
    manager.check_integrity()


def test_a_page_in_the_tree_is_evicted_only_when_nothing_is_below_it():
    manager = PrefixCachingManager(6, 2, bytes_per_token=1, index="radix")
    run(manager, 0, [1, 2, 3, 4])
    run(manager, 1, [1, 2, 5, 6])
    manager.free(0)
    with pytest.raises(AssertionError, match="a page goes before one below it"):
        manager.pool.index.remove(manager.block_table(1)[0])


# Reset, options, statistics


@both
def test_reset_forgets_everything_or_nothing(index):
    manager, tokens = PrefixCachingManager(6, 2, bytes_per_token=1, index=index), list(range(5))
    run(manager, 0, tokens)
    run(manager, 1, tokens)
    manager.free(0)
    run(manager, 2, [9, 9])
    with pytest.raises(PrefixCacheInUse, match="4 of 6 blocks are held") as error:
        manager.reset()
    assert "Finish or abort" in str(error.value)
    assert len(manager.match(3, tokens)) == 2
    manager.free(1)
    manager.free(2)
    manager.reset()
    assert (manager.match(3, tokens), manager.snapshot().cached) == ([], ())
    manager.check_integrity()
    assert run(manager, 3, tokens) == 0


def test_an_unknown_index_is_refused():
    with pytest.raises(InvalidOption, match=r"prefix_cache is 'tree'.*hash.*radix"):
        PrefixCachingManager(6, 2, bytes_per_token=1, index="tree")


def test_the_three_hit_rates_are_those_of_the_docstring():
    stats = PrefixCacheStats()
    assert (stats.block_hit_rate, stats.token_hit_rate, stats.request_hit_rate) == (None, None, None)
    stats.record(3, 0, 4)
    assert (stats.block_hit_rate, stats.token_hit_rate, stats.request_hit_rate) == (None, 0.0, 0.0)
    stats.record(10, 2, 4)
    assert (stats.block_hit_rate, stats.token_hit_rate, stats.request_hit_rate) == (1.0, 8 / 13, 0.5)


@given(
    requests=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 9)), min_size=1), size=st.integers(1, 7)
)
def test_hit_rates_count_blocks_tokens_and_requests(requests, size):
    stats = PrefixCacheStats()
    asked = [(n, min(hits, (n - 1) // size)) for n, hits in requests]
    for n, hits in asked:
        stats.record(n, hits, size)
    blocks = sum(len(range(size, n + 1, size)) for n, _ in asked)
    assert stats.block_hit_rate == (sum(hits for _, hits in asked) / blocks if blocks else None)
    assert stats.token_hit_rate == sum(hits * size for _, hits in asked) / sum(n for n, _ in asked)
    assert stats.request_hit_rate == len([1 for _, hits in asked if hits]) / len(asked)


# Cost


def refuse(*args):
    raise AssertionError("the whole pool is walked through")


class NoWalk(OrderedDict):
    """A queue that nobody may walk through."""

    __iter__ = __reversed__ = keys = items = values = copy = refuse


class NoScan(list):
    """A list that is asked for single items only."""

    __iter__ = __reversed__ = __contains__ = index = count = copy = refuse


def lines_run(action) -> int:
    """Lines of the package that an action runs; not those that a garbage collection or a tool runs."""
    lines = 0

    def trace(frame, event, arg):
        nonlocal lines
        lines += event == "line"
        return trace if "minivllm" in frame.f_globals["__name__"] else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)
    return lines


@both
def test_no_operation_depends_on_the_size_of_the_pool(index):
    def work(manager):
        for seq_id, last in ((0, [5]), (1, [5]), (2, [6, 7])):
            tokens = [1, 2, 3, 4, *last]
            hits = manager.match(seq_id, tokens)
            manager.begin(seq_id, len(tokens), hits)
            manager.register(seq_id, tokens)
        manager.fork(0, 3)
        manager.allocate(3, 6)
        manager.take_copies()
        for seq_id in (2, 0, 1, 3):
            manager.free(seq_id)
        manager.begin(4, 5, manager.match(4, [1, 2, 3, 4, 5]))

    costs = []
    for num_blocks in (100, 1_000_000):
        manager = PrefixCachingManager(num_blocks, 2, bytes_per_token=1, index=index)
        manager.pool._free = NoWalk.fromkeys(range(num_blocks))
        manager.pool.ref_count = NoScan([0] * num_blocks)
        costs.append(lines_run(lambda manager=manager: work(manager)))
    assert costs[0] == costs[1]


@both
def test_a_full_pool_of_cached_blocks_is_evicted_at_the_same_cost(index):
    costs = []
    for n in (100, 2000):
        manager = PrefixCachingManager(n, 1, bytes_per_token=1, index=index)
        for seq_id in range(n // 20):
            run_without_check(manager, seq_id, [seq_id, *range(19)])
            manager.free(seq_id)
        assert len(manager.snapshot().cached) == n
        costs.append(lines_run(lambda manager=manager: manager.allocate(-1, 10)))
    assert costs[0] == costs[1]


def run_without_check(manager, seq_id, tokens):
    manager.begin(seq_id, len(tokens), manager.match(seq_id, tokens))
    manager.register(seq_id, tokens)


@both
def test_registering_costs_what_is_new(index):
    manager = PrefixCachingManager(3000, 2, bytes_per_token=1, index=index)
    tokens, costs = list(range(5000)), []
    manager.allocate(0, 5000)
    for n in (10, 12, 4000, 4002, 4002):
        costs.append(lines_run(lambda n=n: manager.register(0, tokens[:n])))
    assert costs[1] == costs[3] < costs[2] / 100
    assert costs[4] < costs[3]


@both
def test_a_waiting_sequence_is_hashed_once(index):
    manager, tokens = PrefixCachingManager(300, 2, bytes_per_token=1, index=index), list(range(500))
    first, again = (lines_run(lambda: manager.match(0, tokens)) for _ in range(2))
    assert again * 20 < first
