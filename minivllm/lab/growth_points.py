"""Above the chapters: decode steps of so many requests with so much context, timed, also on the host.

The context need not be computed: a request is told that all but the last token of its prompt is in memory,
where the pool has numbers of any kind. What the numbers are does not matter to time.
"""

from __future__ import annotations

import statistics
import time
from random import Random
from typing import TYPE_CHECKING, Any

from minivllm.lab.workload import ids_for
from minivllm.memory.paged import num_blocks_for

if TYPE_CHECKING:
    from torch import Tensor

    from minivllm.llm import LLM
    from minivllm.memory.store import KVStore
    from minivllm.model.batch import Batch


class ForwardWatch:
    """Stands in an engine for the model's forward pass, and adds up the seconds that it takes there."""

    def __init__(self, llm: LLM):
        engine = llm.engine
        self.forward, self._device = engine.forward or engine.model, engine.model.device
        self.seconds = 0.0
        engine.forward = self

    def __call__(self, batch: Batch, store: KVStore) -> Tensor:
        import torch

        start = time.perf_counter()
        logits = self.forward(batch, store)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.seconds += time.perf_counter() - start
        return logits


def blocks_needed(num_seqs: int, context: int, block_size: int) -> int:
    """Blocks that a point takes."""
    return num_seqs * num_blocks_for(context, block_size)


def fill_pool(llm: LLM, num_blocks: int) -> None:
    """Put numbers into the first blocks of the pool; so their pages are there, and none is NaN."""
    from minivllm.memory.paged_store import PagedStore

    store = llm.engine.store
    assert isinstance(store, PagedStore)
    pool = store.kv[:num_blocks]
    pool[:1].normal_()
    pool[1:] = pool[:1]


def decode_point(llm: LLM, num_seqs: int, context: int, num_steps: int = 5) -> dict[str, Any]:
    """Time decode steps of num_seqs requests, which in the end have `context` tokens each: a row of medians.

    One step before them is not counted. step_ms: a call of `LLM.step`. host_ms: what of it is not the
    forward pass: to plan, to pack, to sample, to make text. tok_s: output tokens per second. Needs a context
    of num_steps + 2 tokens at least, room in memory for all, and nothing else under way.
    """
    from minivllm.params import SamplingParams

    prompt_len = context - num_steps - 1  # the step that is not counted gives the first token
    params = SamplingParams(temperature=0, max_tokens=num_steps + 1, ignore_eos=True)
    ids, random = ids_for(llm.engine.model.config.vocab_size), Random(0)
    watch = ForwardWatch(llm)
    for _ in range(num_seqs):
        llm.add_request({"prompt_token_ids": random.choices(ids, k=prompt_len)}, params)
    for request in llm.engine.scheduler.waiting:
        request.first.num_computed_tokens = prompt_len - 1
    llm.step()
    steps, hosts = [], []
    for _ in range(num_steps):
        start, inside = time.perf_counter(), watch.seconds
        num_outputs = len(llm.step())
        seconds = time.perf_counter() - start
        assert num_outputs == num_seqs, "all take part in each step"
        steps.append(seconds)
        hosts.append(seconds - (watch.seconds - inside))
    assert not llm.has_unfinished_requests()
    llm.engine.forward = watch.forward
    step = statistics.median(steps)
    return {"step_ms": 1e3 * step, "host_ms": 1e3 * statistics.median(hosts), "tok_s": num_seqs / step}
