"""Chapter 6: static and continuous batching against a plain model, on every kind of memory, without torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm.errors import InvalidOption, RequestTooLong
from minivllm.memory.contiguous import ContiguousManager
from minivllm.memory.manager import KVManager, RecomputeManager
from minivllm.memory.naive import NaiveManager
from minivllm.memory.paged import PagedManager
from minivllm.memory.prefix_cache import PrefixCachingManager
from minivllm.memory.sharing import SharingManager
from minivllm.params import SamplingParams
from minivllm.scheduling.continuous import ContinuousScheduler
from minivllm.scheduling.request import Request, Status
from minivllm.scheduling.static import StaticScheduler

SCHEDULERS = {"static": StaticScheduler, "continuous": ContinuousScheduler}


def request(i: int, prompt_len: int, max_tokens: int, **more) -> Request:
    prompt = [100 * i + j for j in range(prompt_len)]
    return Request(i, prompt, SamplingParams(temperature=0, max_tokens=max_tokens), **more)


def token_after(tokens: list[int]) -> int:
    """A model: its next token depends on every token before it, so a lost or doubled one shows."""
    return hash(tuple(tokens)) % 997


def run_step(scheduler, memory: dict[int, list[int]]) -> tuple[list[int], list[Request]]:
    """One step of an engine whose memory is a list of tokens per request: who took part, who ended."""
    output = scheduler.schedule()
    for victim in output.preempted:
        memory.pop(victim.request_id, None)
    sampled = {}
    for part in output.scheduled:
        r, new = part.request, part.new_token_ids()
        assert len(new) == part.num_new_tokens >= 1
        assert part.samples == (part.sequence,)
        held = memory.setdefault(r.request_id, [])
        assert len(held) == r.num_computed_tokens, "what is computed is what is in memory"
        held += new
        assert held == [*r.prompt_token_ids, *r.output_token_ids], "no token lost, none doubled"
        sampled[r.request_id] = token_after(held)
    finished = scheduler.update(output, sampled)
    for r in finished:
        del memory[r.request_id]
    scheduler.manager.check_integrity()
    return [part.request.request_id for part in output.scheduled], finished


def expected_tokens(r: Request) -> list[int]:
    tokens = list(r.prompt_token_ids)
    for _ in range(r.params.max_tokens):
        tokens.append(token_after(tokens))
    return tokens[len(r.prompt_token_ids) :]


class Plain:
    """The rules of chapter 6 said again with lists and sums: (id, prompt, left to do, generated)."""

    def __init__(self, slots: int, block: int, most: int, watermark: int, static: bool):
        self.slots, self.block, self.most, self.watermark, self.static = slots, block, most, watermark, static
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.length: dict[int, int] = {}  # tokens there are, generated ones included
        self.held: dict[int, int] = {}  # tokens in memory

    def room_for(self, i: int, n: int) -> bool:
        def size(tokens: int) -> int:
            return -(-tokens // self.block) * self.block

        return sum(size(t) for j, t in self.held.items() if j != i) + size(n) <= self.slots

    def step(self) -> tuple[list[int], list[int]]:
        closed, scheduled, preempted = self.static and bool(self.running), [], []
        at = 0
        while at < len(self.running):
            i = self.running[at].request_id
            if self.room_for(i, self.length[i]):
                self.held[i] = self.length[i]
                scheduled.append(i)
                at += 1
            else:
                victim = self.running.pop()
                self.held.pop(victim.request_id, None)
                self.waiting.insert(0, victim)
                preempted.append(victim.request_id)
        while self.waiting and not preempted and not closed and len(self.running) < self.most:
            i = self.waiting[0].request_id
            if not self.room_for(i, self.length[i] + (self.watermark if self.running else 0)):
                break
            self.running.append(self.waiting.pop(0))
            self.held[i] = self.length[i]
            scheduled.append(i)
        for i in scheduled:
            self.length[i] += 1
        for r in [
            r
            for r in self.running
            if self.length[r.request_id] == len(r.prompt_token_ids) + r.params.max_tokens
        ]:
            self.running.remove(r)
            del self.held[r.request_id]
        return scheduled, preempted


ARRIVALS = st.lists(
    st.tuples(st.integers(0, 6), st.integers(1, 12), st.integers(1, 9)), min_size=1, max_size=12
)


@pytest.mark.parametrize("kind", SCHEDULERS)
@given(
    num_blocks=st.integers(1, 14),
    block_size=st.integers(1, 5),
    most=st.integers(1, 5),
    watermark=st.integers(0, 4),
    arrivals=ARRIVALS,
)
def test_every_plan_is_that_of_a_plain_model(kind, num_blocks, block_size, most, watermark, arrivals):
    """Who is scheduled, in what order, and who is preempted, at every step, down to the smallest pools."""
    manager = PagedManager(num_blocks, block_size, 1)
    scheduler = SCHEDULERS[kind](manager, most, watermark)
    plain = Plain(num_blocks * block_size, block_size, most, watermark, kind == "static")
    coming = [(step, request(i, p, m)) for i, (step, p, m) in enumerate(sorted(arrivals))]
    requests = [r for _, r in coming if manager.fits_ever(r.longest)]
    memory: dict[int, list[int]] = {}
    for now in range(3000):
        while coming and coming[0][0] <= now:
            r = coming.pop(0)[1]
            if r not in requests:
                with pytest.raises(RequestTooLong, match=f"may need {r.longest} tokens"):
                    scheduler.add(r)
                continue
            scheduler.add(r)
            plain.waiting.append(r)
            plain.length[r.request_id] = len(r.prompt_token_ids)
        expected = plain.step()
        before = {r.request_id: r.num_preemptions for r in requests}
        plan, _ = run_step(scheduler, memory)
        preempted = [r.request_id for r in requests if r.num_preemptions > before[r.request_id]]
        assert (plan, sorted(preempted)) == (expected[0], sorted(expected[1]))
        if not coming and not scheduler.has_unfinished():
            break
    assert not scheduler.has_unfinished(), "a tight pool thrashes, but it ends"
    for r in requests:
        assert (r.finish_reason, r.output_token_ids) == ("length", expected_tokens(r))
    assert memory == {}
    assert manager.pool.num_free_blocks == num_blocks


MEMORIES: dict[str, Callable[[], KVManager]] = {
    "recompute": lambda: RecomputeManager(40, 1),
    "naive": lambda: NaiveManager(40, 1),
    "contiguous-max": lambda: ContiguousManager(64, 1, 32, "max"),
    "contiguous-oracle": lambda: ContiguousManager(64, 1, 32, "oracle"),
    "paged": lambda: PagedManager(10, 4, 1),
    "sharing": lambda: SharingManager(10, 4, 1),
    "hash": lambda: PrefixCachingManager(10, 4, 1, "hash"),
    "radix": lambda: PrefixCachingManager(10, 4, 1, "radix"),
}


@pytest.mark.parametrize("kind", SCHEDULERS)
@pytest.mark.parametrize("memory_kind", MEMORIES)
def test_three_thousand_short_requests_leave_nothing_behind(kind, memory_kind):
    manager: KVManager = MEMORIES[memory_kind]()
    scheduler = SCHEDULERS[kind](manager, 7)
    memory: dict[int, list[int]] = {}
    for i in range(3000):
        scheduler.add(request(i, 1 + i % 6, 1 + i % 5))
    done = []
    while scheduler.has_unfinished():
        done += run_step(scheduler, memory)[1]
        if memory_kind == "recompute":
            memory.clear()
            for r in scheduler.running:
                r.first.num_computed_tokens = 0
    assert len(done) == 3000
    assert all(r.output_token_ids == expected_tokens(r) for r in done)
    assert manager.snapshot().sequences == ()
    assert not scheduler.waiting
    assert not scheduler.running


def test_a_static_batch_is_closed_until_its_last_member_ends():
    scheduler = StaticScheduler(NaiveManager(1000, 1), 2)
    memory: dict[int, list[int]] = {}
    for i, m in enumerate((5, 2, 3)):
        scheduler.add(request(i, 3, m))
    running = []
    while scheduler.has_unfinished():
        run_step(scheduler, memory)
        running.append([r.request_id for r in scheduler.running])
    assert running == [[0, 1], [0], [0], [0], [], [2], [2], []]


def test_in_continuous_batching_a_place_is_taken_as_soon_as_it_is_empty():
    scheduler = ContinuousScheduler(NaiveManager(1000, 1), 2)
    memory: dict[int, list[int]] = {}
    for i, m in enumerate((5, 2, 3)):
        scheduler.add(request(i, 3, m))
    running = []
    while scheduler.has_unfinished():
        run_step(scheduler, memory)
        running.append([r.request_id for r in scheduler.running])
    assert running == [[0, 1], [0], [0, 2], [0, 2], []]


def test_the_request_that_started_last_gives_way_and_is_first_to_come_back():
    scheduler = ContinuousScheduler(PagedManager(5, 1, 1), 4)
    memory: dict[int, list[int]] = {}
    requests = [request(i, 1, 5) for i in range(3)]
    first, _, third = requests
    for r in requests:
        scheduler.add(r)
    for _ in range(2):
        run_step(scheduler, memory)
    assert [r.request_id for r in scheduler.running] == [0, 1]
    assert (third.status, third.num_preemptions, list(scheduler.waiting)) == (Status.WAITING, 1, [third])
    while scheduler.has_unfinished():
        run_step(scheduler, memory)
    assert first.num_preemptions == 0
    assert [r.output_token_ids for r in requests] == [expected_tokens(r) for r in requests]


def test_two_requests_that_would_lock_each_other_both_end():
    """Each may grow to the whole pool; both are admitted, and neither could go on without preemption."""
    scheduler = ContinuousScheduler(PagedManager(6, 2, 1), 2)
    memory: dict[int, list[int]] = {}
    requests = [request(i, 2, 11) for i in range(2)]
    for r in requests:
        scheduler.add(r)
    for _ in range(60):
        run_step(scheduler, memory)
    assert [r.output_token_ids for r in requests] == [expected_tokens(r) for r in requests]
    assert sum(r.num_preemptions for r in requests) >= 1


def test_the_watermark_is_left_free_at_admission_but_a_lone_request_may_have_everything():
    scheduler = ContinuousScheduler(NaiveManager(10, 1), 4, watermark=3)
    scheduler.add(request(0, 10, 1))
    assert [part.request.request_id for part in scheduler.schedule().scheduled] == [0]
    scheduler = ContinuousScheduler(NaiveManager(10, 1), 4, watermark=3)
    for i, n in enumerate((4, 4)):
        scheduler.add(request(i, n, 1))
    assert [part.request.request_id for part in scheduler.schedule().scheduled] == [0]


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_request_can_be_aborted_in_every_state(kind):
    manager = PagedManager(4, 2, 1)
    scheduler = SCHEDULERS[kind](manager, 2)
    memory: dict[int, list[int]] = {}
    requests = [request(i, 2, 4) for i in range(4)]
    for r in requests:
        scheduler.add(r)
    scheduler.abort(requests[3])  # waiting
    run_step(scheduler, memory)
    output = scheduler.schedule()
    scheduler.abort(requests[0])  # between plan and result
    scheduler.update(output, {part.sequence.seq_id: 1 for part in output.scheduled})
    manager.check_integrity()
    while scheduler.has_unfinished():
        output = scheduler.schedule()
        scheduler.update(output, {part.sequence.seq_id: 1 for part in output.scheduled})
    for r in requests:
        scheduler.abort(r)  # finished: stays as it is
    assert [r.finish_reason for r in requests] == ["abort", "length", "length", "abort"]
    assert len(requests[0].output_token_ids) == 1
    assert manager.pool.num_free_blocks == 4


def test_an_end_of_sequence_token_ends_a_request_unless_it_is_told_to_go_on():
    for ignore, reason, n in ((False, "stop", 2), (True, "length", 4)):
        r = Request(0, [1], SamplingParams(max_tokens=4, ignore_eos=ignore), eos_token_ids=(7,))
        for token in (5, 7, 5, 7)[: 4 if ignore else 2]:
            r.append(r.first, token)
        assert (r.status, r.finish_reason, len(r.output_token_ids)) == (Status.FINISHED, reason, n)


def test_a_limit_below_one_is_refused():
    with pytest.raises(InvalidOption, match="max_num_seqs=0"):
        ContinuousScheduler(NaiveManager(4, 1), 0)
