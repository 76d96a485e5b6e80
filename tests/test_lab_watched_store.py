"""A store under watch: the bytes that joining copies and holds are those that the formulas give."""

from __future__ import annotations

import pytest
import torch

from minivllm.decoding.greedy import greedy
from minivllm.lab.watched_store import WatchedStore
from minivllm.memory.naive_store import NaiveStore
from minivllm.memory.size import bytes_per_token, copied_by_joining
from minivllm.memory.store import RecomputeStore
from minivllm.model.batch import Batch
from minivllm.model.loader import load_model


@pytest.fixture(scope="module", params=["tiny-llama", "tiny-qwen3"])
def tiny(request):
    return load_model(f"random:{request.param}", dtype="float32", device="cpu", seed=3)


@pytest.mark.parametrize(("prompt_len", "output_len"), [(1, 9), (13, 6), (30, 2)])
def test_what_is_copied_and_held_is_what_the_formulas_say(tiny, prompt_len, output_len):
    store, size = WatchedStore(NaiveStore()), bytes_per_token(tiny)
    plain = greedy(tiny, NaiveStore(), range(1, prompt_len + 1), output_len)
    assert greedy(tiny, store, range(1, prompt_len + 1), output_len) == plain
    n = prompt_len + output_len - 1
    assert store.copied_bytes == copied_by_joining(prompt_len, output_len) * size
    assert store.most_bytes == n * size + (n - 1) * size // tiny.config.num_hidden_layers


def test_a_store_that_joins_nothing_copies_nothing_and_what_is_freed_is_not_kept_alive(tiny):
    watched = WatchedStore(RecomputeStore())
    greedy(tiny, watched, [1, 2, 3], 4)
    assert (watched.keeps_kv, watched.copied_bytes, watched.most_bytes) == (False, 0, 0)
    store = NaiveStore()
    watched = WatchedStore(store)
    with torch.inference_mode():
        for seq_id, lengths in ((1, (20, 1)), (2, (5, 1))):
            computed = 0
            for n in lengths:
                tiny(Batch.pack([(seq_id, [7] * n, computed)]), watched)
                computed += n
            most = watched.most_bytes
            watched.free(seq_id)
    assert store.num_bytes() == 0
    assert most == watched.most_bytes, "the second sequence is the shorter one"
