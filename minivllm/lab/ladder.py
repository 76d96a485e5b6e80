"""Above the chapters: one workload, run up the rungs of the book, each rung one idea more.

Every rung has the same requests, the same memory budget and the same longest context, and must give the
tokens of the first, which recomputes everything and so cannot be stale. What may change is memory and time.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from minivllm.engine_args import EngineArgs, build_engine, build_manager
from minivllm.errors import InvalidOption, RequestTooLong
from minivllm.lab.bench.result import BenchResult, RequestRecord, device_name
from minivllm.lab.ladder_workload import default_budget
from minivllm.lab.record import Recorder, StepRecord
from minivllm.lab.same_tokens import compare_tokens, verdict_of_many
from minivllm.lab.waste import Split, mean_split
from minivllm.lab.workload import WorkloadRequest
from minivllm.memory.manager import KVManager
from minivllm.memory.store import RecomputeStore
from minivllm.model.batch import Batch
from minivllm.model.decoder import Decoder
from minivllm.params import SamplingParams
from minivllm.scheduling.request import Request

MAX_MODEL_LEN = 2048


@dataclass(frozen=True)
class Rung:
    """One idea of the book: a name, its chapter, and the engine options that stand for it."""

    name: str
    chapter: int
    options: Mapping[str, Any]


RUNGS = {
    name: Rung(name, chapter, options)
    for name, chapter, options in (
        ("recompute", 0, {"cache": "recompute", "scheduler": "static"}),
        ("naive", 1, {"cache": "naive", "scheduler": "static"}),
        ("contiguous-max", 2, {"cache": "contiguous", "scheduler": "static", "reservation": "max"}),
        ("contiguous-pow2", 2, {"cache": "contiguous", "scheduler": "static", "reservation": "pow2"}),
        ("contiguous-oracle", 2, {"cache": "contiguous", "scheduler": "static", "reservation": "oracle"}),
        ("paged", 3, {"cache": "paged", "scheduler": "static"}),
        ("continuous", 6, {"cache": "paged", "scheduler": "continuous"}),
    )
}


@dataclass
class RungResult:
    """What one rung did.

    same_tokens: "(reference)", "yes", "yes, 1 tie", or "NO, ..." for the first request that differs.
    held_bytes, used_bytes: means over the steps. split: what was held, by what it was held for, summed over
    the steps. latency: figures as `BenchResult.summary` makes them.
    """

    rung: Rung
    outputs: list[list[int]]
    records: list[StepRecord]
    split: Split
    num_preemptions: int
    latency: dict[str, Any]
    same_tokens: str = ""

    @property
    def in_flight(self) -> list[int]:
        """Requests that ran at once, step by step."""
        return [len(record.step.scheduled) for record in self.records]

    @property
    def held_bytes(self) -> float:
        """Bytes held, the mean over the steps."""
        return sum(r.snapshot.held_bytes for r in self.records) / len(self.records)

    @property
    def used_bytes(self) -> float:
        """Bytes with a token in them, the mean over the steps."""
        return sum(r.snapshot.used_bytes for r in self.records) / len(self.records)

    @property
    def fullest(self) -> StepRecord:
        """The step with the most requests in flight; of several, the one with the most tokens in memory."""
        return max(self.records, key=lambda record: (len(record.step.scheduled), record.snapshot.used))

    def to_json(self) -> dict[str, Any]:
        """The figures and the tokens as plain values."""
        return {
            "name": self.rung.name,
            "chapter": self.rung.chapter,
            "options": dict(self.rung.options),
            "same_tokens": self.same_tokens,
            "kv_held_bytes": round(self.held_bytes),
            "kv_used_bytes": round(self.used_bytes),
            "utilisation": self.split.share("used"),
            "reserved_for_later": self.split.share("reserved"),
            "internal_waste": self.split.share("waste"),
            "in_flight_mean": sum(self.in_flight) / len(self.in_flight),
            "in_flight_most": max(self.in_flight),
            "steps": len(self.records),
            "preemptions": self.num_preemptions,
            **{key: self.latency[key] for key in ("output_tokens", "seconds", "tok_s")},
            **{key: self.latency[key] for key in ("ttft_ms", "tpot_ms", "itl_ms")},
            "token_ids": self.outputs,
        }


def check_rungs(names: Sequence[str]) -> list[Rung]:
    """The rungs of these names in the book's order; "contiguous" means all its policies.

    Raises InvalidOption.
    """
    for name in names:
        if not any(_is_named(rung, name) for rung in RUNGS):
            raise InvalidOption(f"There is no rung {name!r}; the rungs are {', '.join(RUNGS)}.")
    return [rung for rung in RUNGS.values() if any(_is_named(rung.name, name) for name in names)]


def _is_named(rung: str, name: str) -> bool:
    return name in (rung, rung.split("-")[0])


def run_ladder(
    model: Decoder,
    requests: Sequence[WorkloadRequest],
    *,
    rungs: Sequence[str] = tuple(RUNGS),
    kv_cache_memory_bytes: int | None = None,
    max_model_len: int = MAX_MODEL_LEN,
    report: Callable[[str], None] = lambda doing: None,
) -> Iterator[RungResult]:
    """Yield each rung's result as soon as it is there; the first is what the others are compared with.

    All requests are there at the start; greedy, past end-of-sequence tokens. Raises InvalidOption and
    RequestTooLong before anything runs.
    """
    if model.dtype not in (torch.float32, torch.float64):
        raise InvalidOption(f"dtype {model.dtype} rounds too much to compare tokens; use float32 or float64.")
    chosen = check_rungs(rungs)
    max_model_len = min(max_model_len, model.config.max_position_embeddings)
    budget = kv_cache_memory_bytes or default_budget(model, requests)
    for number, request in enumerate(requests, start=1):
        length = len(request.token_ids) + request.max_tokens
        if length > max_model_len:
            raise RequestTooLong(
                f"Request {number} has {len(request.token_ids)} tokens and max_tokens="
                f"{request.max_tokens}: more than the {max_model_len} that a sequence may have here."
            )
    for rung in chosen:  # refused now, not after minutes
        args = EngineArgs(**rung.options, kv_cache_memory_bytes=budget, max_model_len=max_model_len)
        _check_that_each_fits(rung, build_manager(model, args), requests)
    _warm_up(model, requests)
    first: RungResult | None = None
    for rung in chosen:
        args = EngineArgs(**rung.options, kv_cache_memory_bytes=budget, max_model_len=max_model_len)
        result = run_rung(model, rung, args, requests, report)
        if first is None:
            first, result.same_tokens = result, "(reference)"
        else:
            report(f"{rung.name}: comparing tokens")
            pairs = zip(requests, first.outputs, result.outputs, strict=True)
            result.same_tokens = verdict_of_many(
                compare_tokens(model, r.token_ids, expected, got) for r, expected, got in pairs
            )
        yield result


def run_rung(
    model: Decoder,
    rung: Rung,
    args: EngineArgs,
    workload: Sequence[WorkloadRequest],
    report: Callable[[str], None] = lambda doing: None,
) -> RungResult:
    """Run a workload, all requests at once, on an engine with these options, and keep what it did."""
    engine = build_engine(model, args)
    recorder = engine.on_step = Recorder(engine.manager)
    requests = [
        Request(
            i,
            w.token_ids,
            SamplingParams(temperature=0, max_tokens=w.max_tokens, ignore_eos=True),
            max_model_len=args.max_model_len,
        )
        for i, w in enumerate(workload)
    ]
    for request in requests:
        engine.add(request)
    start, total, done = requests[0].metrics.arrival_time, sum(r.max_tokens for r in requests), 0
    while engine.has_unfinished():
        report(f"{rung.name}: {done} of {total} tokens")
        done += len(engine.step())
    final = {r.request_id: r.num_tokens - 1 for r in requests}
    for request in requests:
        request.metrics.arrival_time = 0.0
        request.metrics.token_times = [at - start for at in request.metrics.token_times]
    timed = [RequestRecord(len(r.prompt_token_ids), r.metrics) for r in requests]
    return RungResult(
        rung=rung,
        outputs=[r.output_token_ids for r in requests],
        records=recorder.records,
        split=mean_split((record.snapshot for record in recorder.records), final),
        num_preemptions=sum(r.num_preemptions for r in requests),
        latency=BenchResult("minivllm", "", "", "", timed).summary(),
    )


def _check_that_each_fits(rung: Rung, manager: KVManager, requests: Sequence[WorkloadRequest]) -> None:
    longest = max(len(r.token_ids) + r.max_tokens - 1 for r in requests)
    if not manager.fits_ever(longest):
        slots = manager.snapshot().num_slots
        raise RequestTooLong(
            f"The longest request may need {longest} tokens in memory, and with {slots} slots the rung "
            f"{rung.name!r} never holds so many for one. Give more memory (kv_cache_memory_bytes)."
        )


@torch.inference_mode()
def _warm_up(model: Decoder, requests: Sequence[WorkloadRequest]) -> None:
    """One step that is not counted: the first is slow, whatever it computes."""
    model(Batch.pack([(0, requests[0].token_ids, 0)], model.device), RecomputeStore())


def about(model: Decoder, name: str) -> dict[str, str]:
    """What a measurement must say of itself: model, dtype, device, versions, date."""
    return {
        "model": name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": device_name(model.device),
        "versions": f"torch {torch.__version__}, Python {platform.python_version()}",
        "date": time.strftime("%Y-%m-%d"),
    }
