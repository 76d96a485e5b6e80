"""Chapter 4: the books of shared blocks, against a plain model whose memory is a dict from slot to value."""

from __future__ import annotations

from collections import Counter
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minivllm.errors import OutOfBlocks
from minivllm.memory.paged import num_blocks_for, slot_mapping
from minivllm.memory.ref_counts import RefCountedBlockPool
from minivllm.memory.sharing import SharingManager


def books(manager: SharingManager) -> str:
    """All that an observer could see, and the order of the free queue."""
    return repr(
        (manager._tables, manager._num_tokens, manager._copies, manager.promised, manager.num_copies)
    ) + (repr((list(manager.pool._free), manager.pool.ref_count)))


@given(num_blocks=st.integers(0, 9), data=st.data())
def test_the_pool_agrees_with_a_plain_count_of_holders(num_blocks, data):
    pool, holds = RefCountedBlockPool(num_blocks), []
    for _ in range(data.draw(st.integers(0, 25))):
        what = data.draw(st.sampled_from(["allocate", "take", "share", "free"]))
        some = data.draw(st.lists(st.integers(0, num_blocks), unique=True, max_size=4))
        if what == "allocate":
            before = pool.num_free_blocks
            if len(some) > before:
                with pytest.raises(OutOfBlocks, match=f"{len(some)} blocks are needed and {before}"):
                    pool.allocate(len(some))
            else:
                holds += pool.allocate(len(some))
        elif what == "take" and some:
            if some[0] < num_blocks and some[0] not in holds:
                pool.take(some[0])
                holds.append(some[0])
            else:
                with pytest.raises(OutOfBlocks, match=f"Block {some[0]} is not free"):
                    pool.take(some[0])
        elif what == "share":
            some = [block for block in some if block in holds]
            pool.share(some)
            holds += some
        elif what == "free":
            wrong = [block for block in some if block not in holds]
            if wrong:
                with pytest.raises(ValueError, match="twice, or were never handed out"):
                    pool.free(some)
            else:
                pool.free(some)
                for block in some:
                    holds.remove(block)
        pool.check_integrity(holds)
        assert pool.ref_count == [holds.count(block) for block in range(num_blocks)]
        assert [pool.is_free(block) for block in range(num_blocks)] == [n == 0 for n in pool.ref_count]


def test_a_block_listed_twice_is_refused_even_where_two_hold_it():
    pool = RefCountedBlockPool(3)
    [block] = pool.allocate(1)
    pool.share([block])
    with pytest.raises(ValueError, match="twice"):
        pool.free([block, block])
    pool.check_integrity([block, block])


