"""What the tests of invariance share: a workload for each block size, what it must give by plain loops, and a
run through an engine of any options in which no slot without a token holds a number."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from random import Random
from typing import Any

import torch
from oracle import random_decoder

from minivllm.decoding.beam_search import advance
from minivllm.decoding.beams import BeamSearch
from minivllm.decoding.generate import generate
from minivllm.decoding.sampler import top_logprobs
from minivllm.decoding.stopping import finish_reason
from minivllm.memory.buddy import BuddyAllocator
from minivllm.memory.contiguous import ContiguousManager
from minivllm.memory.paged import PagedManager, num_blocks_for, slot_mapping
from minivllm.memory.prefix_cache import PrefixCachingManager
from minivllm.memory.sharing import SharingManager
from minivllm.memory.store import KVStore, RecomputeStore
from minivllm.model.batch import Batch
from minivllm.model.decoder import Decoder
from minivllm.model.presets import PRESETS
from minivllm.params import BeamSearchParams, SamplingParams
from minivllm.scheduling.chunked import ChunkedScheduler
from minivllm.scheduling.plan import SchedulerOutput
from minivllm.scheduling.request import Request
from minivllm.step import Step

VOCAB, EOS = 31, (2, 4, 9)
MAX_MODEL_LEN = 256
MOST_STEPS = 20_000  # more than any run takes that comes to an end
COMMON = {1: 5, 3: 6, 16: 16, 128: 128}  # block size -> tokens with which many prompts begin: full blocks


@cache
def model(name: str) -> Decoder:
    """A tiny model in float64, of so few tokens that some sequences meet the end-of-sequence tokens."""
    config = replace(PRESETS[f"tiny-{name}"], vocab_size=VOCAB, num_hidden_layers=2, eos_token_ids=EOS)
    return random_decoder(config, seed=3)


@dataclass(frozen=True)
class Asked:
    """One request of the workload."""

    prompt: tuple[int, ...]
    params: SamplingParams | BeamSearchParams
    priority: int = 0
    cache_salt: str | None = None


@dataclass(frozen=True)
class Answer:
    """One continuation: its tokens, each one's log-probability (of a beam their sum), and why it ended."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str | None


@cache
def workload(block_size: int) -> tuple[Asked, ...]:
    """Shared prefixes that end before, with and after a block, equal prompts, samples and beams, one long
    prompt among short ones, ends by length, stop token and end of sequence."""
    random = Random(block_size)

    def some(n: int) -> tuple[int, ...]:
        return tuple(random.randrange(VOCAB) for _ in range(n))

    def greedy(max_tokens: int, **others: Any) -> SamplingParams:
        return SamplingParams(temperature=0, max_tokens=max_tokens, logprobs=0, ignore_eos=True, **others)

    def sampled(max_tokens: int, seed: int, **others: Any) -> SamplingParams:
        return SamplingParams(
            max_tokens=max_tokens, seed=seed, logprobs=0, **{"ignore_eos": True, "temperature": 1.3, **others}
        )

    common, short, long = some(COMMON[block_size]), some(2), some(40)
    head = common[:17]  # of so many tokens are the others, where blocks are long
    return (
        Asked(common[:-1], greedy(15), 2),
        Asked(head if block_size == 128 else common, greedy(12), 0),
        Asked((*common, 7), sampled(14, seed=10, top_p=0.9), 1),
        Asked((*common, 7), sampled(12, seed=20, n=3, stop_token_ids=range(10, 14)), 1),
        Asked(common, BeamSearchParams(beam_width=3, max_tokens=9), 0),
        Asked(short[:1], greedy(18), 2),
        Asked((*head, *long), greedy(5), 1),
        Asked(short, sampled(8, seed=30, n=3), 0),
        Asked(short, BeamSearchParams(beam_width=2, max_tokens=10, length_penalty=0.0), 2),
        Asked(short[:1], sampled(15, seed=40, repetition_penalty=1.2, presence_penalty=0.5), 0),
        Asked(head, sampled(14, seed=50, ignore_eos=False, min_tokens=1), 1, "salt"),
        Asked((*head, *short), sampled(13, seed=60, stop_token_ids=(1, 3, 5)), 2),
    )


@cache
def expected(name: str, block_size: int) -> tuple[tuple[Answer, ...], ...]:
    """For each request what a loop gives that keeps nothing in memory, one continuation at a time."""
    return tuple(answers(model(name), asked) for asked in workload(block_size))


