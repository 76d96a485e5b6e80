"""Above the chapters: the memory experiment of the PagedAttention paper, on the engine without its model.

Kwon et al. (SOSP '23, arXiv 2309.06180, figures 2 and 13) serve OPT-13B on an A100 of 40 GB, whose KV memory
has 15,728 slots, with iteration-level scheduling. Managers and scheduler here are the engine's own; only the
model is left out: the memory does not ask which tokens come.

Theirs: the slots, the longest context, the mean lengths, the three reservations, a buddy allocator. Ours:
the lengths' spread (`lab/lengths.py`); no reservation above the longest context; strictly first come, first
served; a watermark of 1 %, as in vLLM's first versions; preemption by recomputing; and the load. By
default all requests are there at the start, so the memory is as full as a scheme can have it. Two requests
a second, as in figure 13, is another load: a scheme that keeps up with it runs fewer at once, and how many
then depends on the machine's speed.

An output's last token is never in memory here. Should the paper count it, that is one slot of some 500.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from minivllm.errors import InvalidOption
from minivllm.lab.lengths import lengths as lengths
from minivllm.lab.paper_load import implied_step_seconds
from minivllm.lab.paper_load import poisson_arrivals as poisson_arrivals
from minivllm.lab.paper_split import PaperSplit, SplitCounter
from minivllm.lab.published import (
    MAX_MODEL_LEN,
    NUM_SLOTS,
    OPT_13B,
    SCHEMES,
    check_int,
)
from minivllm.lab.published import OPT_66B as OPT_66B
from minivllm.lab.published import OPT_175B as OPT_175B
from minivllm.lab.published import OPT_SHAPES as OPT_SHAPES
from minivllm.lab.published import PUBLISHED_FIGURE_2 as PUBLISHED_FIGURE_2
from minivllm.lab.published import PUBLISHED_FIGURE_11 as PUBLISHED_FIGURE_11
from minivllm.lab.published import PUBLISHED_FIGURE_13 as PUBLISHED_FIGURE_13
from minivllm.lab.published import PUBLISHED_FIGURE_13_RATE as PUBLISHED_FIGURE_13_RATE
from minivllm.lab.published import PUBLISHED_TABLE_1 as PUBLISHED_TABLE_1
from minivllm.lab.published import SOURCE as SOURCE
from minivllm.lab.published import OptShape as OptShape
from minivllm.lab.published import kv_slots as kv_slots
from minivllm.memory.contiguous import ContiguousManager
from minivllm.memory.manager import KVManager
from minivllm.memory.paged import PagedManager
from minivllm.params import SamplingParams
from minivllm.scheduling.continuous import ContinuousScheduler
from minivllm.scheduling.plan import SchedulerOutput
from minivllm.scheduling.request import Request

TURNOVERS = 3  # measuring begins when so many times as many requests have ended as are running,
WARM_UP = 0.2  # and, with arrivals over time, when this share of all requests has arrived


@dataclass(frozen=True)
class PaperRun:
    """What one scheme did, over the steps that were measured.

    mean_batch: running requests, the mean over these steps. split: shares of the memory. waited: share of
    the steps in which a request waited; 1 is a queue that never empties. num_requests: given, not all of
    them served. preemptions: times that a request gave up its memory.
    """

    scheme: str
    mean_batch: float
    split: PaperSplit
    waited: float
    num_requests: int
    preemptions: int
    steps: int


def make_manager(
    scheme: str, num_slots: int = NUM_SLOTS, max_model_len: int = MAX_MODEL_LEN, block_size: int = 16
) -> KVManager:
    """The manager of OPT-13B's KV memory: "paged", or contiguous with the reservation of that name.

    Raises InvalidOption.
    """
    check_int("num_slots", num_slots, 1)
    check_int("max_model_len", max_model_len, 1)
    check_int("block_size", block_size, 1)
    if scheme not in SCHEMES:
        raise InvalidOption(f"scheme={scheme!r} is not possible: it must be one of {', '.join(SCHEMES)}.")
    if scheme == "paged":
        return PagedManager(num_slots // block_size, block_size, OPT_13B.bytes_per_token())
    return ContiguousManager(num_slots, OPT_13B.bytes_per_token(), max_model_len, scheme)


def simulate(
    scheme: str | Callable[[], KVManager],
    lengths: Sequence[tuple[int, int]],
    *,
    num_slots: int = NUM_SLOTS,
    max_model_len: int = MAX_MODEL_LEN,
    block_size: int = 16,
    watermark: float = 0.01,
    rate: float | None = None,
    step_seconds: Callable[[int], float] = implied_step_seconds,
    seed: int = 0,
    sample_every: int = 16,
) -> PaperRun:
    """Serve requests of these (prompt_len, output_len), first come, first served, and measure the memory.

    scheme: "max", "pow2", "oracle" or "paged"; or a function that makes a manager of your own.
    watermark: share of a paged memory that is left free when a request is admitted.
    rate: None, all requests are there at the start; or Poisson arrivals, so many a second, drawn from seed,
    while a step takes step_seconds(running requests).
    sample_every: the split is taken at every so many-th step, the batch at each.

    The first requests start together and so have one age. So measuring begins when three times as many
    requests have ended as are running, and ends with the last step in which a request waits. With a rate it
    begins when also a fifth of the requests have arrived, and ends when all have.

    Raises InvalidOption, also when no step is left to measure; RequestTooLong for a request that never fits.
    """
    _check(lengths, max_model_len, watermark, rate, sample_every)
    if rate is not None:
        _seconds(step_seconds, 1)
    if isinstance(scheme, str):
        manager, name = make_manager(scheme, num_slots, max_model_len, block_size), scheme
    else:
        manager = scheme()
        name = type(manager).__name__
    requests = [
        Request(i, range(prompt_len), SamplingParams(max_tokens=output_len, ignore_eos=True))
        for i, (prompt_len, output_len) in enumerate(lengths)
    ]
    arrivals = [0.0] * len(requests) if rate is None else poisson_arrivals(len(requests), rate, seed)
    scheduler = ContinuousScheduler(manager, len(requests), _spare_slots(manager, watermark))
    for request in requests:
        scheduler.check(request)
    counter = SplitCounter({request.request_id: request.longest for request in requests})
    steps = running = waited = preemptions = 0
    for output in _steps(scheduler, requests, arrivals, step_seconds):
        if steps % sample_every == 0:
            counter.add(manager.snapshot())
        steps += 1
        running += len(scheduler.running)
        waited += bool(scheduler.waiting)
        preemptions += len(output.preempted)
    if not steps:
        raise InvalidOption(
            f"lengths has {len(requests)} requests, too few for {name}: when {TURNOVERS} times as many have "
            "ended as run at once, none waits any more. Give more requests, or fewer slots."
        )
    split = counter.shares()
    return PaperRun(name, running / steps, split, waited / steps, len(requests), preemptions, steps)


def _steps(
    scheduler: ContinuousScheduler,
    requests: Sequence[Request],
    arrivals: Sequence[float],
    step_seconds: Callable[[int], float],
) -> Iterator[SchedulerOutput]:
    """Run, and yield each step that is to be measured, when it is planned and not yet taken."""
    all_at_once = arrivals[-1] == 0
    least_arrived = 0 if all_at_once else math.ceil(WARM_UP * len(requests))
    clock, arrived, ended, begun = 0.0, 0, 0, False
    tokens: dict[int, int] = defaultdict(int)  # each request's next token is 0, for all that it matters
    while True:
        if not scheduler.has_unfinished() and arrived < len(requests):
            clock = max(clock, arrivals[arrived])
        while arrived < len(requests) and arrivals[arrived] <= clock:
            scheduler.add(requests[arrived])
            arrived += 1
        output = scheduler.schedule()
        if arrived == len(requests) and not (all_at_once and scheduler.waiting):
            return
        begun = begun or (ended >= TURNOVERS * len(scheduler.running) and arrived >= least_arrived)
        if begun:
            yield output
        ended += len(scheduler.update(output, tokens))
        if not all_at_once:
            clock += _seconds(step_seconds, len(output.scheduled))


def _seconds(step_seconds: Callable[[int], float], num_running: int) -> float:
    """What a step takes. Raises InvalidOption for what would let no request arrive any more."""
    seconds = step_seconds(num_running)
    if not 0 < seconds < math.inf:
        raise InvalidOption(
            f"step_seconds({num_running}) is {seconds!r}: a step must take more than 0 seconds, and end."
        )
    return seconds


def _spare_slots(manager: KVManager, watermark: float) -> int:
    if not isinstance(manager, PagedManager):
        return 0  # a run is reserved whole: nobody grows into what is free
    return math.ceil(watermark * manager.pool.num_blocks) * manager.block_size


def _check(lengths: Sequence[Any], max_model_len: int, watermark: Any, rate: Any, sample_every: Any) -> None:
    if not lengths:
        raise InvalidOption("lengths=[] is not possible: it must have at least one pair.")
    for i, (prompt_len, output_len) in enumerate(lengths):
        check_int(f"lengths[{i}][0]", prompt_len, 1)
        check_int(f"lengths[{i}][1]", output_len, 1)
        if prompt_len + output_len > max_model_len:
            raise InvalidOption(
                f"lengths[{i}]=({prompt_len}, {output_len}) is not possible: together it must be at most "
                f"max_model_len={max_model_len}."
            )
    check_int("sample_every", sample_every, 1)
    if not _is_number(watermark) or not 0 <= watermark < 1:
        raise InvalidOption(f"watermark={watermark!r} is not possible: it must be from 0 to below 1.")
    if rate is not None and not (_is_number(rate) and 0 < rate < math.inf):
        raise InvalidOption(f"rate={rate!r} is not possible: it must be above 0 requests a second, or None.")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