class Sharing(RuleBasedStateMachine):
    """Sequences grow, fork, give up what they were granted, and end, in any order. A step in between copies,
    then writes: the value of each token is its own, so a lost or foreign one is seen."""

    @initialize(num_blocks=st.integers(1, 14), block_size=st.integers(1, 4))
    def start(self, num_blocks, block_size):
        self.size = block_size
        self.manager = SharingManager(num_blocks, block_size, bytes_per_token=1)
        self.memory: dict[int, int] = {}  # slot -> value
        self.tokens: dict[int, list[int]] = {}  # sequence -> its values, in memory
        self.planned: dict[int, int] = {}  # sequence -> tokens in all after this step
        self.copies: dict[int, int] = {}  # block written -> block read, not made yet
        self.promised: dict[int, int] = {}
        self.num_copies = 0
        self.ids, self.values = count(), count()

    def some(self, data, among=None):
        return data.draw(st.sampled_from(sorted(self.tokens if among is None else among)))

    def num_free(self) -> int:
        tables = (self.manager.block_table(seq_id) for seq_id in self.tokens)
        taken = {block for table in tables for block in table} | set(self.copies.values())
        return self.manager.pool.num_blocks - len(taken) - sum(self.promised.values())

    def must_copy(self, seq_id: int, has: int, n: int) -> bool:
        if n <= has or has % self.size == 0:
            return False
        last = self.manager.block_table(seq_id)[-1]
        return any(last in self.manager.block_table(other) for other in self.tokens if other != seq_id)

    def allocate(self, seq_id: int, has: int, n: int) -> bool:
        before = books(self.manager)
        table = self.manager.block_table(seq_id) if has else []
        copy = self.must_copy(seq_id, has, n)
        missing = max(0, num_blocks_for(n, self.size) - len(table)) + copy
        fits = missing <= self.num_free()
        assert self.manager.can_allocate(seq_id, n) == fits
        assert self.manager.num_missing_blocks(seq_id, n) == missing
        assert books(self.manager) == before
        if not fits:
            with pytest.raises(OutOfBlocks, match=f"needs {missing} more blocks of {self.size}"):
                self.manager.allocate(seq_id, n)
            assert books(self.manager) == before
            return False
        self.manager.allocate(seq_id, n)
        if copy:
            self.copies[self.manager.block_table(seq_id)[len(table) - 1]] = table[-1]
            self.num_copies += 1
        return True

    def cancel_copy(self, seq_id: int) -> None:
        for block in self.manager.block_table(seq_id):
            self.num_copies -= self.copies.pop(block, None) is not None

    @precondition(lambda self: len(self.tokens) < 2)
    @rule(n=st.integers(1, 9))
    def begin(self, n):
        seq_id = next(self.ids)
        if self.allocate(seq_id, 0, n):
            self.tokens[seq_id] = []
            self.planned[seq_id] = n

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), more=st.integers(0, 5))
    def grow(self, data, more):
        seq_id = self.some(data)
        has = self.planned.get(seq_id, len(self.tokens[seq_id]))
        if seq_id not in self.planned and self.allocate(seq_id, has, has + more):
            self.planned[seq_id] = has + more

    @precondition(lambda self: bool(set(self.tokens) - set(self.planned)))
    @rule(data=st.data())
    def fork(self, data):
        parent, child = self.some(data, set(self.tokens) - set(self.planned)), next(self.ids)
        self.manager.fork(parent, child)
        assert self.manager.block_table(child) == self.manager.block_table(parent)
        self.tokens[child] = list(self.tokens[parent])
        self.promised.pop(parent, None)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), blocks=st.integers(1, 3))
    def promise(self, data, blocks):
        seq_id = self.some(data)
        if blocks <= self.num_free() + self.promised.get(seq_id, 0):
            self.manager.promise(seq_id, blocks)
            self.promised[seq_id] = blocks

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def end(self, data):
        seq_id = self.some(data)
        self.cancel_copy(seq_id)
        self.manager.free(seq_id)
        del self.tokens[seq_id]
        self.planned.pop(seq_id, None)
        self.promised.pop(seq_id, None)

    @rule()
    def step(self):
        pool = self.manager.pool
        for block in range(pool.num_blocks):
            if pool.is_free(block):
                self.memory.update(dict.fromkeys(slot_mapping([block], self.size, 0, self.size), -1))
        copies = self.manager.take_copies()
        assert sorted(copies) == sorted((source, block) for block, source in self.copies.items())
        assert not {source for source, _ in copies} & set(self.copies), "a block is read and written"
        for source, block in copies:
            for offset in range(self.size):
                self.memory[block * self.size + offset] = self.memory.get(source * self.size + offset, -1)
        self.copies.clear()
        writes = []
        for seq_id, n in self.planned.items():
            new = range(len(self.tokens[seq_id]), n)
            table = self.manager.block_table(seq_id)
            writes += slot_mapping(table, self.size, new.start, n)
            self.tokens[seq_id] += [next(self.values) for _ in new]
            self.memory.update(
                zip(writes[len(writes) - len(new) :], self.tokens[seq_id][new.start :], strict=True)
            )
        assert len(set(writes)) == len(writes), "two sequences write to one slot"
        self.planned.clear()
        assert self.manager.take_copies() == []
        for seq_id, tokens in self.tokens.items():
            slots = slot_mapping(self.manager.block_table(seq_id), self.size, 0, len(tokens))
            assert [self.memory[slot] for slot in slots] == tokens, "a sequence has lost a token"

    @invariant()
    def the_books_balance(self):
        if not hasattr(self, "manager"):
            return
        self.manager.check_integrity()
        assert self.manager.num_free_blocks == self.num_free()
        assert self.manager.num_copies == self.num_copies
        tables = [self.manager.block_table(seq_id) for seq_id in self.tokens]
        snapshot = self.manager.snapshot()
        assert snapshot.ref_count == Counter(block for table in tables for block in table)
        assert snapshot.held == len({block for table in tables for block in table}) * self.size
        sizes = {seq_id: self.planned.get(seq_id, len(tokens)) for seq_id, tokens in self.tokens.items()}
        assert {s.seq_id: s.used for s in snapshot.sequences} == sizes
        slots = {slot for s in snapshot.sequences for slot in slot_mapping(s.block_ids, self.size, 0, s.used)}
        assert snapshot.used == len(slots)
        together, apart = self.manager.num_blocks([*self.tokens, -1])
        assert (together, apart) == (len(snapshot.ref_count), sum(map(len, tables)))

    def teardown(self):
        if hasattr(self, "manager"):
            for seq_id in self.tokens:
                self.manager.free(seq_id)
            self.manager.take_copies()
            self.manager.check_integrity()
            assert not any(self.manager.pool.ref_count)
            assert self.manager.num_free_blocks == self.manager.pool.num_blocks


