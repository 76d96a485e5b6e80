"""Above the chapters: the time of one step: of one more token with one memory, or of any work at all."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from minivllm.memory.naive_store import NaiveStore
from minivllm.memory.store import KVStore
from minivllm.model.batch import Batch
from minivllm.model.decoder import Decoder


@torch.inference_mode()
def time_step(
    model: Decoder, make_store: Callable[[], KVStore], prompt: Sequence[int], length: int, repeats: int = 3
) -> float:
    """Seconds to go on from `length` tokens by one: the median of a few steps at length, length + 1, ...

    A memory that keeps KV has all but the last token already. The tokens are those of prompt, repeated:
    which they are does not matter.
    """
    tokens = [prompt[i % len(prompt)] for i in range(length + repeats - 1)]
    store, num_computed = make_store(), 0
    if store.keeps_kv and length > 1:
        num_computed = length - 1
        model(Batch.pack([(0, tokens[:num_computed], 0)], model.device), store)
    seconds = []
    for end in range(length, length + repeats):
        start = time.perf_counter()
        logits = model(Batch.pack([(0, tokens[num_computed:end], num_computed)], model.device), store)
        logits.argmax().item()  # waits for the device
        seconds.append(time.perf_counter() - start)
        num_computed = end if store.keeps_kv else 0
    return statistics.median(seconds)


@torch.inference_mode()
def time_work(model: Decoder, work: Sequence[tuple[int, int]], repeats: int = 3) -> float:
    """Seconds of one step with this work: (new tokens, tokens already in memory) of each sequence.

    The median of some steps after one that is not counted. Memory is the naive kind; a sequence that has
    tokens in it grows a little with every step. All tokens are token 5: which they are does not matter.
    """
    store = NaiveStore()
    lengths = [computed for _, computed in work]
    for seq_id, computed in enumerate(lengths):
        if computed:
            model(Batch.pack([(seq_id, [5] * computed, 0)], model.device), store)
    seconds = []
    for _ in range(repeats + 1):
        step = [(i, [5] * new, lengths[i]) for i, (new, _) in enumerate(work)]
        start = time.perf_counter()
        model(Batch.pack(step, model.device), store).argmax().item()  # waits for the device
        seconds.append(time.perf_counter() - start)
        for i, (new, computed) in enumerate(work):
            if computed:
                lengths[i] += new
            else:
                store.free(i)
    return statistics.median(seconds[1:])
