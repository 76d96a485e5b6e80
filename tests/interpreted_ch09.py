"""Chapter 9: decode steps of the Triton path on a tape of operations, in the interpreter;
`test_ch09_graphs.py` runs it."""

from __future__ import annotations

import pytest
import torch
from taping import Recorder

from minivllm.kernels import triton_attention, triton_split, triton_store
from minivllm.memory.paged import PagedManager
from minivllm.memory.paged_store import PagedBatch, PagedStore
from minivllm.model.batch import Batch
from minivllm.model.graphs import DecodeGraphs
from minivllm.model.loader import load_model

KERNELS = (
    (triton_attention, "paged_attention_kernel"),
    (triton_split, "combine_kernel"),
    (triton_store, "store_kv_kernel"),
)


@pytest.mark.parametrize("num_splits", [1, 3])
def test_a_replay_gives_the_logits_of_a_fresh_run(monkeypatch, num_splits):
    """Recorded with nothing in it, replayed at lengths that need one block and several."""
    monkeypatch.setattr(triton_attention, "choose_num_splits", lambda *sizes: num_splits)
    model = load_model("random:tiny-qwen2", dtype="float32", device="cpu", seed=2)
    manager = PagedManager(12, 5, 1)
    plain, store = (PagedStore(model.config, 12, 5, attention="triton") for _ in range(2))
    for pool in (plain, store):
        pool.kv.fill_(float("nan"))
    recorder = Recorder(monkeypatch, KERNELS)
    graphs = DecodeGraphs(model, store, 3, 12, recorder)
    assert store.kv.isnan().all()
    assert len(recorder.tapes) == 3
    steps = [
        [(0, [5, 6, 7, 8], 0)],
        [(1, [9, 10, 11, 12, 13, 14, 15, 16, 17], 0)],
        [(1, [18], 9), (0, [19], 4)],
        [(2, [20], 0), (0, [21], 5), (1, [22], 10)],
        [(2, [23], 1)],
        [(0, [24], 6), (2, [25], 2)],
    ]
    for new in steps:
        for seq_id, tokens, computed in new:
            manager.allocate(seq_id, computed + len(tokens))
        batch = PagedBatch.place(Batch.pack(new), manager)
        with torch.inference_mode():
            expected, got = model(batch, plain), graphs(batch, store)
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
        assert torch.equal(plain.kv.isnan(), store.kv.isnan())
    assert recorder.num_replays == 4
