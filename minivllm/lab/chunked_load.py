"""Above the chapters: requests that decode all the time while long prompts arrive by the clock: one run.

How long those who decode wait for a token, how long the prompts wait for their first, and what is computed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import TYPE_CHECKING, Any

from minivllm.errors import InvalidOption
from minivllm.lab.bench.figures import spread
from minivllm.lab.workload import WorkloadRequest, ids_for

if TYPE_CHECKING:
    from minivllm.lab.bench.result import RequestRecord
    from minivllm.llm import LLM
    from minivllm.step import Step


@dataclass(frozen=True)
class Load:
    """num_decodes requests with prompts of decode_prompt_len tokens decode all the time. Once they all do,
    time begins: every `interval` seconds a prompt of prompt_len tokens arrives and gets max_tokens tokens of
    output, until `seconds` have passed."""

    num_decodes: int = 8
    decode_prompt_len: int = 1536
    prompt_len: int = 700
    max_tokens: int = 16
    interval: float = 2.0
    seconds: float = 20.0

    def requests(self, vocab_size: int, longest: int, seed: int = 0) -> list[WorkloadRequest]:
        """The decodes first. longest: tokens of prompt and output that a request may have; the decodes take
        them all, so that the time ends before they do."""
        random, ids = Random(seed), ids_for(vocab_size)

        def request(prompt_len: int, max_tokens: int, arrival: float) -> WorkloadRequest:
            return WorkloadRequest(tuple(random.choices(ids, k=prompt_len)), None, max_tokens, arrival)

        most = longest - self.decode_prompt_len
        decodes = [request(self.decode_prompt_len, most, 0.0) for _ in range(self.num_decodes)]
        arrivals = [i * self.interval for i in range(1, 1 + int(self.seconds / self.interval))]
        prompts = [request(self.prompt_len, self.max_tokens, at) for at in arrivals if at < self.seconds]
        return decodes + prompts


def measure(llm: LLM, load: Load, now: Callable[[], float] = time.perf_counter) -> dict[str, Any]:
    """Run the load by the clock; what happened from the first prompt's arrival on, as one row.

    now: seconds. The engine's clock is set to it, from 0 on, and its steps are kept. It stands at 0 until all
    that decode have their first token. Raises InvalidOption where these have no room to decode, and
    InvalidPrompt for prompts that are too long.
    """
    from minivllm.lab.bench.minivllm_engine import replay
    from minivllm.lab.bench.result import new_records
    from minivllm.params import SamplingParams

    slots = int(llm.args.num_blocks or 0) * int(llm.args.block_size or 0)
    longest = min(int(llm.args.max_model_len or 0), slots)
    if longest <= load.decode_prompt_len:
        raise InvalidOption(
            f"decode_prompt_len={load.decode_prompt_len} is not possible: a request has {longest} tokens at "
            "most (max_model_len, or what the pool holds), and its output needs some of them. Give fewer."
        )
    requests = load.requests(llm.engine.model.config.vocab_size, longest)
    prompts = [list(request.prompt_token_ids or ()) for request in requests]
    once = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    llm.generate({"prompt_token_ids": prompts[-1]}, once, use_tqdm=False)  # warms up
    steps: list[Step] = []
    begin: float | None = None
    decoding: set[int] = set()

    def clock() -> float:
        return 0.0 if begin is None else now() - begin

    def on_step(step: Step) -> None:
        nonlocal begin
        steps.append(step)
        if begin is None:
            ends = ((p.request_id, p.num_computed_tokens + p.num_new_tokens) for p in step.scheduled)
            decoding.update(request_id for request_id, end in ends if end >= load.decode_prompt_len)
            begin = now() if len(decoding) == load.num_decodes else None

    llm.engine.clock, llm.engine.on_step = clock, on_step
    records = new_records(prompts, [request.arrival for request in requests])
    replay(llm, requests, prompts, records, lambda done, total: None, clock, until=load.seconds)
    found = summary(requests, records, steps)
    return {**found, "preemptions": llm.preemption_counters.num_preemptions}


def summary(
    requests: Sequence[WorkloadRequest], records: Sequence[RequestRecord], steps: Sequence[Step]
) -> dict[str, Any]:
    """One row of the curve. Requests that are there from the start decode, the others are the prompts.

    It is about the steps from the first prompt's arrival on, until one of those that decode has all its
    tokens. Latencies in milliseconds; tok_s: tokens of prompts and of output, per second. queue: how many
    earlier prompts had no token yet when each prompt arrived; it grew where they come faster than they are
    computed. prompt_steps: those with tokens of prompts; only the gaps that end with one of them are long.
    """
    metrics = [record.metrics for record in records]
    decodes = [(m, r.max_tokens) for m, r in zip(metrics, requests, strict=True) if r.arrival == 0]
    first = min(r.arrival for r in requests if r.arrival > 0)
    end = min((m.token_times[-1] for m, most in decodes if len(m.token_times) == most), default=math.inf)
    window = [step for step in steps if first <= step.start < end]
    lowest = min((part.request_id for step in steps for part in step.scheduled), default=0)
    lengths = {lowest + i: record.num_prompt_tokens for i, record in enumerate(records)}
    of_prompts = [
        sum(
            max(0, min(p.num_new_tokens, lengths[p.request_id] - p.num_computed_tokens))
            for p in step.scheduled
        )
        for step in window
    ]
    inputs = sum(of_prompts)
    outputs = sum(step.num_sampled for step in window)
    seconds = window[-1].end - window[0].start if window else None
    arrived = [m for m in metrics if 0 < m.arrival_time < min(end, steps[-1].end if steps else 0)]
    queue = [
        sum(not m.token_times or m.token_times[0] > later.arrival_time for m in arrived[:i])
        for i, later in enumerate(arrived)
    ]
    gaps = [b - a for m, _ in decodes for a, b in pairwise(m.token_times) if first < b <= end]
    return {
        "seconds": seconds,
        "steps": len(window),
        "prompt_steps": sum(tokens > 0 for tokens in of_prompts),
        "largest_step": max((sum(p.num_new_tokens for p in step.scheduled) for step in window), default=0),
        "input_tokens": inputs,
        "output_tokens": outputs,
        "tok_s": (inputs + outputs) / seconds if seconds else None,
        "itl_ms": _milliseconds(gaps),
        "ttft_ms": _milliseconds([m.ttft for m in arrived]),
        "arrived": len(arrived),
        "answered": sum(bool(m.token_times) for m in arrived),
        "queue": queue,
        "queue_grew": bool(queue) and queue[-1] > queue[0],
    }


def _milliseconds(seconds: Sequence[float | None]) -> dict[str, float | None]:
    found = spread(seconds, (50, 99, 100))
    return {"mean": found["mean"], "p50": found["p50"], "p99": found["p99"], "max": found["p100"]}


def ratios(row: Mapping[str, Any], whole: Mapping[str, Any]) -> dict[str, float | None]:
    """A budget against whole prompts: how many times shorter the ITL's p99 and its maximum are, and the share
    of the throughput."""

    def ratio(a: float | None, b: float | None) -> float | None:
        return a / b if a is not None and b else None

    return {
        "itl_p99_ratio": ratio(whole["itl_ms"]["p99"], row["itl_ms"]["p99"]),
        "itl_max_ratio": ratio(whole["itl_ms"]["max"], row["itl_ms"]["max"]),
        "throughput_ratio": ratio(row["tok_s"], whole["tok_s"]),
    }
