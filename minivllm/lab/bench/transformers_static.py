"""Above the chapters: the transformers library's generate(), in static batches.

Prompts of a batch are padded on the left to the longest, and the batch runs until its longest answer
ends. A request's tokens beyond its own max_tokens are computed and thrown away: that is the waste to be
measured. A token's time is when it was computed, though generate() hands out nothing before the end.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

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

ENGINE = "transformers"
WARMUP_TOKENS = 4


def run(requests: Sequence[WorkloadRequest], options: BenchOptions, report: Report) -> BenchResult:
    """Run the workload in batches of max_num_seqs, in its order, greedily, past end-of-sequence tokens.

    Raises InvalidOption, InvalidPrompt, RequestTooLong and InvalidModel.
    """
    refuse_arrivals(ENGINE, requests)
    source, config, dtype, device = resolve_options(options)
    prompts = encode_prompts(requests, source, config)
    model = load_hf_model(source, dtype, device)
    _generate(model, [prompts[0][:8]], min(WARMUP_TOKENS, requests[0].max_tokens), lambda: None)

    wanted, total = [r.max_tokens for r in requests], sum(r.max_tokens for r in requests)
    records, size, done = new_records(prompts), options.batch_size, 0
    forget_peak(device)
    start = time.perf_counter()
    for first in range(0, len(requests), size):
        part = slice(first, first + size)

        def came(part: slice = part) -> None:
            nonlocal done
            now = time.perf_counter() - start
            for record, most in zip(records[part], wanted[part], strict=True):
                if len(record.metrics.token_times) < most:
                    record.metrics.token_times.append(now)
                    done += 1
            report(done, total)

        rows = _generate(model, prompts[part], max(wanted[part]), came)
        for record, most, row in zip(records[part], wanted[part], rows, strict=True):
            record.token_ids = row[:most]
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


class _Steps:
    """A streamer: generate() calls it with the prompts, then with the new tokens of each step, on the CPU."""

    def __init__(self, came: Any) -> None:
        self._came, self._prompt_seen = came, False

    def put(self, value: object) -> None:
        """Take what generate() hands over: first the prompts, then each step's tokens."""
        if self._prompt_seen:
            self._came()
        self._prompt_seen = True

    def end(self) -> None:
        """Nothing is kept."""


def _generate(model: Any, prompts: Sequence[list[int]], steps: int, came: Any) -> list[list[int]]:
    """Exactly `steps` new tokens for each prompt; `came` is called after each step."""
    import torch

    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    with torch.inference_mode():
        rows = model.generate(ids, attention_mask=mask, max_new_tokens=steps, streamer=_Steps(came))
    return rows[:, width:].tolist()
