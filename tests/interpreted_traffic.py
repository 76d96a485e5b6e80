"""The bytes that the kernels load and store in the interpreter; `test_lab_kernel_traffic.py` runs this."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder

from minivllm import kernels
from minivllm.kernels import triton_attention, triton_split
from minivllm.lab.attention_work import Work
from minivllm.lab.kernel_traffic import STEPS, kernel_traffic
from minivllm.memory.paged import num_blocks_for
from minivllm.memory.paged_store import padded

BATCHES = {
    "decode": Work((19, 1, 33), (1, 1, 1), 6, 2, 20, 3, 4),
    "decode in float16": Work((90, 7, 64), (1, 1, 1), 2, 1, 48, 16, 2),
    "one long sequence": Work((150,), (1,), 3, 1, 16, 16, 4),
    "two queries": Work((70, 33), (2, 1), 2, 2, 16, 5, 4),
    "prefill": Work((13, 5), (13, 5), 3, 1, 24, 4, 4),
    "chunks with history": Work((21, 9, 12), (6, 1, 3), 4, 2, 16, 8, 2),
    "an empty sequence": Work((0, 6, 0), (1, 2, 3), 2, 1, 16, 4, 4),
    "a group of 20": Work((5, 9), (2, 1), 20, 1, 16, 2, 4),
}


class Counter:
    """Bytes loaded from and stored to each of these tensors, and to any other; operations of `tl.dot`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **watched: Tensor):
        self.watched = watched
        self.loaded = dict.fromkeys([*watched, "other"], 0)
        self.stored = dict(self.loaded)
        self.flops = 0
        load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
        dot = InterpreterBuilder.create_dot

        def counted_load(builder, pointers, mask, *rest):
            self._add(self.loaded, pointers, mask)
            return load(builder, pointers, mask, *rest)

        def counted_store(builder, pointers, value, mask, *rest):
            self._add(self.stored, pointers, mask)
            return store(builder, pointers, value, mask, *rest)

        def counted_dot(builder, a, b, *rest):
            self.flops += 2 * a.data.size * b.data.shape[-1]
            return dot(builder, a, b, *rest)

        monkeypatch.setattr(InterpreterBuilder, "create_masked_load", counted_load)
        monkeypatch.setattr(InterpreterBuilder, "create_masked_store", counted_store)
        monkeypatch.setattr(InterpreterBuilder, "create_dot", counted_dot)

    def _add(self, counts: dict[str, int], pointers, mask) -> None:
        asked = pointers.data[mask.data]  # addresses of what is not masked
        itemsize = pointers.get_element_ty().primitive_bitwidth // 8
        counts["other"] += itemsize * len(asked)
        for name, tensor in self.watched.items():
            first = tensor.data_ptr()
            inside = (asked >= first) & (asked < first + tensor.numel() * tensor.element_size())
            counts[name] += itemsize * int(inside.sum())
            counts["other"] -= itemsize * int(inside.sum())


def tensors(work: Work) -> dict[str, Tensor]:
    """What `paged_attention` takes, each in memory of its own; a block and a table entry more than needed."""
    dtype = {2: torch.float16, 4: torch.float32}[work.itemsize]
    counts = [num_blocks_for(n, work.block_size) for n in work.seq_lens]
    free = torch.randperm(sum(counts) + 1).tolist()
    cache = (len(free), work.num_kv_heads, work.block_size, work.head_dim)
    return {
        "q": torch.randn(work.num_tokens, work.num_heads, work.head_dim).to(dtype),
        "k_cache": torch.randn(cache).to(dtype),
        "v_cache": torch.randn(cache).to(dtype),
        "block_tables": padded([[*(free.pop() for _ in range(n)), 0] for n in counts], torch.device("cpu")),
        "seq_lens": torch.tensor(work.seq_lens, dtype=torch.int32),
        "query_start": torch.tensor([0, *work.query_lens]).cumsum(0).int(),
    }


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("batch", BATCHES)
def test_the_formula_is_what_the_kernel_loads_and_stores(monkeypatch, batch, name, num_splits):
    if num_splits > 1 and name != "triton":
        pytest.skip("only the last kernel splits")
    work, chosen = BATCHES[batch], []

    def choose(*sizes):
        chosen.append(sizes)
        return num_splits

    for module in (triton_attention, triton_split):
        monkeypatch.setattr(module, "choose_num_splits", choose)
    monkeypatch.setattr(triton_attention, "num_multiprocessors", lambda device: 9)
    given = tensors(work)
    out = torch.full_like(given["q"], float("nan"))
    counter = Counter(monkeypatch, out=out, **given)
    hints = {"max_query_len": max(work.query_lens), "max_seq_len": max(work.seq_lens)}
    kernels.get(name).paged_attention(*given.values(), 0.3, out=out, **hints)

    expected = kernel_traffic(name, work, num_multiprocessors=9)
    assert chosen[: len(chosen) // 2] == chosen[len(chosen) // 2 :], "both choose, from the same sizes"
    loaded, stored = counter.loaded, counter.stored
    assert out.isfinite().all()
    assert 2 * loaded["k_cache"] == 2 * loaded["v_cache"] == expected.kv
    assert loaded["q"] == expected.q
    assert loaded["block_tables"] == expected.tables
    assert loaded["other"] == expected.parts_read
    assert stored["out"] == expected.out
    assert stored["other"] == expected.parts_written
    assert sum(stored.values()) == expected.out + expected.parts_written
    if name in ("triton-grouped", "triton"):
        assert counter.flops == expected.flops
