"""Chapter 6: swapping against a plain model of both pools: whose contents stand where after each plan."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minivllm.errors import OutOfBlocks
from minivllm.memory.paged import num_blocks_for
from minivllm.memory.paged_store import PagedBatch
from minivllm.memory.ref_counts import RefCountedBlockPool
from minivllm.memory.sharing import SharingManager
from minivllm.memory.swap import SwapSpace
from minivllm.memory.swap_store import SwapStore
from minivllm.model.batch import Batch
from minivllm.model.loader import load_model

POISON = "poison"


class RememberingPool(RefCountedBlockPool):
    """Knows which blocks were handed out since `handed_out` was last cleared: nothing in them is wanted."""

    def __init__(self, num_blocks: int):
        super().__init__(num_blocks)
        self.handed_out: set[int] = set()

    def allocate(self, n: int) -> list[int]:
        block_ids = super().allocate(n)
        self.handed_out |= set(block_ids)
        return block_ids


def state(*books: SharingManager | SwapSpace) -> str:
    """All that the books know, to see whether anything has changed."""
    return repr([{**vars(b), "pool": vars(b.pool)} for b in books])


def pattern(tables: Iterable[list[int]]) -> list[list[int]]:
    """Which blocks of these tables are the same, whatever their numbers."""
    numbers: dict[int, int] = {}
    return [[numbers.setdefault(block, len(numbers)) for block in table] for table in tables]


class Machine:
    """Both pools as lists of slots, and what each sequence should find in them.

    A request is a list of sequences. tokens: of each sequence, a value of its own for each computed token.
    """

    def __init__(self, num_blocks: int, num_cpu_blocks: int, block_size: int):
        self.manager, self.swap = SharingManager(num_blocks, block_size, 1), SwapSpace(num_cpu_blocks)
        self.pool = self.manager.pool = RememberingPool(num_blocks)
        self.size = block_size
        self.device: list[list[object]] = [[POISON] * block_size for _ in range(num_blocks)]
        self.cpu: list[list[object]] = [[POISON] * block_size for _ in range(num_cpu_blocks)]
        self.requests: dict[int, list[int]] = {}
        self.tokens: dict[int, list[object]] = {}
        self.left_as: dict[int, list[int]] = {}  # the device blocks that a sequence had when it left
        self.ids, self.values = itertools.count(), itertools.count()
        self.cached: dict[tuple[object, ...], int] = {}  # the contents of a full block -> a block with them
        self.begin_plan()

    def begin_plan(self) -> None:
        """What the model needs to know of the moment before the plan: the tables with computed tokens."""
        self.granted: dict[int, int] = {}
        self.left: set[int] = set()
        self.entered: set[int] = set()
        self.before = {s.seq_id: list(s.block_ids) for s in self.manager.snapshot().sequences}

    def lengths(self, request: int) -> dict[int, int]:
        return {seq_id: len(self.tokens[seq_id]) for seq_id in self.requests[request]}

    def swapped_out(self) -> list[int]:
        return [r for r, seq_ids in self.requests.items() if self.swap.has(seq_ids[0])]

    def running(self) -> list[int]:
        return [r for r in self.requests if r not in self.swapped_out()]

    def start(self, n: int) -> None:
        """A new request with n tokens to compute in this plan, where they fit."""
        seq_id = next(self.ids)
        if self.manager.can_allocate(seq_id, n):
            self.requests[seq_id], self.tokens[seq_id] = [seq_id], []
            self.grow(seq_id, n)

    def grow(self, seq_id: int, n: int) -> None:
        """Grant a sequence n tokens, where they fit."""
        to = len(self.tokens[seq_id]) + n
        if seq_id not in self.granted and self.manager.can_allocate(seq_id, to):
            self.manager.allocate(seq_id, to)
            self.granted[seq_id] = n

    def fork(self, request: int, parent: int) -> None:
        """A new sequence of a request; between plans."""
        child = next(self.ids)
        self.manager.fork(parent, child)
        self.requests[request].append(child)
        self.tokens[child] = list(self.tokens[parent])
        self.before[child] = list(self.manager.block_table(child))

    def abort(self, request: int, seq_ids: list[int]) -> None:
        """Forget some sequences of a request, wherever they are."""
        for seq_id in seq_ids:
            self.manager.free(seq_id)
            self.requests[request].remove(seq_id)
            self.granted.pop(seq_id, None)
            del self.tokens[seq_id]
        self.swap.drop(seq_ids if len(seq_ids) > 1 else seq_ids[0])
        if not self.requests[request]:
            del self.requests[request]

    def swap_out(self, request: int) -> None:
        lengths = self.lengths(request)
        tables = [self.before.get(i, [])[: num_blocks_for(n, self.size)] for i, n in lengths.items()]
        needed = 0 if request in self.entered else len({block for table in tables for block in table})
        fits = needed <= self.swap.num_free_blocks
        before = state(self.manager, self.swap)
        assert self.swap.can_swap_out(self.manager, lengths) == fits
        if fits:
            assert self.swap.swap_out(self.manager, lengths) == needed
            for seq_id in lengths:
                self.granted.pop(seq_id, None)
            self.left.add(request)
            if request not in self.entered:
                self.left_as.update(zip(lengths, tables, strict=True))
            self.entered.discard(request)
        else:
            with pytest.raises(OutOfBlocks, match=f"^{needed} blocks are to be swapped out"):
                self.swap.swap_out(self.manager, lengths)
            assert state(self.manager, self.swap) == before, "a refusal changes nothing"

    def hits(self, request: int, most: int) -> dict[int, list[int]]:
        """The blocks with the first pages of each sequence that nothing was written to since."""
        found: dict[int, list[int]] = {}
        for seq_id in self.requests[request]:
            values = self.tokens[seq_id]
            pages = [tuple(values[i : i + self.size]) for i in range(0, len(values), self.size)]
            blocks = [self.cached.get(page) for page in pages if len(page) == self.size][:most]
            usable = [b is not None and b not in self.pool.handed_out for b in blocks]
            count = [*usable, False].index(False)
            found[seq_id] = [b for b in blocks[:count] if b is not None]
        return found

    def swap_in(self, request: int, most_hits: int, spare: int) -> None:
        if request in self.left:
            return  # nothing comes back in the plan in which it left
        seq_ids, hits = self.requests[request], self.hits(request, most_hits)
        by_page: dict[tuple[object, ...], int | None] = {}  # what is to be on the device
        for seq_id in seq_ids:
            for i in range(num_blocks_for(len(self.tokens[seq_id]), self.size)):
                hit = hits[seq_id][i] if i < len(hits[seq_id]) else None
                place = ("hit", hit) if hit is not None else ("cpu", self.swap._tables[seq_id][i])
                by_page[place] = hit
        needed = sum(hit is None or self.manager.pool.is_free(hit) for hit in by_page.values())
        before = state(self.manager, self.swap)
        free = self.manager.num_free_blocks
        assert self.swap.num_blocks_to_swap_in(self.manager, seq_ids, hits) == needed
        assert self.swap.can_swap_in(self.manager, seq_ids, hits, spare) == (needed <= free - spare)
        if needed <= free:
            num_misses = sum(hit is None for hit in by_page.values())
            assert self.swap.swap_in(self.manager, seq_ids, hits) == num_misses
            assert self.manager.num_free_blocks == free - needed
            tables = [self.manager.block_table(seq_id) for seq_id in seq_ids]
            assert pattern(tables) == pattern(self.left_as[seq_id] for seq_id in seq_ids), "shared as before"
            for seq_id in seq_ids:
                assert self.manager.block_table(seq_id)[: len(hits[seq_id])] == hits[seq_id]
            self.entered.add(request)
        else:
            with pytest.raises(OutOfBlocks, match=f"^{needed} blocks are needed to swap in"):
                self.swap.swap_in(self.manager, seq_ids, hits)
            assert state(self.manager, self.swap) == before, "a refusal changes nothing"

    def execute(self) -> None:
        """Make the transfers, the copies and the step in the engine's order; then look at every sequence."""
        outs, ins = self.swap.take_transfers()
        copies = self.manager.take_copies()
        assert self.swap.take_transfers() == ([], []), "a transfer is listed once"
        for transfers in (outs, ins):
            assert len({target for _, target in transfers}) == len(transfers), "a block is written twice"
        for source, target in outs:
            self.cpu[target] = list(self.device[source])
        for block in self.pool.handed_out:
            self.device[block] = [POISON] * self.size
        for source, target in ins:
            self.device[target] = list(self.cpu[source])
        for source, target in copies:
            self.device[target] = list(self.device[source])
        for block in range(self.swap.num_blocks):
            if self.swap.pool.is_free(block):
                self.cpu[block] = [POISON] * self.size
        for seq_id, n in self.granted.items():
            table = self.manager.block_table(seq_id)
            for _ in range(n):
                block, offset = divmod(len(self.tokens[seq_id]), self.size)
                self.device[table[block]][offset] = next(self.values)
                self.tokens[seq_id].append(self.device[table[block]][offset])
        self.cached = {p: b for p, b in self.cached.items() if b not in self.pool.handed_out}
        self.pool.handed_out.clear()
        for request, seq_ids in self.requests.items():
            away = request in self.swapped_out()
            for seq_id in seq_ids:
                table = self.swap._tables[seq_id] if away else self.manager.block_table(seq_id)
                pool = self.cpu if away else self.device
                found = [value for block in table for value in pool[block]]
                assert found[: len(self.tokens[seq_id])] == self.tokens[seq_id]
                if not away:
                    full = table[: len(self.tokens[seq_id]) // self.size]
                    self.cached.update({tuple(pool[block]): block for block in full})
        self.begin_plan()

    def check(self) -> None:
        self.manager.check_integrity()
        self.swap.check_integrity()
        for request, seq_ids in self.requests.items():
            away = {self.swap.has(seq_id) for seq_id in seq_ids}
            assert len(away) == 1, f"request {request} is in two places"


@given(
    num_blocks=st.integers(2, 12),
    num_cpu_blocks=st.integers(0, 9),
    block_size=st.sampled_from([1, 2, 3, 5]),
    seed=st.integers(0, 2**32),
)
def test_every_sequence_finds_its_contents_after_every_plan(num_blocks, num_cpu_blocks, block_size, seed):
    machine, random = Machine(num_blocks, num_cpu_blocks, block_size), Random(seed)
    for _ in range(25):
        if machine.running() and random.random() < 0.5:  # branches begin and end between plans
            request = random.choice(machine.running())
            machine.fork(request, random.choice(machine.requests[request]))
        if machine.requests and random.random() < 0.1:
            request = random.choice(sorted(machine.requests))
            seq_ids = machine.requests[request]
            machine.abort(request, random.sample(seq_ids, random.randint(1, len(seq_ids))))
        for _ in range(random.randint(1, 8)):
            what, running, away = random.random(), machine.running(), machine.swapped_out()
            if what < 0.15:
                machine.start(random.randint(1, 2 * block_size + 1))
            elif what < 0.5 and running:
                request = random.choice(running)
                machine.grow(random.choice(machine.requests[request]), random.randint(1, block_size + 1))
            elif what < 0.75 and running:
                machine.swap_out(random.choice(running))
            elif what < 0.95 and away:
                machine.swap_in(random.choice(away), random.choice([0, 1, 99]), random.randint(0, 2))
            elif machine.requests:
                request = random.choice(sorted(machine.requests))
                machine.abort(request, list(machine.requests[request]))
            machine.check()
        machine.execute()
        machine.check()
    for request in list(machine.requests):
        machine.abort(request, list(machine.requests[request]))
    machine.check()
    for pool in (machine.manager.pool, machine.swap.pool):
        assert pool.num_free_blocks == pool.num_blocks
        assert not any(pool.ref_count)


def away(n: int, num_blocks: int = 9, num_cpu_blocks: int = 9) -> tuple[SharingManager, SwapSpace]:
    """Blocks of 4; sequence 0 with n tokens is swapped out, and the plan is executed."""
    manager, swap = SharingManager(num_blocks, 4, 1), SwapSpace(num_cpu_blocks)
    manager.allocate(0, n)
    swap.swap_out(manager, {0: n})
    swap.take_transfers()
    return manager, swap


def test_a_shared_block_is_copied_once_and_shared_again():
    manager, swap = SharingManager(9, 4, 1), SwapSpace(9)
    manager.allocate(0, 6)
    manager.fork(0, 1)
    manager.allocate(1, 7)
    manager.take_copies()
    assert manager.num_blocks([0, 1]) == (3, 4)
    assert swap.swap_out(manager, {0: 6, 1: 7}) == 3
    assert swap.take_transfers() == ([(0, 0), (1, 1), (2, 2)], [])
    assert (swap.num_free_blocks, manager.num_free_blocks) == (6, 9)
    assert swap.swap_in(manager, [0, 1]) == 3
    assert manager.num_blocks([0, 1]) == (3, 4)
    tables = manager.block_table(0), manager.block_table(1)
    ins = dict(swap.take_transfers()[1])
    assert tables == ([ins[0], ins[1]], [ins[0], ins[2]])
    assert swap.num_free_blocks == swap.num_blocks


def test_what_was_granted_in_the_plan_is_undone_and_not_copied():
    manager, swap = SharingManager(9, 4, 1), SwapSpace(2)
    manager.allocate(0, 6)
    manager.fork(0, 1)
    manager.allocate(1, 15)  # its copy of block 1 is listed, and two blocks are new
    assert swap.can_swap_out(manager, {0: 6, 1: 6})
    assert swap.swap_out(manager, {0: 6, 1: 6}) == 2
    assert manager.take_copies() == []
    assert (manager.num_copies, manager.num_free_blocks) == (0, 9)
    assert swap.take_transfers() == ([(0, 0), (1, 1)], [])


def test_a_cpu_block_is_not_handed_out_before_its_swap_in_was_made():
    manager, swap = away(8, num_cpu_blocks=3)
    manager.allocate(1, 8)
    manager.take_copies()
    swap.swap_in(manager, [0])
    assert not swap.can_swap_out(manager, {1: 8})
    with pytest.raises(OutOfBlocks, match="2 blocks are to be swapped out; 1 of 3 on the CPU are free"):
        swap.swap_out(manager, {1: 8})
    assert swap.take_transfers()[0] == []
    assert swap.swap_out(manager, {1: 8}) == 2


def test_a_device_block_that_was_swapped_out_may_be_written_in_the_same_plan():
    manager, swap = away(8, num_blocks=2)
    manager.allocate(1, 8)
    table = manager.block_table(1)
    assert swap.swap_out(manager, {1: 8}) == 2
    assert swap.swap_in(manager, [0]) == 2
    outs, ins = swap.take_transfers()
    assert [source for source, _ in outs] == table
    assert sorted(target for _, target in ins) == sorted(table)
    assert not {block for _, block in outs} & {block for block, _ in ins}


def test_a_request_preempted_in_the_plan_that_brought_it_back_loses_nothing():
    manager, swap = away(6, num_cpu_blocks=2)
    table = list(swap._tables[0])
    swap.swap_in(manager, [0])
    manager.allocate(0, 9)
    assert swap.num_free_blocks == 0, "its blocks are taken still, and no others are needed"
    assert swap.can_swap_out(manager, {0: 6})
    assert swap.swap_out(manager, {0: 6}) == 0
    assert swap.has(0)
    assert swap._tables[0] == table
    assert swap.take_transfers() == ([], [])
    assert manager.num_free_blocks == 9
    swap.swap_in(manager, [0])
    assert [source for source, _ in swap.take_transfers()[1]] == table


def test_a_request_does_not_leave_and_come_back_in_one_plan():
    manager, swap = SharingManager(9, 4, 1), SwapSpace(9)
    manager.allocate(0, 6)
    swap.swap_out(manager, {0: 6})
    with pytest.raises(AssertionError, match="in one plan"):
        swap.swap_in(manager, [0])


def test_a_request_is_swapped_as_a_whole():
    manager, swap = SharingManager(9, 4, 1), SwapSpace(9)
    manager.allocate(0, 6)
    manager.fork(0, 1)
    swap.swap_out(manager, {0: 6, 1: 6})
    swap.take_transfers()
    with pytest.raises(AssertionError, match="swapped out already"):
        swap.swap_out(manager, {0: 6})
    swap.swap_in(manager, [0, 1])
    with pytest.raises(AssertionError, match="as it came"):
        swap.swap_out(manager, {0: 6, 1: 5})


def test_a_prefix_hit_replaces_its_copy_and_is_charged_where_it_is_free():
    manager, swap = away(11, num_blocks=5)
    manager.allocate(1, 16)  # blocks 3, 4, 2, 1; say that 3 and 4 hold the first pages of sequence 0
    manager.fork(1, 2)
    first, second = manager.block_table(1)[:2]
    hits = {0: [first, second]}
    assert manager.num_free_blocks == 1
    assert not swap.can_swap_in(manager, [0])
    assert swap.num_blocks_to_swap_in(manager, [0], hits) == 1, "hits on blocks in use cost nothing"
    manager.free(1)
    manager.free(2)
    assert swap.num_blocks_to_swap_in(manager, [0], hits) == 3, "hits on free blocks do"
    manager.allocate(3, 4)
    manager.allocate(4, 4)
    assert swap.swap_in(manager, [0], hits) == 1
    table = manager.block_table(0)
    assert table[:2] == [first, second]
    assert swap.take_transfers()[1] == [(2, table[2])]
    assert [manager.pool.ref_count[block] for block in table] == [1, 1, 1]
    assert swap.num_free_blocks == 9
    manager.check_integrity()


def test_a_hit_replaces_only_full_blocks():
    """The request's next token goes into its last block: it must not be one that others may find."""
    manager, swap = away(6)
    assert swap.num_blocks_to_swap_in(manager, [0], {0: [3, 4, 5]}) == 2
    assert swap.swap_in(manager, [0], {0: [3, 4, 5]}) == 1
    table = manager.block_table(0)
    assert table[0] == 3
    assert table[1] != 4
    assert len(table) == 2


def test_promised_and_spare_blocks_are_left_free():
    manager, swap = away(12, num_blocks=5)
    assert swap.can_swap_in(manager, [0], {}, spare=2)
    assert not swap.can_swap_in(manager, [0], {}, spare=3)
    manager.allocate(1, 4)
    manager.promise(1, 2)
    assert not swap.can_swap_in(manager, [0])
    with pytest.raises(OutOfBlocks, match="3 blocks are needed to swap in and 2 of 5 are free"):
        swap.swap_in(manager, [0])
    manager.promise(1, 1)
    swap.swap_in(manager, [0])
    manager.check_integrity()


def test_a_request_without_computed_tokens_takes_no_block():
    manager, swap = SharingManager(9, 4, 1), SwapSpace(0)
    manager.allocate(0, 6)
    assert swap.swap_out(manager, {0: 0, 1: 0}) == 0  # the manager has never heard of 1
    assert swap.has(0)
    assert swap.has(1)
    assert swap.swap_in(manager, [0, 1]) == 0
    assert manager.num_blocks([0, 1]) == (0, 0)
    manager.allocate(0, 6)
    swap.take_transfers()
    assert not swap.has(0)
    assert manager.num_free_blocks == 7


def test_the_last_block_of_a_sequence_is_freed_first():
    manager, swap = SharingManager(3, 4, 1), SwapSpace(3)
    manager.allocate(0, 12)
    table = manager.block_table(0)
    swap.swap_out(manager, {0: 12})
    assert manager.pool.allocate(3) == table[::-1]


@pytest.mark.parametrize("executed", [True, False], ids=["executed", "planned"])
@pytest.mark.parametrize("back", [True, False], ids=["in", "out"])
def test_a_request_can_be_forgotten_at_any_time(back, executed):
    manager, swap = SharingManager(9, 4, 1), SwapSpace(5)
    for seq_id in (0, 7):
        manager.allocate(seq_id, 6)
    manager.fork(0, 1)
    swap.swap_out(manager, {7: 6})
    swap.swap_out(manager, {0: 6, 1: 6})
    if back or executed:
        swap.take_transfers()
    if back:
        swap.swap_in(manager, [0, 1])
        if executed:
            swap.take_transfers()
    for seq_id in (0, 1):
        manager.free(seq_id)
    swap.drop(99)
    swap.drop(0)
    if not (back and executed):
        assert swap.num_free_blocks == 1, "sequence 1 has the same blocks"
    swap.drop([1, 0, 42])
    swap.check_integrity()
    assert not swap.has(0)
    assert not swap.has(1)
    assert swap.has(7)
    assert (swap.num_free_blocks, manager.num_free_blocks) == (3, 9)
    outs, ins = swap.take_transfers()
    assert (len(outs), len(ins)) == (0 if back or executed else 2, 0), "no transfer is made for nobody"


def test_blocks_go_to_the_cpu_and_back_with_all_layers():
    config = load_model("random:tiny-llama", device="cpu").config
    store = SwapStore(config, 7, 3, torch.float64, num_cpu_blocks=5)
    assert store.cpu_kv.shape == (5, *store.kv.shape[1:])
    assert store.cpu_kv.dtype == store.kv.dtype
    store.cpu_kv.fill_(float("nan"))
    store.kv.copy_(torch.arange(store.kv.numel(), dtype=torch.float64).view_as(store.kv))
    before = store.kv.clone()
    store.swap_out([(6, 1), (0, 4), (2, 0)])
    assert torch.equal(store.kv, before)
    assert [i for i in range(5) if store.cpu_kv[i].isnan().all()] == [2, 3]
    store.kv.fill_(float("nan"))
    store.swap_in([(4, 5), (1, 0)])
    assert torch.equal(store.kv[5], before[0])
    assert torch.equal(store.kv[0], before[6])
    assert store.kv[[1, 2, 3, 4, 6]].isnan().all()
    assert torch.equal(store.cpu_kv[[1, 4, 0]], before[[6, 0, 2]])
    store.swap_out([])
    store.swap_in([])


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_logits_are_the_same_wherever_a_request_has_been(block_size):
    """Two branches of one request and a neighbour; the request leaves and returns, all else is poisoned."""
    decoder = load_model("random:tiny-llama", dtype="float64", device="cpu", seed=3)
    tokens = torch.randint(0, 300, (3, 24), generator=torch.Generator().manual_seed(block_size)).tolist()
    prompt = tokens[1][:5]
    tokens[0][:5] = prompt
    per_sequence = num_blocks_for(24, block_size)

    def run(away: range) -> list[torch.Tensor]:
        manager, swap = SharingManager(3 * per_sequence, block_size, 1), SwapSpace(2 * per_sequence)
        store = SwapStore(
            decoder.config, 3 * per_sequence, block_size, torch.float64, num_cpu_blocks=2 * per_sequence
        )
        store.kv.fill_(float("nan"))
        store.cpu_kv.fill_(float("nan"))
        done, rows = {0: 0, 2: 0}, []
        for step in range(32):
            if step == away.start:
                swap.swap_out(manager, {i: done[i] for i in (0, 1)})
            if step == away.stop:
                swap.swap_in(manager, [0, 1])
            batch = []
            for i in [i for i in done if not swap.has(i)]:
                count = min(5 if done[i] == 0 else 2, 24 - done[i])
                if count:
                    manager.allocate(i, done[i] + count)
                    batch.append((i, tokens[i][done[i] : done[i] + count], done[i]))
                    done[i] += count
            outs, ins = swap.take_transfers()
            store.swap_out(outs)
            for block in range(3 * per_sequence):
                if manager.pool.is_free(block):
                    store.kv[block] = float("nan")
            store.swap_in(ins)
            for block in range(2 * per_sequence):
                if swap.pool.is_free(block):
                    store.cpu_kv[block] = float("nan")
            store.copy_blocks(manager.take_copies())
            if batch:
                logits = decoder(PagedBatch.place(Batch.pack(batch), manager), store)
                rows += [(i, start, row) for (i, _, start), row in zip(batch, logits, strict=True)]
            if step == 0:
                manager.fork(0, 1)
                done[1] = done[0]
        return [row for _, _, row in sorted(rows, key=lambda row: row[:2])]

    with torch.inference_mode():
        expected = run(range(99, 99))
        for away in (range(1, 3), range(3, 9), range(4, 20)):
            torch.testing.assert_close(run(away), expected, atol=1e-11, rtol=1e-11)
