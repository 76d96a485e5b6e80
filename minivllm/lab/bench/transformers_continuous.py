"""Above the chapters: the transformers library's continuous batching.

Its manager computes in a thread of its own and stamps each token there. Outputs are streamed, and the
newest stamp is taken from each: a request that loses its memory begins a new list of stamps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

from minivllm.errors import InvalidOption, MinivllmError
from minivllm.lab.bench.hf_model import load_hf_model
from minivllm.lab.bench.options import (
    BenchOptions,
    Report,
    encode_prompts,
    refuse_arrivals,
    resolve_options,
)
from minivllm.lab.bench.result import BenchResult, device_name, forget_peak, new_records, peak_memory
from minivllm.lab.workload import WorkloadRequest
from minivllm.model.config import ModelConfig

ENGINE = "transformers-continuous"
PAGE_SIZE = 256  # that library's own default: tokens in a page
NO_EOS = -1  # what its manager takes for "never stop"
STOP_SECONDS = 60.0
WARMUP_TOKENS = 4


def run(requests: Sequence[WorkloadRequest], options: BenchOptions, report: Report) -> BenchResult:
    """Run the workload, all requests at once, greedily, past end-of-sequence tokens, without prefix sharing.

    block_size is the library's page_size (block_size in its version 5.17). Raises InvalidOption,
    InvalidPrompt, RequestTooLong, InvalidModel, and MinivllmError with what stopped the library's thread.
    """
    import torch
    from transformers import GenerationConfig
    from transformers.generation import ContinuousBatchingConfig

    refuse_arrivals(ENGINE, requests)
    source, config, dtype, device = resolve_options(options)
    prompts = encode_prompts(requests, source, config)
    longest = max(len(p) + r.max_tokens for p, r in zip(prompts, requests, strict=True))
    page = "page_size" if "page_size" in signature(ContinuousBatchingConfig).parameters else "block_size"
    size: dict[str, Any] = {page: options.block_size or PAGE_SIZE}
    batching = ContinuousBatchingConfig(
        **size,
        num_blocks=_num_blocks(options, config, dtype.itemsize, longest, device.type),
        max_requests_per_batch=options.batch_size,
        allow_block_sharing=False,
    )
    model = load_hf_model(source, dtype, device)
    greedy = GenerationConfig(do_sample=False, max_new_tokens=WARMUP_TOKENS, eos_token_id=NO_EOS)
    records, total, done = new_records(prompts), sum(r.max_tokens for r in requests), 0
    start = 0.0

    def came(output: Any) -> None:
        nonlocal done
        record = records[int(output.request_id)]
        record.token_ids = list(output.generated_tokens)
        record.metrics.token_times.append(output.timestamps[-1] - start)
        done += 1
        report(done, total)

    with torch.inference_mode():
        manager = model.init_continuous_batching(
            generation_config=greedy, continuous_batching_config=batching
        )
        try:
            manager.start()
            _follow(manager, [prompts[0][:8]], [min(WARMUP_TOKENS, requests[0].max_tokens)], lambda _: None)
            forget_peak(device)
            start = time.perf_counter()
            _follow(manager, prompts, [r.max_tokens for r in requests], came)
        finally:
            manager.stop(block=True, timeout=STOP_SECONDS, hard_stop=True)
    return BenchResult(
        ENGINE,
        options.model,
        str(dtype).removeprefix("torch."),
        device_name(device),
        records,
        library="transformers",
        options={**options.chosen, "max_num_seqs": options.batch_size},
        **peak_memory(device),
    )


def _num_blocks(
    options: BenchOptions, config: ModelConfig, itemsize: int, longest: int, device: str
) -> int | None:
    """Blocks of a page in every layer: num_blocks, or what the budget holds. Where neither is set: on CUDA
    None, which leaves it to the library; on a CPU, where the library would fill 60 % of the free memory with
    zeros, as many as max_num_seqs of the longest request need."""
    page = options.block_size or PAGE_SIZE
    if options.num_blocks is not None:
        return options.num_blocks
    if options.kv_cache_memory_bytes is None:
        return None if device == "cuda" else options.batch_size * -(-longest // page)
    block_bytes = config.kv_elements_per_token * itemsize * page
    if options.kv_cache_memory_bytes < block_bytes:
        raise InvalidOption(
            f"kv_cache_memory_bytes={options.kv_cache_memory_bytes} is not possible: it must be at least "
            f"{block_bytes}, one block of this engine. Give more, or a smaller block_size."
        )
    return options.kv_cache_memory_bytes // block_bytes


def _follow(
    manager: Any, prompts: Sequence[list[int]], wanted: Sequence[int], came: Callable[[Any], None]
) -> None:
    """Hand requests to the manager, named 0, 1, ..., and call `came` for each new token until the last."""
    for number, (prompt, most) in enumerate(zip(prompts, wanted, strict=True)):
        manager.add_request(
            prompt,
            request_id=str(number),
            max_new_tokens=most,
            streaming=True,
            record_timestamps=True,
            eos_token_id=NO_EOS,
        )
    left = len(prompts)
    while left:
        output = manager.get_result(timeout=1)
        if output is None:
            if not manager.is_running():
                raise MinivllmError(_why(getattr(manager.background_thread_status, "fatal_error", None)))
            continue
        if output.error is not None:
            raise MinivllmError(_why(output.error))
        came(output)
        left -= output.is_finished()


def _why(error: object) -> str:
    return (
        f"The transformers library's continuous batching stopped early: {error or 'it gave no reason'}. "
        "More memory (kv_cache_memory_bytes) or fewer requests at once (max_num_seqs) may help."
    )
