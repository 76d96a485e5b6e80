"""The engine over every memory and scheduler: the same tokens, whatever is in memory, whoever runs beside."""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.decoding.generate import generate
from minivllm.decoding.sampler import top_logprobs as top_logprobs_of_package
from minivllm.engine import Engine
from minivllm.engine_args import EngineArgs
from minivllm.engine_parts import build_engine
from minivllm.errors import EngineBusy, InvalidLogits, RequestTooLong
from minivllm.interrupt import Shield
from minivllm.lab.record import Recorder
from minivllm.memory.buddy import BuddyAllocator
from minivllm.memory.naive_store import NaiveStore
from minivllm.memory.paged import num_blocks_for, slot_mapping
from minivllm.memory.paged_store import PagedStore
from minivllm.memory.size import bytes_per_token
from minivllm.model.batch import Batch
from minivllm.model.loader import load_model
from minivllm.params import SamplingParams
from minivllm.scheduling.request import Request, Status
from minivllm.step import Step

MODELS = {
    name: load_model(f"random:{name}", dtype="float64", device="cpu") for name in ("tiny-llama", "tiny-qwen3")
}
MODEL = MODELS["tiny-llama"]
SAMPLED = {"temperature": 1.3, "top_p": 0.95, "presence_penalty": 0.5, "repetition_penalty": 1.1}


def build(model, args: EngineArgs) -> Any:
    """An engine whose parts a test may look into and replace."""
    return build_engine(model, args)


def request(i: int, prompt: list[int], max_tokens: int, **options) -> Request:
    options = {"temperature": 0, "ignore_eos": True, **options}
    params = SamplingParams(max_tokens=max_tokens, **options)
    return Request(i, prompt, params, generator=Random(params.seed))


def some_requests(seed: int, n: int, most: int = 40, **options) -> list[Request]:
    """Requests of odd lengths; with a temperature each has a seed of its own."""
    random = Random(seed)
    requests = []
    for i in range(n):
        prompt = [random.randrange(307) for _ in range(random.randint(1, most))]
        seeded = {"seed": i} if options else {}
        requests.append(request(i, prompt, random.randint(1, 20), **seeded, **options))
    return requests


def alone(model, r: Request) -> list[int]:
    """What the plain loop of chapter 0 gives for a request."""
    assert isinstance(r.params, SamplingParams)
    return list(generate(model, NaiveStore(), r.prompt_token_ids, r.params))


def least(model, cache: str, requests: list[Request], block_size: int | None) -> dict[str, Any]:
    """The smallest memory in which each of the requests fits alone."""
    longest = max(r.longest for r in requests)
    if cache == "paged":
        return {"num_blocks": num_blocks_for(longest, block_size or 16)}
    slots = BuddyAllocator.run_length(longest) if cache == "contiguous" else longest
    return {"kv_cache_memory_bytes": slots * bytes_per_token(model)}


def run(engine: Engine, requests: list[Request], arrivals: list[int] | None = None) -> list[Step]:
    """Run requests to their end, each added before the step of its arrival; the books balance all the way."""
    steps: list[Step] = []
    engine.on_step = steps.append
    waiting = sorted(zip(arrivals or [0] * len(requests), range(len(requests)), requests, strict=True))
    for number in itertools.count():
        while waiting and waiting[0][0] <= number:
            engine.add(waiting.pop(0)[2])
        if not waiting and not engine.has_unfinished():
            break
        engine.step()
        engine.manager.check_integrity()
    nothing_is_left(engine)
    return steps


def nothing_is_left(engine: Engine) -> None:
    assert engine.manager.snapshot().held == 0
    assert engine.manager.snapshot().sequences == ()
    assert not engine.scheduler.running
    assert not engine.scheduler.waiting
    if isinstance(engine.store, NaiveStore):
        assert engine.store.num_bytes() == 0


def poisoned(engine: Any) -> Any:
    """All memory holds NaN before anything is written to it."""
    if hasattr(engine.store, "kv"):
        engine.store.kv.fill_(float("nan"))
    return engine


