"""Above the chapters: one workload, run up the rungs of the book, each rung one idea more.

Every rung has the same requests, the same memory budget and the same longest context, and must give the
tokens of the first, which recomputes everything and so cannot be stale. What may change is memory and time.

A request for n samples is n sequences. A memory that cannot share gets n requests instead, with the same
numbers drawn; so everything here is counted by sequence, in the order of the requests and their samples.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch

from minivllm.engine_args import EngineArgs
from minivllm.engine_parts import build_engine, build_manager
from minivllm.errors import InvalidOption, RequestTooLong
from minivllm.lab.bench.result import BenchResult, RequestRecord, device_name
from minivllm.lab.ladder_workload import default_budget
from minivllm.lab.record import Recorder, StepRecord, in_flight
from minivllm.lab.same_tokens import Comparison, compare_sampled, compare_tokens, verdict_of_many
from minivllm.lab.segments import label
from minivllm.lab.waste import Split, mean_split
from minivllm.lab.workload import WorkloadRequest
from minivllm.memory.manager import KVManager
from minivllm.memory.prefix_cache import PrefixCachingManager
from minivllm.memory.store import RecomputeStore
from minivllm.model.batch import Batch
from minivllm.model.decoder import Decoder
from minivllm.params import SamplingParams
from minivllm.scheduling.request import Request
from minivllm.scheduling.request_memory import RequestMemory

MAX_MODEL_LEN = 2048
MAX_NUM_BATCHED_TOKENS = 48  # of the chunked rung: a long prompt takes three or four steps
_PAGED = {"cache": "paged", "attention": "reference", "enforce_eager": True}
_STATIC = {**_PAGED, "scheduler": "static"}
_PREFIX = {**_PAGED, "sharing": True, "prefix_cache": "hash"}
_CHUNKED = {**_PREFIX, "scheduler": "chunked", "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS}


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
        ("paged", 3, {**_STATIC, "sharing": False}),
        ("sharing", 4, {**_STATIC, "sharing": True}),
        ("prefix", 5, {**_PREFIX, "scheduler": "static"}),
        ("continuous", 6, {**_PREFIX, "scheduler": "continuous"}),
        ("chunked", 7, _CHUNKED),
        ("triton", 8, {**_CHUNKED, "attention": "triton"}),
        ("graphs", 9, {**_CHUNKED, "attention": "triton", "enforce_eager": False}),
    )
}


@dataclass
class RungResult:
    """What one rung did. outputs: the tokens of each sequence.

    same_tokens: "(reference)", "yes", "yes, 1 tie", or "NO, ..." for the first sequence that differs.
    held_bytes, used_bytes: means over the steps. split: what was held, by what it was held for, summed over
    the steps. latency: figures as `BenchResult.summary` makes them. prefix_hit_rate: by tokens, of all
    prompts, each at its first admission; None without a prefix cache.
    """

    rung: Rung
    outputs: list[list[int]]
    records: list[StepRecord]
    split: Split
    num_preemptions: int
    latency: dict[str, Any]
    prefix_hit_rate: float | None = None
    same_tokens: str = ""

    @property
    def in_flight(self) -> list[int]:
        """Sequences that ran at once, step by step."""
        return [in_flight(record.step) for record in self.records]

    @property
    def computed(self) -> list[int]:
        """Tokens that the model computed, step by step."""
        return [sum(part.num_new_tokens for part in record.step.scheduled) for record in self.records]

    @property
    def num_copied_blocks(self) -> int:
        """Blocks that were copied before a write, since others read them too."""
        return sum(record.step.num_copied for record in self.records)

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
        """The step with the most sequences in flight; of several, the one with the most tokens in memory."""
        return max(self.records, key=lambda record: (in_flight(record.step), record.snapshot.used))

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
            "computed_tokens": sum(self.computed),
            "computed_tokens_step_most": max(self.computed),
            "prefix_hit_rate": self.prefix_hit_rate,
            "copied_blocks": self.num_copied_blocks,
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


def rungs_of(device: torch.device) -> tuple[str, ...]:
    """The rungs that a device can run: the last two need a GPU. (Triton's interpreter runs the first of them,
    by name.)"""
    return tuple(name for name, rung in RUNGS.items() if device.type == "cuda" or rung.chapter < 8)


def _is_named(rung: str, name: str) -> bool:
    return name in (rung, rung.split("-")[0])


def run_ladder(
    model: Decoder,
    requests: Sequence[WorkloadRequest],
    *,
    rungs: Sequence[str] | None = None,
    kv_cache_memory_bytes: int | None = None,
    max_model_len: int = MAX_MODEL_LEN,
    report: Callable[[str], None] = lambda doing: None,
) -> Iterator[RungResult]:
    """Yield each rung's result as soon as it is there; the first is what the others are compared with.

    rungs: by name; None means all that the model's device can run. All requests are there at the start, and
    go on past end-of-sequence tokens. Raises InvalidOption and RequestTooLong before anything runs.
    """
    if model.dtype not in (torch.float32, torch.float64):
        raise InvalidOption(f"dtype {model.dtype} rounds too much to compare tokens; use float32 or float64.")
    chosen = check_rungs(rungs_of(model.device) if rungs is None else rungs)
    max_model_len = min(max_model_len, model.config.max_position_embeddings)
    budget = kv_cache_memory_bytes or default_budget(model, requests)
    for number, request in enumerate(requests, start=1):
        length = len(request.token_ids) + request.max_tokens
        if length > max_model_len:
            raise RequestTooLong(
                f"Request {number} has {len(request.token_ids)} tokens and max_tokens="
                f"{request.max_tokens}: more than the {max_model_len} that a sequence may have here."
            )
    if RUNGS["graphs"] in chosen and model.device.type != "cuda":
        raise InvalidOption(f"The rung 'graphs' is not possible on {model.device}: CUDA graphs need a GPU.")
    for rung in chosen:  # refused now, not after minutes
        args = EngineArgs(**rung.options, kv_cache_memory_bytes=budget, max_model_len=max_model_len)
        _check_that_each_fits(rung, build_manager(model, args), args, requests)
    _warm_up(model, requests)
    first: RungResult | None = None
    for rung in chosen:
        args = EngineArgs(**rung.options, kv_cache_memory_bytes=budget, max_model_len=max_model_len)
        if args.attention == "triton":
            run_rung(model, rung, args, requests, report)  # not counted: it compiles the kernels
        result = run_rung(model, rung, args, requests, report)
        if first is None:
            first, result.same_tokens = result, "(reference)"
        else:
            report(f"{rung.name}: comparing tokens")
            result.same_tokens = compare_outputs(model, requests, first.outputs, result.outputs)
        yield result


def compare_outputs(
    model: Decoder,
    requests: Sequence[WorkloadRequest],
    expected: Sequence[Sequence[int]],
    got: Sequence[Sequence[int]],
) -> str:
    """Whether every sequence has the same tokens; ties are counted, and the first that differs is named."""
    which = [(number, i) for number, r in enumerate(requests) for i in range(r.n)]

    def compare(number: int, i: int, a: Sequence[int], b: Sequence[int]) -> Comparison:
        r = requests[number]
        if r.seed is None:
            return compare_tokens(model, r.token_ids, a, b)
        return compare_sampled(model, r.token_ids, a, b, r.temperature, Random(r.seed + i))

    return verdict_of_many(
        (compare(*place, a, b) for place, a, b in zip(which, expected, got, strict=True)),
        [label(number + i * 2**32) for number, i in which],
    )


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
    requests = _requests(workload, args.max_model_len, engine.scheduler.memory)
    for request in requests:
        engine.add(request)
    start, total, done = requests[0].metrics.arrival_time, sum(w.n * w.max_tokens for w in workload), 0
    while engine.has_unfinished():
        report(f"{rung.name}: {done} of {total} tokens")
        engine.step()
        done += recorder.records[-1].step.num_sampled
    for request in requests:
        request.metrics.arrival_time = 0.0
        request.metrics.token_times = [at - start for at in request.metrics.token_times]
    sequences = [(request, sequence) for request in requests for sequence in request.sequences]
    final = {s.seq_id: s.num_tokens - 1 for _, s in sequences}
    timed = [RequestRecord(len(r.prompt_token_ids), r.metrics) for r, _ in sequences]
    prefixes = engine.manager if isinstance(engine.manager, PrefixCachingManager) else None
    return RungResult(
        rung=rung,
        outputs=[s.output_token_ids for _, s in sequences],
        records=recorder.records,
        split=mean_split((record.snapshot for record in recorder.records), final),
        num_preemptions=sum(r.num_preemptions for r in requests),
        latency=BenchResult("minivllm", "", "", "", timed).summary(),
        prefix_hit_rate=prefixes.stats.token_hit_rate if prefixes else None,
    )


def _requests(
    workload: Sequence[WorkloadRequest], max_model_len: int | None, memory: RequestMemory
) -> list[Request]:
    """What an engine with this memory is given; sequences in the order of requests and samples."""
    requests = []
    for i, w in enumerate(workload):
        params = SamplingParams(
            n=w.n, temperature=w.temperature, seed=w.seed, max_tokens=w.max_tokens, ignore_eos=True
        )
        request = Request(i, w.token_ids, params, max_model_len=max_model_len)
        requests += [request] if memory.sharing is not None else request.split()
    return requests


def _check_that_each_fits(
    rung: Rung, manager: KVManager, args: EngineArgs, workload: Sequence[WorkloadRequest]
) -> None:
    memory = RequestMemory(manager)
    most = min(args.max_num_seqs, args.max_num_batched_tokens or args.max_num_seqs)
    requests = _requests(workload, args.max_model_len, memory)
    for request in sorted(requests, key=lambda request: -request.longest):
        if not memory.fits_ever(request):
            slots = manager.snapshot().num_slots
            raise RequestTooLong(
                f"The request {label(request.request_id)} may need {_tokens_of(request)} in memory, and with "
                f"{slots} slots the rung {rung.name!r} never holds so many for one. Give more memory "
                "(kv_cache_memory_bytes)."
            )
        if request.width > most:
            raise InvalidOption(
                f"n={request.width} is not possible on the rung {rung.name!r}: it runs at most {most} "
                "sequences in a step. Ask for fewer samples, or leave the rung out."
            )


def _tokens_of(request: Request) -> str:
    each = f"{request.longest} tokens"
    return each if request.width == 1 else f"{request.width} times {each}"


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