@torch.inference_mode()
def answers(decoder: Decoder, asked: Asked, store: KVStore | None = None) -> tuple[Answer, ...]:
    """By the plain loop of `decoding/generate.py`, sample i with seed + i, or by a plain search.

    store: the loop's memory; None: it keeps nothing.
    """
    prompt, params, eos = asked.prompt, asked.params, decoder.config.eos_token_ids
    if isinstance(params, BeamSearchParams):
        search = BeamSearch(params, params.max_tokens, eos)
        while not search.done:
            beams = [(i, [*prompt, *beam.token_ids], 0) for i, beam in enumerate(search.live)]
            advance(search, decoder(Batch.pack(beams), RecomputeStore()))
        return tuple(Answer(h.token_ids, [h.cumulative_logprob], h.finish_reason) for h in search.best())
    found = []
    for i in range(params.n):
        one = replace(params, n=1, logprobs=None, seed=None if params.seed is None else params.seed + i)
        tokens = list(generate(decoder, store or RecomputeStore(), prompt, one))
        batch = Batch.pack([(0, [*prompt, *tokens[:-1]], 0)])
        rows = torch.arange(len(prompt) - 1, len(prompt) + len(tokens) - 1)
        logits = decoder(replace(batch, logits_indices=rows), RecomputeStore())
        logprobs = [top_logprobs(row, t, 0)[t].logprob for row, t in zip(logits, tokens, strict=True)]
        found.append(Answer(tokens, logprobs, finish_reason(tokens, one, eos, one.max_tokens)))
    return tuple(found)


def given(requests: Iterable[Request]) -> tuple[Answer, ...]:
    """What requests have come to: those that one of the workload was split into, in their order."""
    found = []
    for request in requests:
        if request.search is not None:
            found += [
                Answer(h.token_ids, [h.cumulative_logprob], h.finish_reason) for h in request.search.best()
            ]
            continue
        for s in request.sequences:
            logprobs = [at[t].logprob for at, t in zip(s.logprobs, s.output_token_ids, strict=True)]
            found.append(Answer(s.output_token_ids, logprobs, s.finish_reason))
    return tuple(found)


@dataclass
class Run:
    """A run to its end: what each request of the workload became, the steps, and what was seen on the way."""

    engine: Any
    requests: list[list[Request]]
    steps: list[Step] = field(default_factory=list)
    num_fallbacks: int = 0  # preempted requests that found the swap space full


def as_requests(asked: Sequence[Asked], eos: Sequence[int], shares: bool, budget: int) -> list[list[Request]]:
    """What each entry of a workload becomes. Where blocks cannot be shared samples are asked for one by one,
    and beams not at all; nor is a group that is wider than the budget of a step."""
    found: list[list[Request]] = []
    for i, a in enumerate(asked):
        r = Request(i, list(a.prompt), a.params, eos, priority=a.priority, cache_salt=a.cache_salt)
        if r.width > budget or (r.search is not None and not shares):
            found.append([])
        else:
            found.append([r] if shares else r.split())
    return found


def least_blocks(requests: Iterable[Request], block_size: int) -> int:
    """Blocks that the largest request needs: full blocks of the prompt once, others for each sequence."""

    def blocks(r: Request) -> int:
        common = len(r.prompt_token_ids) // block_size
        return common + r.width * (num_blocks_for(r.longest, block_size) - common)

    return max(map(blocks, requests))


def least_slots(requests: Iterable[Request], contiguous: bool) -> int:
    """Slots that the largest request needs in memory without blocks."""
    longest = max(r.longest for r in requests)
    return BuddyAllocator.run_length(longest) if contiguous else longest


def run(engine: Any, requests: list[list[Request]], arrivals: Sequence[int]) -> Run:
    """Run requests to their end, those of entry i added before step arrivals[i], of one step the lower first
    and all before step 0 where it is negative; all is checked all the way, and what holds no token is NaN."""
    done = Run(engine, requests)
    engine.on_step = done.steps.append
    watch(engine, done)
    poison(engine)
    todo = sorted(zip(arrivals, range(len(requests)), requests, strict=True))
    for number in itertools.count():
        while todo and todo[0][0] <= number:
            for request in todo.pop(0)[2]:
                engine.add(request)
        if not todo and not engine.has_unfinished():
            break
        assert number < MOST_STEPS, "the requests do not come to an end"
        engine.step()
        engine.manager.check_integrity()
        if engine.scheduler.memory.swap_space is not None:
            engine.scheduler.memory.swap_space.check_integrity()
        poison(engine)
    nothing_is_left(engine)
    return done


def watch(engine: Any, done: Run) -> None:
    """Look at each plan before it is carried out, and count requests that found the swap space full."""
    scheduler, memory = engine.scheduler, engine.scheduler.memory
    schedule, preempt = scheduler.schedule, memory.preempt

    def checked_schedule() -> SchedulerOutput:
        before = list(scheduler.running)
        plan: SchedulerOutput = schedule()
        check_plan(engine, plan, before)
        return plan

    def counted_preempt(request: Request) -> None:
        computed = any(s.num_computed_tokens for s in request.holders)
        preempt(request)
        if memory.swap_space is not None and not memory.swap_space.has(request.first.seq_id):
            done.num_fallbacks += computed

    scheduler.schedule, memory.preempt = checked_schedule, counted_preempt


