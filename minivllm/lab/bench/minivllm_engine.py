"""Above the chapters: this engine under a workload: requests are added when they are due, and it steps.

A request's wait counts from when it was due, not from when this loop came round to it: a loop that is
late must not hide that.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from minivllm.errors import InvalidPrompt
from minivllm.lab.bench.options import BenchOptions, Report, encode_prompts, resolve_options
from minivllm.lab.bench.result import (
    BenchResult,
    RequestRecord,
    device_name,
    forget_peak,
    new_records,
    peak_memory,
)
from minivllm.lab.workload import WorkloadRequest
from minivllm.params import SamplingParams

if TYPE_CHECKING:
    from minivllm.llm import LLM
    from minivllm.llm_engine import LLMEngine
    from minivllm.outputs import RequestOutput

ENGINE = "minivllm"
WARMUP_TOKENS = 4


def run(requests: Sequence[WorkloadRequest], options: BenchOptions, report: Report) -> BenchResult:
    """Run the workload by its arrival times, greedily, past end-of-sequence tokens.

    Raises what `LLM` and its `add_request` raise, the latter with the request's number.
    """
    from minivllm.llm import LLM

    source, config, dtype, device = resolve_options(options)
    prompts = encode_prompts(requests, source, config, options.max_model_len)
    llm = LLM(model=options.model, dtype=options.dtype, device=options.device, **options.chosen)
    try:
        _warm_up(llm, prompts[0], requests[0].max_tokens)
        records = new_records(prompts, [r.arrival for r in requests])
        forget_peak(device)
        replay(llm, requests, prompts, records, report)
        memory = peak_memory(device)
        chosen = {name: value for name, value in asdict(llm.args).items() if value is not None}
    finally:
        llm.close()
    return BenchResult(
        ENGINE,
        options.model,
        str(dtype).removeprefix("torch."),
        device_name(device),
        records,
        options=chosen,
        **memory,
    )


def replay(
    llm: LLMEngine,
    requests: Sequence[WorkloadRequest],
    prompts: Sequence[list[int]],
    records: Sequence[RequestRecord],
    report: Report,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
    until: float = math.inf,
) -> None:
    """Add each request before the first step that begins when it is due or later, step until all have ended,
    and fill the records. Where nothing runs, sleep until the next is due. clock: the engine's own, seconds.

    until: no step begins after so many seconds; what has not ended by then is aborted, and its record has
    what had come. Raises what `add_request` raises, with the request's number.
    """
    due = deque(sorted(range(len(requests)), key=lambda i: requests[i].arrival))
    number_of: dict[int, int] = {}
    total, done = sum(r.max_tokens for r in requests), 0
    start = clock()
    while due or llm.has_unfinished_requests():
        now = clock() - start
        if now >= until:
            for request_id, number in number_of.items():
                if (left := llm.abort(request_id)) is not None:
                    _fill(records[number], left, start)
            return
        while due and requests[due[0]].arrival <= now:
            number = due.popleft()
            try:
                prompt = {"prompt_token_ids": prompts[number]}
                request_id = llm.add_request(prompt, _params(requests[number].max_tokens))
            except InvalidPrompt as error:
                raise type(error)(f"Request {number + 1} of the workload: {error}") from error
            number_of[request_id] = number
        if not llm.has_unfinished_requests():
            sleep(min(requests[due[0]].arrival, until) - now)
            continue
        for output in llm.step():
            record = records[number_of[output.request_id]]
            done += len(output.outputs[0].token_ids) - len(record.token_ids)
            record.token_ids = list(output.outputs[0].token_ids)
            if output.finished:
                _fill(record, output, start)
        report(done, total)


def _fill(record: RequestRecord, output: RequestOutput, start: float) -> None:
    """What is known of a request in the end, its times counted from the start of the run."""
    record.token_ids = list(output.outputs[0].token_ids)
    record.metrics.token_times = [at - start for at in output.metrics.token_times]
    record.num_cached_tokens = output.num_cached_tokens


def _warm_up(llm: LLM, prompt: list[int], max_tokens: int) -> None:
    """Run a few tokens through it, so that nothing is measured that happens only once."""
    llm.add_request({"prompt_token_ids": prompt[:8]}, _params(min(WARMUP_TOKENS, max_tokens)))
    while llm.has_unfinished_requests():
        llm.step()
    if llm.args.prefix_cache is not None:
        llm.reset_prefix_cache()  # the measured requests find nothing of it


def _params(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
