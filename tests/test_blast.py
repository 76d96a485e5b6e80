"""Schedulers and books together: 20,000 random steps on a plain model of the tensors, without torch.

Requests, groups and beam searches arrive, are aborted, fail, give way and come back, on every scheduler,
policy, manager and size of swap space. A table from slot to value plays each pool. It makes what a plan
lists in the order swap-outs, swap-ins, copies, writes; then the slots of every block table must hold what
its sequence's tokens give. The value of a token stands for all tokens before it too, so a block that was
shared wrongly, found too early, overwritten or never copied shows at once, and a lost or doubled token shows
in the output.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest

from minivllm.decoding.beams import BeamSearch, Candidate
from minivllm.errors import InvalidOption, RequestTooLong
from minivllm.memory.paged import PagedManager, slot_mapping
from minivllm.memory.prefix_cache import PrefixCachingManager
from minivllm.memory.sharing import SharingManager
from minivllm.memory.swap import SwapSpace
from minivllm.params import BeamSearchParams, SamplingParams
from minivllm.scheduling.chunked import ChunkedScheduler
from minivllm.scheduling.continuous import ContinuousScheduler
from minivllm.scheduling.plan import SchedulerOutput
from minivllm.scheduling.queue import rank
from minivllm.scheduling.request import Request, Status
from minivllm.scheduling.sequence import Sequence
from minivllm.scheduling.static import StaticScheduler

NUM_STEPS = 20_000
SCHEDULERS = ("static", "continuous", "chunked")
MANAGERS = ("paged", "sharing", "hash", "radix")
POLICIES = ("fcfs", "priority")
CASES = ["-".join(case) for case in itertools.product(SCHEDULERS, MANAGERS, POLICIES)]
VOCAB, EOS, POISON = 6, 0, None
SALTS = {None: 1, "a": 2, "b": 3}


def extend(value: int, token: int) -> int:
    """What a token puts into memory; it depends on all before it. Integers hash alike in every process."""
    return hash((value, token))


def next_token(value: int, index: int) -> int:
    """The model: the token after this history, for the index-th answer."""
    return hash((value, index, 7)) % VOCAB


def answer(request: Request, sequence: Sequence) -> int:
    """Which answer a sequence is; without chance all are the same."""
    assert isinstance(request.params, SamplingParams)
    return 0 if request.params.greedy else sequence.index


def candidates(search: BeamSearch, values: list[int]) -> list[Candidate]:
    """The model for beams; some rows have few continuations, some only the end."""
    found = [
        Candidate(score - (1 + hash((value, token)) % 997) / 100, row, token)
        for row, (score, value) in enumerate(zip(search.scores, values, strict=True))
        for token in range(1 + value % VOCAB)
    ]
    return sorted(found, key=lambda c: (-c.logprob, c.row, c.token))[: search.num_candidates]


def right_output(request: Request, sequence: Sequence) -> tuple[list[int], str]:
    """What an answer must be, computed alone."""
    assert isinstance(request.params, SamplingParams)
    value = SALTS[request.cache_salt]
    for token in request.prompt_token_ids:
        value = extend(value, token)
    output: list[int] = []
    while len(output) < request.max_tokens:
        output.append(next_token(value, answer(request, sequence)))
        value = extend(value, output[-1])
        if output[-1] == EOS and not request.params.ignore_eos:
            return output, "stop"
    return output, "length"


def right_search(request: Request) -> BeamSearch:
    """What a beam search must find, computed alone."""
    assert isinstance(request.params, BeamSearchParams)
    value = SALTS[request.cache_salt]
    for token in request.prompt_token_ids:
        value = extend(value, token)
    search = BeamSearch(request.params, request.max_tokens, request.eos_token_ids)
    values = [value]
    while not search.done:
        values = [extend(values[row], token) for row, token in search.choose(candidates(search, values))]
    return search


class World:
    """One engine without tensors: its scheduler, its books, both pools as tables, and who asked for what."""

    def __init__(self, case: str, number: int):
        kind, memory, policy = case.split("-")
        self.random = random = Random(f"{case}-{number}")
        self.size, num_blocks = random.randint(1, 7), random.choice([1, 2, 4, 6, 8, 10, 12, 14, 17])
        if memory in ("hash", "radix"):
            self.manager: PagedManager = PrefixCachingManager(num_blocks, self.size, 1, memory)
        else:
            self.manager = (SharingManager if memory == "sharing" else PagedManager)(num_blocks, self.size, 1)
        num_cpu_blocks = 0 if memory == "paged" else (200, random.randint(1, 4), 0)[number % 3]
        self.swap = SwapSpace(num_cpu_blocks) if num_cpu_blocks else None
        self.static = kind == "static"
        self.budget = self.threshold = None
        self.prefer_prefill = False
        self.max_num_seqs = random.choice([1, 3, 5, 8, 12])
        watermark = random.choice([0, 0, 0, 1, 2]) * self.size
        options: dict[str, Any] = {"policy": policy, "swap_space": self.swap}
        if kind == "chunked":
            self.budget = random.choice([1, 3, 4, 5, 8, 13, 64])
            self.threshold = random.choice([None, None, 1, 3, 6])
            self.prefer_prefill = random.random() < 0.3
            self.scheduler: ContinuousScheduler = ChunkedScheduler(
                self.manager,
                self.max_num_seqs,
                watermark,
                max_num_batched_tokens=self.budget,
                long_prefill_token_threshold=self.threshold,
                prefer_prefill=self.prefer_prefill,
                **options,
            )
        else:
            scheduler = StaticScheduler if self.static else ContinuousScheduler
            self.scheduler = scheduler(self.manager, self.max_num_seqs, watermark, **options)
        self.texts = [[random.randrange(VOCAB) for _ in range(40)] for _ in range(4)]
        self.device: dict[int, int | None] = {}
        self.cpu: dict[int, int | None] = {}
        self.values: dict[int, list[int]] = {}
        self.requests: list[Request] = []
        self.num_refused = self.num_failed = self.num_preempted = self.num_hits = 0
        self.num_copies = self.num_out = self.num_in = 0
        self.digest = hashlib.sha256()

    def run(self, num_steps: int) -> int:
        """Arrivals for so many steps, and then to the end. Returns the steps made."""
        for _ in range(num_steps):
            while self.random.random() < 0.4:
                self.arrive()
            self.step()
            self.abort()
        bound = 20 + 3 * sum(r.width * (r.longest + 1) for r in self.unfinished())
        num_more = 0
        while self.scheduler.has_unfinished():
            assert num_more < bound, f"{bound} steps are enough for what was left"
            self.step()
            num_more += 1
        self.check_end()
        return num_steps + num_more

    def unfinished(self) -> list[Request]:
        return [request for request in self.requests if request.status is not Status.FINISHED]

    # -- what comes from outside

    def arrive(self) -> None:
        """A new request: often the beginning of a common text, often the next turn of an earlier one."""
        random = self.random
        if len(self.unfinished()) > 8:
            return
        n = random.choice([1, 1, 1, 2, 3, 4])
        room = self.manager.pool.num_blocks * self.size
        prompt = list(random.choice(self.texts)[: random.randint(1, max(1, min(40, room // 2)))])
        if self.requests and random.random() < 0.3:
            prompt = list(random.choice(self.requests).sequences[0].token_ids)
        if random.random() < 0.7:
            prompt += [random.randrange(VOCAB) for _ in range(random.randint(1, 5))]
        fill = (room - len(prompt)) // n + random.randint(0, 2)  # about as many tokens as there could be
        most = max(1, min(40, fill if random.random() < 0.6 else random.randint(1, 12)))
        ignore_eos = random.random() < 0.7
        params: SamplingParams | BeamSearchParams
        if random.random() < 0.25:
            params = BeamSearchParams(n, most, early_stopping=random.random() < 0.5, ignore_eos=ignore_eos)
        else:
            params = SamplingParams(
                n, seed=0, max_tokens=most, ignore_eos=ignore_eos, temperature=int(random.random() < 0.8)
            )
        request = Request(
            len(self.requests),
            prompt,
            params,
            (EOS,),
            priority=random.randint(0, 3),
            cache_salt=random.choice([None, None, None, "a", "b"]),
        )
        parts = [request]
        if not isinstance(self.manager, SharingManager) and request.search is None:
            parts = request.split()
        for part in parts:
            expected = self.why_never(part)
            if expected is None:
                self.scheduler.add(part)
                self.requests.append(part)
                continue
            self.num_refused += 1
            with pytest.raises(expected):
                self.scheduler.add(part)
        self.manager.check_integrity()

    def why_never(self, request: Request) -> type[Exception] | None:
        """Whether a request is refused: all its answers run together, and only full blocks stay shared."""
        width, size = request.width, self.size
        if width > self.max_num_seqs or (width > 1 and not isinstance(self.manager, SharingManager)):
            return InvalidOption
        each = -(-request.longest // size)
        common = len(request.prompt_token_ids) // size if width > 1 else 0
        if common + width * (each - common) > self.manager.pool.num_blocks:
            return RequestTooLong
        return InvalidOption if width > (self.budget or width) else None

    def abort(self) -> None:
        """Between two steps a request goes, or one of its answers."""
        if self.random.random() < 0.1 and (unfinished := self.unfinished()):
            request = self.random.choice(unfinished)
            sequence = None
            if request.search is None and self.random.random() < 0.7:
                sequence = self.random.choice(request.sequences)
            self.scheduler.finish(request, "abort", sequence=sequence)
            self.check_books()

    # -- a step

    def step(self) -> None:
        """Plan, move, write, choose, take; or fail anywhere on the way."""
        scheduler = self.scheduler
        running, waiting = list(scheduler.running), list(scheduler.waiting)
        lacking = {r.request_id: sum(r.target(s) - s.num_computed_tokens for s in r.holders) for r in running}
        plan = scheduler.schedule()
        self.note(plan)
        self.check_plan(plan, running, waiting, lacking)
        if not plan.scheduled:
            return
        fails_at = self.random.randint(0, 3 + len(plan.scheduled)) if self.random.random() < 0.03 else None
        if self.execute(plan, fails_at):
            if self.random.random() < 0.03:
                scheduler.abort(self.random.choice(plan.scheduled).request)  # by a listener
            tokens, beams = self.choose(plan)
            ended = scheduler.update(plan, tokens, beams)
            assert all(request.status is Status.FINISHED for request in ended)
        else:
            self.num_failed += 1
            order = [*scheduler.running, *scheduler.waiting]
            scheduler.take_back(plan)
            assert not scheduler.running
            order = order if scheduler.policy == "fcfs" else sorted(order, key=rank)
            assert list(scheduler.waiting) == order, "a failed step changes no order"
        self.check_books()

    def execute(self, plan: SchedulerOutput, fails_at: int | None = None) -> bool:
        """Do what a plan lists, and look at the memory before and after the writes; False: it failed."""
        moves = (
            (self.device, self.cpu, plan.swap_out),
            (self.cpu, self.device, plan.swap_in),
            (self.device, self.device, plan.block_copies),
        )
        for at, (source, target, pairs) in enumerate(moves):
            if at == fails_at:
                return False
            for a, b in pairs:
                for i in range(self.size):
                    target[b * self.size + i] = source.get(a * self.size + i, POISON)
        self.poison()
        for request in self.scheduler.running:
            for sequence in request.holders:
                self.check_memory(request, sequence, sequence.num_computed_tokens)
        for at, (request, sequence, num_new, _) in enumerate(plan.scheduled):
            if 3 + at == fails_at:
                return False
            start = sequence.num_computed_tokens
            values = self.values_of(request, sequence)[start : start + num_new]
            slots = self.slots(sequence, start, start + num_new)
            assert sequence.token_ids[start : start + num_new] == plan.scheduled[at].new_token_ids()
            self.device.update(zip(slots, values, strict=True))
        if fails_at is not None:
            return False
        new = {part.sequence.seq_id: part.num_new_tokens for part in plan.scheduled}
        for request in self.scheduler.running:
            for sequence in request.holders:
                n = sequence.num_computed_tokens + new.get(sequence.seq_id, 0)
                self.check_memory(request, sequence, n)
        return True

    def poison(self) -> None:
        """What nobody may read is overwritten: free blocks, and slots behind the computed tokens."""
        pool = self.manager.pool
        index = getattr(pool, "index", ())
        for block in range(pool.num_blocks):
            if pool.is_free(block) and block not in index:
                self.device.update(dict.fromkeys(range(block * self.size, (block + 1) * self.size), POISON))
        for request in self.scheduler.running:
            for sequence in request.holders:
                end = len(self.manager.block_table(sequence.seq_id)) * self.size
                slots = self.slots(sequence, sequence.num_computed_tokens, end)
                self.device.update(dict.fromkeys(slots, POISON))
        if self.swap is not None:
            for slot in [slot for slot in self.cpu if self.swap.pool.is_free(slot // self.size)]:
                del self.cpu[slot]

    def slots(self, sequence: Sequence, start: int, end: int) -> list[int]:
        return slot_mapping(self.manager.block_table(sequence.seq_id), self.size, start, end)

    def values_of(self, request: Request, sequence: Sequence) -> list[int]:
        """What each token of a sequence puts into memory."""
        values = self.values.setdefault(sequence.seq_id, [])
        for token in sequence.token_ids[len(values) :]:
            values.append(extend(values[-1] if values else SALTS[request.cache_salt], token))
        return values

    def choose(self, plan: SchedulerOutput) -> tuple[dict[int, int], dict[int, list[tuple[int, int]]]]:
        """The next tokens, from what stands in memory and not from what should stand there."""
        tokens: dict[int, int] = {}
        rows: dict[int, tuple[Request, list[int]]] = {}
        for request, sequence, num_new, samples in plan.scheduled:
            if not samples or request.status is Status.FINISHED:
                continue
            n = sequence.num_computed_tokens + num_new
            value = self.device[self.slots(sequence, n - 1, n)[0]]
            assert value is not None
            if request.search is not None:
                rows.setdefault(request.request_id, (request, []))[1].append(value)
                continue
            for sample in samples:
                assert sample.num_tokens == n
                tokens[sample.seq_id] = next_token(value, answer(request, sample))
        beams = {}
        for request_id, (request, values) in rows.items():
            assert request.search is not None
            assert len(values) == len(request.live), "all beams in one step"
            beams[request_id] = request.search.choose(candidates(request.search, values))
        return tokens, beams

    def note(self, plan: SchedulerOutput) -> None:
        scheduled = [
            (s.sequence.seq_id, s.num_new_tokens, [x.seq_id for x in s.samples]) for s in plan.scheduled
        ]
        preempted = [request.request_id for request in plan.preempted]
        moves = plan.swap_out, plan.swap_in, plan.block_copies
        self.digest.update(repr((scheduled, preempted, moves)).encode())
        self.num_preempted += len(preempted)
        self.num_copies += len(plan.block_copies)
        self.num_out += len(plan.swap_out)
        self.num_in += len(plan.swap_in)

    # -- what must hold

    def check_memory(self, request: Request, sequence: Sequence, n: int) -> None:
        found = [self.device.get(slot, POISON) for slot in self.slots(sequence, 0, n)]
        assert found == self.values_of(request, sequence)[:n], "memory holds what the tokens give"

    def check_plan(
        self, plan: SchedulerOutput, before: list[Request], queue: list[Request], lacking: dict[int, int]
    ) -> None:
        after, preempted, parts = self.scheduler.running, plan.preempted, plan.scheduled
        assert bool(parts) == bool(before or queue), "while there is work, some of it is done"
        assert len({part.sequence.seq_id for part in parts}) == len(parts), "nobody takes part twice"
        assert all(part.num_new_tokens >= 1 and part.request in after for part in parts)
        assert sum(request.num_seqs for request in after) <= self.max_num_seqs
        # who gave way, and who began: `joined` is the list of those running before anyone gave way
        gone, left = set(map(id, preempted)), list(map(id, before))
        begun = [r for r in after if id(r) not in left]
        if self.scheduler.policy == "fcfs":
            joined = [*after, *reversed(preempted)]
            assert joined[: len(before)] == before, "the last to begin gives way first"
            begun = joined[len(before) :]
            assert list(self.scheduler.waiting) == [*joined[len(after) :], *queue[len(begun) :]]
        else:
            assert preempted == sorted(preempted, key=rank, reverse=True), "the least urgent first"
            assert not preempted or all(rank(r) < rank(preempted[-1]) for r in after)
            begun += sorted((r for r in preempted if id(r) not in left), key=rank)
            begun.sort(key=rank)
            rest = [*queue[len(begun) :], *preempted]
            assert list(self.scheduler.waiting) == sorted(rest, key=rank)
        assert begun == queue[: len(begun)], "whoever waits is admitted in order"
        if not self.prefer_prefill:
            assert not (begun and preempted), "nobody is admitted in a step that took from another"
            if self.scheduler.policy == "fcfs" and after:
                assert parts[0].request is after[0], "the first always goes on"
        if self.static and before:
            assert not begun, "a batch is closed"
        assert not gone & {id(part.request) for part in parts}, "who gave way takes no part"
        self.check_budget(plan, lacking)

    def check_budget(self, plan: SchedulerOutput, lacking: dict[int, int]) -> None:
        """No step is too long, and none leaves out what it has room for."""
        granted: dict[int, int] = {}
        for part in plan.scheduled:
            i = part.request.request_id
            granted[i] = granted.get(i, 0) + part.num_new_tokens
        assert sum(granted.values()) == plan.num_tokens <= (self.budget or plan.num_tokens)
        for request in self.scheduler.running:
            i, most = request.request_id, self.threshold
            cap = plan.num_tokens + 10**6 if most is None else max(most, request.num_seqs)
            assert granted.get(i, 0) <= cap
            left = 1 if self.budget is None else self.budget - plan.num_tokens
            if left and not plan.preempted and i in lacking and len(request.holders) == 1:
                assert granted.get(i, 0) == min(lacking[i], cap), "there was room for more"
        counters = self.scheduler.memory.counters
        assert counters.num_preemptions == self.num_preempted
        assert counters.num_swapped_out_blocks == self.num_out
        assert counters.num_swapped_in_blocks == self.num_in

    def check_books(self) -> None:
        """Between two steps: who runs has memory, who waits has none or is swapped out as a whole."""
        manager, scheduler = self.manager, self.scheduler
        manager.check_integrity()
        held = {s.seq_id for s in manager.snapshot().sequences}
        assert held == {s.seq_id for request in scheduler.running for s in request.holders}
        for request in scheduler.running:
            assert all(0 <= s.num_computed_tokens < s.num_tokens for s in request.live)
        out = set()
        for request in scheduler.waiting:
            assert request.status is Status.WAITING
            swapped = [self.swap is not None and self.swap.has(s.seq_id) for s in request.holders]
            assert len(set(swapped)) == 1, "a group is swapped out whole"
            if swapped[0]:
                out |= {s.seq_id for s in request.holders}
                assert self.swap is not None
                assert all(self.swap._num_tokens[s.seq_id] == s.num_computed_tokens for s in request.holders)
            else:
                assert all(s.num_computed_tokens == 0 for s in request.live)
        if self.swap is not None:
            self.swap.check_integrity()
            assert set(self.swap._tables) == out
        if isinstance(manager, SharingManager):
            assert not manager._copies
            unforked = [r for r in scheduler.running if not r.forked and r.num_common_tokens < r.longest]
            due = {r.first.seq_id: r.num_seqs - bool(r.num_common_tokens % self.size) for r in unforked}
            assert manager.promised == {seq_id: n for seq_id, n in due.items() if n}, (
                "a block for each branch that is to come, and no more"
            )

    def check_end(self) -> None:
        """All have what they asked for, and nothing is left behind."""
        for request in self.requests:
            assert request.status is Status.FINISHED
            if request.search is not None:
                if request.finish_reason != "abort":
                    assert request.search.finished == right_search(request).finished
                continue
            for sequence in request.sequences:
                output, reason = right_output(request, sequence)
                if sequence.finish_reason == "abort":
                    assert sequence.output_token_ids == output[: len(sequence.output_token_ids)]
                else:
                    assert (sequence.output_token_ids, sequence.finish_reason) == (output, reason)
            self.num_hits += request.num_cached_tokens
        manager, swap = self.manager, self.swap
        assert manager.pool.num_free_blocks == manager.pool.num_blocks
        left = [vars(manager).get(name) for name in ("_tables", "_num_tokens", "promised", "_copies")]
        left += [vars(manager).get(name) for name in ("_keys", "_num_registered")]
        if swap is not None:
            left += [swap._tables, swap._returning, swap._num_tokens, swap._outs, swap._ins]
            assert swap.num_free_blocks == swap.num_blocks
        assert not any(left)


def blast(case: str, num_steps: int) -> tuple[list[World], str]:
    """Worlds of this kind, one after the other, until so many steps are made."""
    worlds: list[World] = []
    while num_steps > 0:
        world = World(case, len(worlds))
        num_steps -= world.run(80)
        worlds.append(world)
    digest = hashlib.sha256(b"".join(world.digest.digest() for world in worlds))
    return worlds, digest.hexdigest()


def all_plans(num_steps: int = 100) -> str:
    """A digest of every plan of a short run of each case."""
    return "\n".join(f"{case} {blast(case, num_steps)[1]}" for case in CASES)


@pytest.mark.parametrize("case", CASES)
def test_whatever_happens_memory_holds_what_the_tokens_give(case):
    worlds, _ = blast(case, -(-NUM_STEPS // len(CASES)))
    assert sum(len(world.requests) for world in worlds) > 100
    happened = ["num_refused", "num_failed", "num_preempted"]
    happened += ["num_hits"] if "hash" in case or "radix" in case else []
    happened += ["num_copies", "num_out", "num_in"] if "paged" not in case else []
    for what in happened:
        assert sum(getattr(world, what) for world in worlds) > 0, what


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_whatever_happens_for_half_a_million_steps(case):
    blast(case, 500_000 // len(CASES))


def test_the_same_arrivals_give_the_same_plans_in_every_process():
    """No order comes from a set or a salted hash; and none of this needs torch."""
    path = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]
    script = "import sys, test_blast as b; print(b.all_plans()); assert 'torch' not in sys.modules"
    found = {all_plans()}
    for seed in ("0", "1"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(path)}
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        found.add(done.stdout.strip())
    assert len(found) == 1