def check_plan(engine: Any, plan: SchedulerOutput, before: list[Request]) -> None:
    """What must hold of every plan, whatever the options. before: who was running."""
    scheduler, manager = engine.scheduler, engine.manager
    granted = dict.fromkeys((part.request for part in plan.scheduled), 0)
    for part in plan.scheduled:
        assert part.num_new_tokens > 0
        granted[part.request] += part.num_new_tokens
    assert sum(granted.values()) == plan.num_tokens, "a budget was not given back, or given back twice"
    assert len({part.sequence for part in plan.scheduled}) == len(plan.scheduled), "a sequence is there twice"
    assert granted.keys().isdisjoint(plan.preempted)
    assert granted.keys() <= set(scheduler.running)
    if not getattr(scheduler, "prefer_prefill", False):  # which admits before those who decode go on
        assert not plan.preempted or set(scheduler.running) <= set(before), (
            "preempted and admitted in one step"
        )
    assert sum(request.num_seqs for request in scheduler.running) <= scheduler.max_num_seqs
    if isinstance(scheduler, ChunkedScheduler):
        assert plan.num_tokens <= scheduler.max_num_batched_tokens
        for request, n in granted.items():
            assert n <= max(scheduler.long_prefill_token_threshold or n, request.num_seqs)
    if isinstance(manager, SharingManager):
        read = {source for source, _ in plan.block_copies}
        written = [target for _, target in plan.block_copies] + [target for _, target in plan.swap_in]
        assert len(set(written)) == len(written)
        assert read.isdisjoint(target for _, target in plan.block_copies)
        for part in plan.scheduled:
            start, size = part.sequence.num_computed_tokens, manager.block_size
            table = manager.block_table(part.sequence.seq_id)
            for block in table[start // size : num_blocks_for(start + part.num_new_tokens, size)]:
                assert manager.pool.ref_count[block] == 1, "a block that others read is written"
                if isinstance(manager, PrefixCachingManager):
                    assert block not in manager.pool.index, "a block that can be found is written"


def poison(engine: Any) -> None:
    """NaN wherever no token stands; where one does, no NaN may be."""
    manager, store, swap_space = engine.manager, engine.store, engine.scheduler.memory.swap_space
    computed = {
        s.seq_id: s.num_computed_tokens for request in engine.scheduler.running for s in request.holders
    }
    if isinstance(manager, ContiguousManager):
        held = [manager.start(i) + k for i, n in computed.items() for k in range(n)]
        _poison(store.kv.movedim(2, 0), store.kv[-1, 1, :, -1, -1], held)
    if isinstance(manager, PagedManager):
        size = manager.block_size
        held = [
            slot for i, n in computed.items() for slot in slot_mapping(manager.block_table(i), size, 0, n)
        ]
        if isinstance(manager, PrefixCachingManager):
            cached = manager.pool.cached_blocks()
            held += [slot for block in cached for slot in range(block * size, (block + 1) * size)]
        _poison(store.kv.movedim(4, 1), store.kv[:, -1, 1, -1, :, -1], held)
    if swap_space is not None:
        waiting = [s for request in engine.scheduler.waiting for s in request.holders]
        swapped = [s for s in waiting if swap_space.has(s.seq_id)]
        tables = [(swap_space.block_table(s.seq_id), s.num_computed_tokens) for s in swapped]
        held = [slot for table, n in tables for slot in slot_mapping(table, manager.block_size, 0, n)]
        _poison(store.cpu_kv.movedim(4, 1), store.cpu_kv[:, -1, 1, -1, :, -1], held)


def _poison(kv: torch.Tensor, one: torch.Tensor, held: list[int]) -> None:
    """kv: [num_slots, ...] or [num_blocks, block_size, ...]; one: of each slot one number, the last that is
    written; held: the slots with a token."""
    has_number = ~one.isnan()
    holds_token = torch.zeros(one.shape, dtype=torch.bool)
    holds_token.view(-1)[held] = True
    assert (has_number | ~holds_token).all(), "a token counts as computed, and nothing was written there"
    kv[has_number & ~holds_token] = torch.nan


def nothing_is_left(engine: Any) -> None:
    """No memory is held, spoken for or remembered by anyone."""
    manager, scheduler, swap_space = engine.manager, engine.scheduler, engine.scheduler.memory.swap_space
    assert not scheduler.running
    assert not scheduler.waiting
    assert manager.snapshot().held == manager.snapshot().used == 0
    for part in filter(None, (manager, engine.store, swap_space)):
        left = {name: table for name, table in vars(part).items() if isinstance(table, dict) and table}
        assert not left
    if isinstance(manager, PagedManager):
        assert manager.pool.num_free_blocks == manager.pool.num_blocks
    if isinstance(manager, SharingManager):
        assert manager.take_copies() == []
        assert manager.promised == {}
        assert set(manager.pool.ref_count) == {0}
    if swap_space is not None:
        assert swap_space.take_transfers() == ([], [])
        assert swap_space.num_free_blocks == swap_space.num_blocks
        assert set(swap_space.pool.ref_count) == {0}