CACHES = [
    {"cache": "recompute"},
    {"cache": "naive"},
    *({"cache": "contiguous", "reservation": policy} for policy in ("max", "pow2", "oracle")),
    *({"cache": "paged", "block_size": size} for size in (1, 3, 16, 128)),
]


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("scheduler", ["static", "continuous"])
@pytest.mark.parametrize("cache", CACHES, ids=lambda c: "-".join(map(str, c.values())))
def test_every_memory_gives_the_tokens_of_the_plain_loop_down_to_the_least_that_fits(
    cache, scheduler, sampling
):
    for seed, (name, model) in enumerate(MODELS.items()):
        expected = [alone(model, r) for r in some_requests(seed, 7, **sampling)]
        for extra in (0, 1, 50):
            requests = some_requests(seed, 7, **sampling)
            memory = least(model, cache["cache"], requests, cache.get("block_size"))
            memory = {key: size * (1 + extra) for key, size in memory.items()}
            args = EngineArgs(scheduler=scheduler, max_num_seqs=5, **cache, **memory)
            engine = poisoned(build(model, args))
            run(engine, requests, arrivals=[0, 9, 0, 3, 3, 20, 1])
            assert [r.output_token_ids for r in requests] == expected, f"{name}, memory {memory}"


@settings(max_examples=60)
@given(
    seed=st.integers(0, 999),
    n=st.integers(1, 6),
    cache=st.sampled_from(CACHES),
    scheduler=st.sampled_from(["static", "continuous"]),
    extra=st.integers(0, 40),
    max_num_seqs=st.integers(1, 7),
    arrivals=st.lists(st.integers(0, 25), min_size=6, max_size=6),
    watermark=st.sampled_from([None, 0.0, 0.3]),
)
def test_any_company_and_order_of_arrival_gives_the_same_tokens(
    seed, n, cache, scheduler, extra, max_num_seqs, arrivals, watermark
):
    requests = some_requests(seed, n, most=20)
    expected = [alone(MODEL, r) for r in requests]
    memory = least(MODEL, cache["cache"], requests, cache.get("block_size"))
    more = extra if "num_blocks" in memory else extra * bytes_per_token(MODEL)
    memory = {key: size + more for key, size in memory.items()}
    if watermark is not None and cache["cache"] in ("naive", "paged"):
        memory["watermark"] = watermark
    args = EngineArgs(scheduler=scheduler, max_num_seqs=max_num_seqs, **cache, **memory)
    steps = run(poisoned(build(MODEL, args)), requests, arrivals[:n])
    assert [r.output_token_ids for r in requests] == expected
    assert max(len(s.scheduled) for s in steps) <= max_num_seqs


def test_sampled_tokens_do_not_depend_on_the_neighbours():
    def tokens(company: int) -> list[int]:
        mine = request(0, [3, 1, 4], 15, seed=7, **SAMPLED)
        others = [request(1 + i, [i, i + 1], 9, seed=i, **SAMPLED) for i in range(company)]
        run(build(MODEL, EngineArgs()), [*others[: company // 2], mine, *others[company // 2 :]])
        return mine.output_token_ids

    assert tokens(0) == tokens(1) == tokens(6)


def test_a_tight_pool_thrashes_but_ends():
    requests = [request(i, [i] * 6, 30) for i in range(8)]
    expected = [alone(MODEL, r) for r in requests]
    engine = build(MODEL, EngineArgs(block_size=1, num_blocks=36, watermark=0.0))
    run(poisoned(engine), requests)
    assert [r.output_token_ids for r in requests] == expected
    assert sum(r.num_preemptions for r in requests) > 10


@pytest.mark.parametrize("cache", [{"cache": "contiguous"}, {"cache": "paged", "block_size": 3}], ids=str)
def test_no_code_clears_a_block(cache):
    """Slots that no token was written to are still NaN at the end; the others keep what was last there."""
    engine = poisoned(build(MODEL, EngineArgs(**cache, kv_cache_memory_bytes=100 * bytes_per_token(MODEL))))
    run(engine, [request(0, [1, 2, 3, 4], 4)])
    clean = engine.store.kv.isnan()
    assert engine.store.kv.numel() - clean.sum() == 7 * bytes_per_token(MODEL) // 8, (
        "4 + 4 - 1 tokens were written"
    )
    assert (engine.store.kv[~clean] != 0).all()


class FailingStore:
    """Raises in the second layer of chosen steps, when the first layer's keys are already written."""

    def __init__(self, store, fail_at: set[int], error: BaseException):
        self.store, self.fail_at, self.error = store, fail_at, error
        self.keeps_kv, self.calls = store.keeps_kv, 0

    def attend(self, layer, q, k, v, batch):
        self.calls += layer == 0
        if layer == 1 and self.calls in self.fail_at:
            raise self.error
        return self.store.attend(layer, q, k, v, batch)

    def free(self, seq_id: int) -> None:
        self.store.free(seq_id)


@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt()], ids=["error", "ctrl-c"])
@pytest.mark.parametrize("cache", CACHES[:6], ids=str)
def test_a_step_that_fails_is_undone_and_the_tokens_stay_the_same(cache, error):
    requests = some_requests(3, 5)
    expected = [alone(MODEL, r) for r in requests]
    engine = build(MODEL, EngineArgs(max_num_seqs=3, **cache))
    plain_store = engine.store
    engine.store = FailingStore(engine.store, {1, 4, 5, 13}, error)
    for r in requests:
        engine.add(r)
    failures = 0
    while engine.has_unfinished():
        try:
            engine.step()
        except (RuntimeError, KeyboardInterrupt):
            failures += 1
            assert engine.manager.snapshot().held == 0
        engine.manager.check_integrity()
    assert failures == 4
    assert [r.output_token_ids for r in requests] == expected
    assert all(len(r.metrics.token_times) == len(r.output_token_ids) for r in requests)
    engine.store = plain_store
    nothing_is_left(engine)