Sharing.TestCase.settings = settings(deadline=None, max_examples=80, stateful_step_count=30)
test_every_sequence_keeps_its_own_tokens_and_the_books_balance = Sharing.TestCase


def manager_of(num_blocks: int = 10, block_size: int = 4, n: int = 6) -> SharingManager:
    """A memory with one sequence, 0, of n tokens."""
    manager = SharingManager(num_blocks, block_size, bytes_per_token=1)
    manager.allocate(0, n)
    return manager


def test_a_fork_takes_no_block_and_full_blocks_stay_shared():
    manager = manager_of(n=6)
    for child in (1, 2, 3):
        manager.fork(0, child)
    assert manager.num_free_blocks == 8
    for seq_id in range(4):
        manager.allocate(seq_id, 7)
    tables = [manager.block_table(seq_id) for seq_id in range(4)]
    assert len({table[0] for table in tables}) == 1
    assert len({table[1] for table in tables}) == 4
    assert len(manager.take_copies()) == 3  # the last one writes where all have read
    assert manager.num_free_blocks == 5
    assert manager.num_blocks(range(4)) == (5, 8)


def test_where_the_last_block_is_full_nothing_is_copied():
    manager = manager_of(n=8)
    manager.fork(0, 1)
    manager.allocate(1, 9)
    manager.allocate(0, 9)
    assert manager.take_copies() == []
    assert manager.block_table(0)[:2] == manager.block_table(1)[:2]
    assert manager.block_table(0)[2] != manager.block_table(1)[2]


def test_the_block_to_copy_to_is_counted_before_anything_is_granted():
    manager = manager_of(num_blocks=2, n=6)
    manager.fork(0, 1)
    assert manager.num_missing_blocks(1, 7) == 1
    assert not manager.can_allocate(1, 7)
    assert manager.can_allocate(1, 6)
    before = books(manager)
    with pytest.raises(OutOfBlocks, match="needs 1 more blocks of 4 for 7 tokens; 0 of 2 are free"):
        manager.allocate(1, 7)
    assert books(manager) == before


def test_the_source_of_a_copy_is_not_handed_out_before_the_copy_is_made():
    manager = manager_of(num_blocks=4, n=6)
    manager.fork(0, 1)
    manager.allocate(1, 7)
    source = manager.block_table(0)[1]
    manager.free(0)  # preempted in the same step: nobody has the source now
    assert manager.num_free_blocks == 1
    manager.allocate(2, 4)
    assert source not in manager.block_table(2)
    assert manager.take_copies() == [(source, manager.block_table(1)[1])]
    assert manager.num_free_blocks == 1
    manager.check_integrity()


def test_a_copy_that_nobody_needs_any_more_is_not_made():
    manager = manager_of(n=6)
    manager.fork(0, 1)
    manager.allocate(1, 7)
    assert (manager.num_free_blocks, manager.num_copies) == (7, 1)
    manager.free(1)
    manager.check_integrity()
    assert (manager.num_free_blocks, manager.num_copies) == (8, 0)
    assert manager.take_copies() == []
    manager.allocate(0, 7)
    assert manager.take_copies() == []


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)], ids=str)
def test_parent_and_children_may_end_in_any_order(order):
    manager = manager_of(n=6)
    manager.fork(0, 1)
    manager.fork(1, 2)
    for k, seq_id in enumerate(order):
        manager.free(seq_id)
        manager.check_integrity()
        assert manager.num_free_blocks == (8 if k < 2 else 10)
    manager.free(order[0])
    assert not any(manager.pool.ref_count)


