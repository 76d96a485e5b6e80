"""Above the chapters: a step without a model, to see what the host does in it.

Engine, scheduler, memory's books, batches, sampling and texts are the real ones. The model gives the same
logits at once and the store is empty, so all that is left of a step is the host's.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from minivllm.engine import Engine
from minivllm.lab.prefix_cost import Stopwatch
from minivllm.llm_engine import LLMEngine
from minivllm.memory.prefix_cache import PrefixCachingManager
from minivllm.memory.sharing import SharingManager
from minivllm.model.paged_batches import PagedBatches
from minivllm.model.presets import PRESETS
from minivllm.model.tokenizer import ByteTokenizer
from minivllm.params import SamplingParams
from minivllm.scheduling.chunked import ChunkedScheduler

BLOCK_SIZE = 16
PROMPT_LEN = 64
MAX_STEPS = 400


class NoModel:
    """A decoder that computes nothing: every row of logits prefers the letter a."""

    def __init__(self) -> None:
        self.config = replace(PRESETS["tiny-llama"], vocab_size=256, max_position_embeddings=2**20)
        self.device, self.dtype = torch.device("cpu"), torch.float32
        self._row = torch.zeros(256).index_fill_(0, torch.tensor(ord("a")), 1)

    def __call__(self, batch: Any, store: Any) -> Tensor:
        """Logits [len(batch.logits_indices), 256]."""
        return self._row.expand(len(batch.logits_indices), -1)


class NoStore:
    """A memory without tensors."""

    keeps_kv = True

    def free(self, seq_id: int) -> None:
        """There is nothing to let go of."""


@dataclass(frozen=True)
class HostStep:
    """Microseconds of a step on this thread's own clock, medians of many, and of its parts.

    schedule: who computes what, and memory for it. batch: tokens, positions, block tables, slots. sample: for
    the most part PyTorch's. take: tokens, metrics, what has ended. text: tokens to text, and outputs.
    """

    step_us: float
    schedule_us: float
    batch_us: float
    sample_us: float
    take_us: float
    text_us: float


def still_engine(
    num_running: int, num_blocks: int, num_waiting: int = 0, prefix_cache: bool = False
) -> LLMEngine:
    """An engine in which so many requests decode, each with room to grow, and others wait."""
    kind = PrefixCachingManager if prefix_cache else SharingManager
    manager, model = kind(num_blocks, BLOCK_SIZE, bytes_per_token=1), NoModel()
    budget = num_running * (PROMPT_LEN + BLOCK_SIZE)
    scheduler = ChunkedScheduler(manager, num_running, max_num_batched_tokens=budget)
    parts: Any = model, manager, NoStore(), scheduler
    engine = Engine(*parts, pack=PagedBatches(manager, model.device))
    llm = LLMEngine(engine, ByteTokenizer(), model.config.max_position_embeddings)
    add_requests(llm, num_running + num_waiting)
    llm.step()
    assert (len(scheduler.running), len(scheduler.waiting)) == (num_running, num_waiting)
    return llm


def add_requests(llm: LLMEngine, n: int, temperature: float = 0, prompt_len: int = PROMPT_LEN) -> None:
    """Queue n requests that run for MAX_STEPS steps. Prompts differ in length, up to a block, so that not all
    sequences begin a block in the same step."""
    params = SamplingParams(temperature=temperature, max_tokens=MAX_STEPS, ignore_eos=True)
    for i in range(n):
        length = prompt_len + i % BLOCK_SIZE
        llm.add_request({"prompt_token_ids": [(7 * i + j) % 251 for j in range(length)]}, params)


def host_step(llm: LLMEngine, steps: int) -> HostStep:
    """What a step costs. Its outputs are made too, as for a caller of `step`."""
    engine = llm.engine
    inside = [(engine.scheduler, "schedule"), (engine, "pack"), (engine, "_sample"), (engine, "_take")]
    watches = [Stopwatch(owner, (name,), time.thread_time) for owner, name in inside]
    rows: list[list[float]] = []
    for _ in range(steps):
        before = [watch.seconds for watch in watches]
        start = time.thread_time()
        llm.step()
        step = time.thread_time() - start
        parts = [watch.seconds - seconds for watch, seconds in zip(watches, before, strict=True)]
        rows.append([step, *parts, step - sum(parts)])
    return HostStep(*(round(1e6 * statistics.median(column), 1) for column in zip(*rows, strict=True)))
