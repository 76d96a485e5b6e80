"""Chapter 8: cases of paged attention in poisoned memory, for the tests of every kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minivllm import kernels
from minivllm.kernels import reference
from minivllm.memory.paged import num_blocks_for, slot_mapping
from minivllm.memory.paged_store import padded

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def pool_of_nan(num_blocks: int, heads: int, block_size: int, dim: int, dtype: torch.dtype) -> Tensor:
    """A pool of two layers, every number of it NaN: [num_blocks, layers, 2, heads, block_size, dim]."""
    return torch.full((num_blocks, 2, 2, heads, block_size, dim), float("nan"), dtype=dtype)


@dataclass
class Case:
    """Sequences in a poisoned pool, and queries to them."""

    k_cache: Tensor
    v_cache: Tensor
    q: Tensor
    tables: list[list[int]]
    lengths: list[int]
    queries: list[int]

    @classmethod
    def make(
        cls, block_size, group, dim, lengths, queries, dtype=torch.float32, kv_heads=2, shared=0, seed=0
    ):
        """Tables in shuffled order. The second sequence has `shared` full blocks of the first."""
        generator = torch.Generator().manual_seed(seed)
        counts = [num_blocks_for(n, block_size) for n in lengths]
        order = torch.randperm(sum(counts) + 2, generator=generator).tolist()
        tables = [[order.pop() for _ in range(c)] for c in counts]
        if shared:
            tables[1][:shared] = tables[0][:shared]
        pool = pool_of_nan(sum(counts) + 2, kv_heads, block_size, dim, dtype)
        slots_first = torch.full((len(pool), block_size, kv_heads + 1, dim), float("nan"), dtype=dtype)
        k_cache, v_cache = pool[:, 1, 0], slots_first.transpose(1, 2)[:, :kv_heads]  # strides of their own
        for table, n in zip(tables, lengths, strict=True):
            k, v = torch.randn(2, n, kv_heads, dim, generator=generator).to(dtype)
            slots = torch.tensor(slot_mapping(table, block_size, 0, n), dtype=torch.int64)
            reference.store_kv(k, v, k_cache, v_cache, slots)
        wide = torch.randn(sum(queries), 2 * kv_heads * group + 1, dim, generator=generator).to(dtype)
        return cls(k_cache, v_cache, wide[:, 1::2], tables, lengths, queries)  # strides of its own

    def run(
        self, module, out: Tensor | None = None, dtype: torch.dtype | None = None, hints: bool = False
    ) -> Tensor:
        starts = [0, *torch.tensor(self.queries).cumsum(0).tolist()]
        tables = padded([[*table, 0, 0] for table in self.tables], torch.device("cpu"))
        return module.paged_attention(
            *(t if dtype is None else t.to(dtype) for t in (self.q, self.k_cache, self.v_cache)),
            tables, torch.tensor(self.lengths, dtype=torch.int32), torch.tensor(starts, dtype=torch.int32),
            self.q.shape[-1] ** -0.5, out=out,
            max_query_len=max(self.queries) if hints else None,
            max_seq_len=max(self.lengths) if hints else None,
        )  # fmt: skip

    def check(self, name: str = "triton", hints: bool = False) -> Tensor:
        """A kernel on these numbers against the reference in float64; returns what the kernel gave."""
        tolerance, expected = TOLERANCE[self.q.dtype], self.run(reference, dtype=torch.float64)
        got = self.run(kernels.get(name), hints=hints)
        assert got.dtype == self.q.dtype
        torch.testing.assert_close(got.double(), expected, atol=tolerance, rtol=tolerance)
        return got


def check_far_apart(name: str) -> None:
    """Blocks and tokens beyond 2**31 numbers, as in a large model's pool. Untouched memory is never there."""
    stride = 2**29 + 48
    memory = torch.empty(4 * stride + 4096, dtype=torch.float16)
    cache = memory.as_strided((5, 2, 4, 16), (stride, 64, 16, 1))
    k, v = torch.randn(2, 6, 2, 16).half()
    slots = torch.tensor([16, 17, 18, 19, 4, 5])  # blocks 4 and 1
    values = memory[2048:].as_strided((5, 2, 4, 16), (stride, 64, 16, 1))
    kernels.get(name).store_kv(k, v, cache, values, slots)
    assert torch.equal(cache[4].transpose(0, 1), k[:4])
    assert torch.equal(values[4].transpose(0, 1), v[:4])
    q, out = (memory[n:].as_strided((3, 6, 16), (2**30 + 64, 16, 1)) for n in (1024, 3072))
    q.copy_(torch.randn(3, 6, 16))
    case = Case(cache, values, q, [[4, 1]], [6], [3])
    got = case.run(kernels.get(name), out)
    torch.testing.assert_close(got, case.run(reference), atol=2e-3, rtol=2e-3)


def well_formed(num_tokens: int = 3, heads: int = 4, dim: int = 16) -> dict[str, Tensor]:
    cache = torch.zeros(5, 2, 4, dim)
    return {
        "q": torch.zeros(num_tokens, heads, dim),
        "k_cache": cache,
        "v_cache": cache,
        "block_tables": torch.zeros(2, 2, dtype=torch.int32),
        "seq_lens": torch.ones(2, dtype=torch.int32),
        "query_start": torch.tensor([0, 1, num_tokens], dtype=torch.int32),
        "out": torch.zeros(num_tokens, heads, dim),
    }


MISFITS = {
    "heads": {"q": torch.zeros(3, 5, 16), "out": torch.zeros(3, 5, 16)},
    "head_dim": {"q": torch.zeros(3, 4, 8), "out": torch.zeros(3, 4, 8)},
    "v_cache": {"v_cache": torch.zeros(5, 2, 8, 16)},
    "out": {"out": torch.zeros(2, 4, 16)},
    "query_start": {"query_start": torch.tensor([0, 3], dtype=torch.int32)},
    "few tables": {"block_tables": torch.zeros(1, 2, dtype=torch.int32)},
    "float tables": {"block_tables": torch.zeros(2, 2)},
    "no sequence": {
        "block_tables": torch.zeros(0, 2, dtype=torch.int32),
        "seq_lens": torch.zeros(0, dtype=torch.int32),
        "query_start": torch.zeros(1, dtype=torch.int32),
    },
}