@given(width=st.integers(1, 5), block_size=st.integers(1, 4), prompt=st.integers(1, 9), data=st.data())
def test_counts_are_back_at_zero_after_a_beam_search(width, block_size, prompt, data):
    """Each round the best beams are forked from any of the last ones, and the last ones go."""
    manager = SharingManager(200, block_size, bytes_per_token=1)
    manager.allocate(0, prompt)
    beams, ids = [0], count(1)
    for step in range(data.draw(st.integers(1, 6))):
        parents = data.draw(st.lists(st.sampled_from(beams), min_size=width, max_size=width))
        children = [next(ids) for _ in parents]
        for parent, child in zip(parents, children, strict=True):
            manager.fork(parent, child)
        for beam in beams:
            manager.free(beam)
        beams = children
        assert manager.num_copies <= width * step
        for beam in beams:
            manager.allocate(beam, prompt + step + 1)
        manager.take_copies()
        manager.check_integrity()
        last = Counter(manager.block_table(beam)[-1] for beam in beams)
        assert set(last.values()) == {1}, "two beams write to one block"
    for beam in beams:
        manager.free(beam)
    assert manager.pool.ref_count == [0] * 200


@given(
    block_size=st.integers(1, 5), n=st.integers(1, 12), num_seqs=st.integers(2, 5), spare=st.integers(0, 3)
)
def test_promised_blocks_are_what_the_forks_need_and_nobody_else_gets_them(block_size, n, num_seqs, spare):
    need = SharingManager(1, block_size, 1).num_blocks_to_fork(n, num_seqs)
    manager = SharingManager(num_blocks_for(n, block_size) + need + spare, block_size, bytes_per_token=1)
    manager.allocate(0, n)
    manager.promise(0, need)
    assert manager.num_free_blocks == spare
    assert not manager.can_allocate(99, (spare + 1) * block_size)
    with pytest.raises(OutOfBlocks):
        manager.allocate(99, (spare + 1) * block_size)
    if spare:
        manager.allocate(99, spare * block_size)
    for child in range(1, num_seqs):
        manager.fork(0, child)
    for seq_id in range(num_seqs):
        manager.allocate(seq_id, n + 1)
    assert manager.num_free_blocks == 0
    manager.check_integrity()


def test_a_promise_ends_with_its_sequence():
    manager = manager_of(n=6)
    manager.promise(0, 3)
    assert manager.num_free_blocks == 5
    manager.free(0)
    assert manager.num_free_blocks == 10


@given(
    num_blocks=st.integers(1, 12),
    block_size=st.integers(1, 4),
    shared=st.integers(1, 12),
    more=st.integers(1, 8),
    num_seqs=st.integers(1, 4),
)
def test_what_fits_ever_fits_alone_and_nothing_more(num_blocks, block_size, shared, more, num_seqs):
    """All sequences grow side by side, one token a turn, until each has its n."""
    manager, n = SharingManager(num_blocks, block_size, bytes_per_token=1), shared + more
    fits = manager.fits_ever(n, num_seqs, shared)
    try:
        manager.allocate(0, shared)
        for child in range(1, num_seqs):
            manager.fork(0, child)
        for length in range(shared + 1, n + 1):
            for seq_id in range(num_seqs):
                manager.allocate(seq_id, length)
            manager.take_copies()
    except OutOfBlocks:
        assert not fits
    else:
        assert fits


def test_adopted_blocks_have_one_holder_for_each_sequence_when_their_maker_has_let_go():
    """How a group comes back to memory: blocks are filled once, then each sequence gets its table."""
    manager = SharingManager(6, 4, bytes_per_token=1)
    common, left, right = manager.pool.allocate(3)
    manager.adopt(7, [common, left], 6)
    manager.adopt(8, [common, right], 8)
    manager.pool.free([common, left, right])
    manager.check_integrity()
    assert [manager.pool.ref_count[block] for block in (common, left, right)] == [2, 1, 1]
    manager.allocate(7, 9)
    assert manager.take_copies() == []
    manager.free(7)
    assert manager.block_table(8) == [common, right]
    manager.free(8)
    manager.check_integrity()
    assert manager.num_free_blocks == 6


def test_a_sequence_with_blocks_adopts_none_and_is_forked_into_by_none():
    manager = manager_of(n=6)
    manager.fork(0, 1)
    for wrong in (lambda: manager.fork(0, 1), lambda: manager.adopt(1, manager.block_table(0), 6)):
        with pytest.raises(AssertionError, match="sequence 1 has blocks already"):
            wrong()
        manager.check_integrity()


def test_a_damaged_count_is_found():
    manager = manager_of(n=6)
    manager.fork(0, 1)
    manager.pool.ref_count[manager.block_table(0)[0]] += 1
    with pytest.raises(AssertionError, match="a count is wrong"):
        manager.check_integrity()