def interrupts_once(owner: Any, name: str, monkeypatch, before: bool, skip: int = 2) -> None:
    """Press Ctrl-C once, before or after a call of this method has done its work."""
    real, calls = getattr(owner, name), itertools.count()

    def pressed(*arguments, **options):
        press = next(calls) == skip
        if press and before:
            signal.raise_signal(signal.SIGINT)
        result = real(*arguments, **options)
        if press and not before:
            signal.raise_signal(signal.SIGINT)
        return result

    monkeypatch.setattr(owner, name, pressed)


PLACES = {
    "schedule": lambda e: (e.scheduler, "schedule"),
    "parts": lambda e: (e.scheduler, "_parts"),
    "update": lambda e: (e.scheduler, "update"),
    "allocate": lambda e: (e.manager, "allocate"),
    "free": lambda e: (e.manager, "free"),
    "expect": lambda e: (e.manager, "expect"),
    "model": lambda e: (e, "_compute"),
    "pool": lambda e: (e.manager.pool, "allocate"),
}


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("place", PLACES)
def test_ctrl_c_anywhere_in_a_step_leaves_no_half_change(place, before, monkeypatch):
    requests = [request(i, [i] * 6, 9, seed=i, **SAMPLED) for i in range(5)]
    expected = [alone(MODEL, r) for r in requests]
    engine = build(MODEL, EngineArgs(block_size=2, num_blocks=20, watermark=0.0))
    for r in requests:
        engine.add(r)
    interrupts_once(*PLACES[place](engine), monkeypatch, before)
    interrupts = 0
    while engine.has_unfinished():
        try:
            engine.step()
        except KeyboardInterrupt:
            interrupts += 1
        engine.manager.check_integrity()
    assert interrupts == 1
    nothing_is_left(engine)
    assert [r.output_token_ids for r in requests] == expected
    assert all(len(r.metrics.token_times) == len(r.output_token_ids) for r in requests)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_shield_holds_ctrl_c_back_lets_it_through_where_it_is_lowered_and_nests():
    shield, seen = Shield(), list[str]()

    def press(name: str) -> None:
        signal.raise_signal(signal.SIGINT)
        seen.append(name)

    def nested() -> None:
        with shield:
            with shield:
                press("inner")
            seen.append("outer")

    def lowered() -> None:
        with shield, shield.lowered():
            press("never: it came through at once")

    def noted_before_it_is_lowered() -> None:
        with shield:
            press("noted")
            with shield.lowered():
                seen.append("never: the noted one came first")

    for interrupted in (nested, lowered, noted_before_it_is_lowered):
        with pytest.raises(KeyboardInterrupt):
            interrupted()
    assert seen == ["inner", "outer", "noted"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_engine_runs_in_a_thread_where_no_signal_comes():
    r = request(0, [1, 2], 4)
    engine = build(MODEL, EngineArgs())
    thread = threading.Thread(target=run, args=(engine, [r]))
    thread.start()
    thread.join()
    assert r.output_token_ids == alone(MODEL, r)


def test_a_listener_cannot_start_a_step_within_a_step():
    r = request(0, [1, 2], 4)
    engine = build(MODEL, EngineArgs())
    engine.add(r)
    engine.on_step = lambda step: engine.step()
    with pytest.raises(EngineBusy, match="middle of a step"):
        engine.step()
    engine.on_step = None
    while engine.has_unfinished():
        engine.step()
    assert r.output_token_ids == alone(MODEL, r)


def test_ctrl_c_before_a_step_has_begun_does_not_leave_the_engine_busy(monkeypatch):
    r = request(0, [1, 2], 4)
    engine = build(MODEL, EngineArgs())
    engine.add(r)
    with monkeypatch.context() as patch:
        patch.setattr(Shield, "__enter__", lambda self: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    while engine.has_unfinished():
        engine.step()
    assert r.output_token_ids == alone(MODEL, r)


def test_a_preempted_request_keeps_what_was_said_of_its_length():
    engine = build(MODEL, EngineArgs(cache="contiguous", reservation="oracle", max_num_seqs=2))
    for r in (request(0, [1, 2, 3], 6), request(1, [4, 5], 3)):
        engine.add(r)
    engine.step()
    reserved = {s.seq_id: s.reserved for s in engine.manager.snapshot().sequences}
    engine.scheduler.take_back()
    engine.step()
    assert {s.seq_id: s.reserved for s in engine.manager.snapshot().sequences} == reserved == {0: 8, 1: 4}


def test_a_listener_that_aborts_takes_the_steps_token_back_whole():
    r = request(0, [1, 2], 6, logprobs=1)
    engine = build(MODEL, EngineArgs())
    engine.add(r)
    engine.step()
    engine.on_step = lambda step: engine.finish(r, "abort")
    engine.step()
    assert len(r.output_token_ids) == len(r.logprobs) == len(r.metrics.token_times) == 1


def test_a_step_that_is_undone_gives_back_the_numbers_it_drew(monkeypatch):
    """Ctrl-C after the tokens were sampled, before they were taken."""
    from minivllm import engine as engine_module

    def tokens(interrupted: bool) -> list[int]:
        r = request(0, [3, 1, 4], 8, seed=5, logprobs=1, **SAMPLED)
        calls = itertools.count()

        def top_logprobs(*arguments):
            if next(calls) in (2, 3, 6) and interrupted:
                raise KeyboardInterrupt
            return top_logprobs_of_package(*arguments)

        monkeypatch.setattr(engine_module, "top_logprobs", top_logprobs)
        engine = build(MODEL, EngineArgs())
        engine.add(r)
        while engine.has_unfinished():
            with suppress(KeyboardInterrupt):
                engine.step()
        assert len(r.logprobs) == len(r.output_token_ids) == 8
        return r.output_token_ids

    assert tokens(interrupted=True) == tokens(interrupted=False)


class SickModel:
    """Gives NaN logits for one request from its second step on."""

    def __init__(self, model, sick: int):
        self.model, self.sick = model, sick
        self.config, self.device, self.dtype = model.config, model.device, model.dtype

    def __call__(self, batch: Batch, store) -> torch.Tensor:
        logits = self.model(batch, store)
        for row, piece in enumerate(batch):
            if piece.seq_id == self.sick and piece.seq_len > 4:
                logits[row] = float("nan")
        return logits


@pytest.mark.parametrize("cache", CACHES[1:6], ids=str)
def test_a_request_without_usable_logits_is_ended_by_name_and_the_others_go_on(cache):
    requests = [request(i, [i, 2, 3], 8) for i in range(4)]
    expected = [alone(MODEL, r) for r in requests]
    engine = build(MODEL, EngineArgs(**cache))
    engine.model = SickModel(MODEL, sick=2)
    for r in requests:
        engine.add(r)
    engine.step()
    engine.step()
    with pytest.raises(InvalidLogits, match=r"Request 2 was ended.*weights are damaged"):
        engine.step()
    while engine.has_unfinished():
        engine.step()
        engine.manager.check_integrity()
    nothing_is_left(engine)
    assert (requests[2].finish_reason, requests[2].output_token_ids) == ("abort", expected[2][:2])
    assert [r.output_token_ids for r in requests if r.request_id != 2] == expected[:2] + expected[3:]


def test_a_listener_that_fails_loses_no_token():
    r = request(0, [1, 2, 3], 5)
    engine = build(MODEL, EngineArgs())

    def listener(step: Step) -> None:
        if step.index == 1:
            raise ValueError("the listener's fault")

    engine.on_step = listener
    engine.add(r)
    engine.step()
    with pytest.raises(ValueError, match="listener"):
        engine.step()
    while engine.has_unfinished():
        engine.step()
    assert r.output_token_ids == alone(MODEL, r)


@pytest.mark.parametrize("when", ["waiting", "running", "preempted", "in a listener", "finished"])
@pytest.mark.parametrize("cache", CACHES[:6], ids=str)
def test_a_request_can_be_ended_in_every_state(cache, when):
    requests = [request(i, [i, 2, 3], 8) for i in range(4)]
    expected = [alone(MODEL, r) for r in requests]
    engine = build(MODEL, EngineArgs(max_num_seqs=3, **cache))
    mine = requests[3 if when == "waiting" else 1]
    for r in requests:
        engine.add(r)
    engine.step()
    if when == "preempted":
        engine.scheduler.take_back()
        for r in requests:
            engine.store.free(r.request_id)
    if when == "in a listener":
        engine.on_step = lambda step: engine.finish(mine, "abort")
        engine.step()
        engine.on_step = None
    if when == "finished":
        while mine.status is not Status.FINISHED:
            engine.step()
    engine.finish(mine, "abort")
    engine.finish(mine, "abort")
    assert mine.finish_reason == ("length" if when == "finished" else "abort")
    while engine.has_unfinished():
        engine.step()
        engine.manager.check_integrity()
    nothing_is_left(engine)
    others = [r for r in requests if r is not mine]
    assert [r.output_token_ids for r in others] == [expected[r.request_id] for r in others]
    assert mine.output_token_ids == expected[mine.request_id][: len(mine.output_token_ids)]
    assert len(mine.metrics.token_times) == len(mine.output_token_ids)


def test_three_thousand_short_requests_leave_nothing_behind():
    random = Random(0)
    requests = [
        request(i, [random.randrange(307)] * random.randint(1, 3), random.randint(1, 3)) for i in range(3000)
    ]
    engine = build(MODELS["tiny-qwen3"], EngineArgs(block_size=3, num_blocks=90, max_num_seqs=64))
    for r in requests:
        engine.add(r)
    while engine.has_unfinished():
        engine.step()
    engine.manager.check_integrity()
    nothing_is_left(engine)
    assert all(r.finish_reason == "length" for r in requests)
    assert engine.manager.pool.num_free_blocks == 90


def test_what_can_never_fit_is_refused_on_arrival_and_the_rest_goes_on():
    engine = build(MODEL, EngineArgs(block_size=3, num_blocks=4))
    fits = request(0, [1] * 6, 7)
    engine.add(fits)
    with pytest.raises(RequestTooLong, match=r"may need 13 tokens in memory \(6 of prompt, max_tokens=8\)"):
        engine.add(request(1, [1] * 6, 8))
    while engine.has_unfinished():
        engine.step()
    assert fits.output_token_ids == alone(MODEL, fits)


def test_a_step_says_who_computed_what_who_waited_and_who_lost_its_memory():
    engine = build(MODEL, EngineArgs(block_size=1, num_blocks=8, max_num_seqs=2, watermark=0.0))
    steps = run(engine, [request(0, [1, 2, 3], 4), request(1, [4, 5], 4), request(2, [6], 1)])
    seen = [([tuple(part)[:3] for part in s.scheduled], s.preempted, s.waiting) for s in steps]
    assert seen[0] == ([(0, 0, 3), (1, 0, 2)], (), (2,))
    assert seen[1] == ([(0, 3, 1), (1, 2, 1)], (), (2,))
    assert seen[2] == ([(0, 4, 1)], (1,), (1, 2)), "5 + 4 slots are not there: the last one gives way"
    assert seen[3] == ([(0, 5, 1)], (), (1, 2)), "6 + 4 neither"
    assert seen[4] == ([(1, 0, 4), (2, 0, 1)], (), ()), "it begins again with the two tokens it had"
    assert [s.index for s in steps] == list(range(len(steps)))


def test_metrics_come_from_the_engines_clock():
    engine = build(MODEL, EngineArgs(max_num_seqs=1))
    engine.clock = itertools.count(100.0, 10.0).__next__
    first, second = request(0, [1], 3), request(1, [1], 1)
    run(engine, [first, second])
    assert first.metrics.arrival_time == 100.0
    assert first.metrics.first_scheduled_time == 120.0
    assert first.metrics.token_times == [130.0, 150.0, 170.0]
    assert (second.metrics.arrival_time, second.metrics.first_scheduled_time) == (110.0, 180.0)
    assert second.metrics.queue_time == 70.0


@pytest.mark.parametrize("cache", CACHES[1:], ids=lambda c: "-".join(map(str, c.values())))
def test_a_record_has_the_memory_of_each_step(cache):
    requests = some_requests(5, 5)
    engine = build(MODEL, EngineArgs(max_num_seqs=3, **cache))
    recorder = Recorder(engine.manager)
    for r in requests:
        engine.add(r)
    engine.on_step = recorder
    while engine.has_unfinished():
        engine.step()
    for record in recorder.records:
        used = {s.seq_id: s.used for s in record.snapshot.sequences}
        assert used == {r: computed + new for r, computed, new, *_ in record.step.scheduled}
        assert record.step.start < record.step.end


def test_a_store_is_asked_for_nothing_it_cannot_do(monkeypatch):
    """Preempted and finished sequences leave the naive store, which would else keep their tensors."""
    engine = build(MODEL, EngineArgs(cache="naive", kv_cache_memory_bytes=40 * bytes_per_token(MODEL)))
    requests = [request(i, [i] * 9, 20) for i in range(3)]
    seen: list[tuple[int, int]] = []
    listener: Callable[[Step], None] = lambda step: seen.append(  # noqa: E731
        (engine.store.num_bytes(), engine.manager.snapshot().held_bytes)
    )
    for r in requests:
        engine.add(r)
    engine.on_step = listener
    while engine.has_unfinished():
        engine.step()
    assert sum(r.num_preemptions for r in requests) > 0
    assert all(tensors == books for tensors, books in seen)


def unused_slots(engine: Any) -> list[int]:
    """Slots that hold no token now: free ones, and those held for tokens to come."""
    used: set[int] = set()
    for s in engine.manager.snapshot().sequences:
        if isinstance(engine.store, PagedStore):
            used |= set(slot_mapping(s.block_ids, engine.manager.block_size, 0, s.used))
        else:
            used |= set(range(s.start, s.start + s.used))
    return [slot for slot in range(engine.manager.snapshot().num_slots) if slot not in used]


def poison(engine: Any, slots: list[int]) -> None:
    if isinstance(engine.store, PagedStore):
        size = engine.manager.block_size
        for slot in slots:
            engine.store.kv[slot // size, :, :, :, slot % size] = float("nan")
    else:
        engine.store.kv[:, :, slots] = float("nan")


@pytest.mark.parametrize("cache", CACHES[2:7], ids=lambda c: "-".join(map(str, c.values())))
def test_what_finished_and_preempted_sequences_leave_behind_does_not_matter(cache):
    """After every step all slots without a token are filled with NaN, blocks just given back among them."""
    requests = some_requests(8, 6, most=20)
    expected = [alone(MODEL, r) for r in requests]
    memory = least(MODEL, cache["cache"], requests, cache.get("block_size"))
    engine = build(MODEL, EngineArgs(max_num_seqs=4, **cache, **{key: 2 * n for key, n in memory.items()}))
    for r in requests:
        engine.add(r)
    while engine.has_unfinished():
        poison(engine, unused_slots(engine))
        engine.step()
    assert [r.output_token_ids for r in requests] == expected


def test_compaction_between_steps_changes_no_token_and_frees_one_long_run():
    requests = [request(i, [i] * 5, n) for i, n in enumerate((2, 12, 2, 12, 2, 12))]
    expected = [alone(MODEL, r) for r in requests]
    budget = 16 * 6 * bytes_per_token(MODEL)
    engine = poisoned(
        build(MODEL, EngineArgs(cache="contiguous", reservation="oracle", kv_cache_memory_bytes=budget))
    )
    for r in requests:
        engine.add(r)
    while not any(r.finish_reason for r in requests):
        engine.step()
    before = engine.manager.snapshot()
    moved = engine.store.move(engine.manager.compact())
    engine.manager.check_integrity()
    after = engine.manager.snapshot()
    assert (after.held, after.used) == (before.held, before.used)
    assert after.largest_free_run > before.largest_free_run
    in_place = {s.seq_id for s in before.sequences} & {
        a.seq_id for a, b in zip(after.sequences, before.sequences, strict=True) if a.start == b.start
    }
    used = sum(s.used for s in before.sequences if s.seq_id not in in_place)
    assert moved == used * bytes_per_token(MODEL) > 0
    while engine.has_unfinished():
        engine.step()
    assert [r.output_token_ids for r in requests] == expected
