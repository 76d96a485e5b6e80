"""Above the chapters: sequences in paged memory with random contents, and queries to them, for any kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import ModuleType

import torch
from torch import Tensor

from minivllm.kernels import reference
from minivllm.memory.paged import num_blocks_for, slot_mapping
from minivllm.memory.paged_store import padded

SPARE_BLOCKS = 2


@dataclass(frozen=True)
class PagedCase:
    """What `paged_attention` is called with; lengths and queries are those of the sequences, on the host."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    query_start: Tensor
    lengths: tuple[int, ...]
    queries: tuple[int, ...]

    @classmethod
    def make(
        cls,
        heads: tuple[int, int, int],
        block_size: int,
        lengths: Sequence[int],
        queries: Sequence[int],
        dtype: torch.dtype,
        device: str,
        *,
        layers: int = 2,
        poisoned: bool = False,
        seed: int = 0,
    ) -> PagedCase:
        """Blocks in random order in a pool of so many layers, of which the last is used.

        heads: query heads, key/value heads, head_dim. poisoned: every slot without a token is NaN.
        """
        num_heads, kv_heads, head_dim = heads
        counts = [num_blocks_for(n, block_size) for n in lengths]
        order = torch.randperm(sum(counts) + SPARE_BLOCKS, generator=torch.Generator().manual_seed(seed))
        tables = [part.tolist() for part in order[: sum(counts)].split(counts)]
        shape = (len(order), layers, 2, kv_heads, block_size, head_dim)
        pool = torch.empty(shape, dtype=dtype, device=device)
        generator = torch.Generator(device).manual_seed(seed)
        k_cache, v_cache = pool[:, -1, 0], pool[:, -1, 1]
        if poisoned:
            pool.fill_(float("nan"))
            for table, n in zip(tables, lengths, strict=True):
                kv = torch.randn(2, n, kv_heads, head_dim, generator=generator, device=device).to(dtype)
                slots = torch.tensor(slot_mapping(table, block_size, 0, n), dtype=torch.int64, device=device)
                reference.store_kv(kv[0], kv[1], k_cache, v_cache, slots)
        else:
            k_cache.normal_(generator=generator)
            v_cache.normal_(generator=generator)
        q = torch.randn(sum(queries), num_heads, head_dim, generator=generator, device=device).to(dtype)
        starts = [0, *torch.tensor(queries).cumsum(0).tolist()]
        return cls(
            q,
            k_cache,
            v_cache,
            padded(tables, torch.device(device)),
            torch.tensor(lengths, dtype=torch.int32, device=device),
            torch.tensor(starts, dtype=torch.int32, device=device),
            tuple(lengths),
            tuple(queries),
        )

    def run(self, kernels: ModuleType) -> Tensor:
        """paged_attention of these kernels."""
        return kernels.paged_attention(
            self.q, self.k_cache, self.v_cache, self.block_tables, self.seq_lens, self.query_start,
            self.q.shape[-1] ** -0.5, max_query_len=max(self.queries), max_seq_len=max(self.lengths),
        )  # fmt: skip

    def exact(self) -> Tensor:
        """What is right: the reference in float64."""
        q, k_cache, v_cache = (tensor.double() for tensor in (self.q, self.k_cache, self.v_cache))
        return replace(self, q=q, k_cache=k_cache, v_cache=v_cache).run(reference)

    def first(self, n: int) -> PagedCase:
        """The first n sequences alone, in a pool that has their blocks and no others."""
        block_size = self.k_cache.shape[2]
        counts = [num_blocks_for(length, block_size) for length in self.lengths[:n]]
        blocks = torch.cat([self.block_tables[i, :count] for i, count in enumerate(counts)]).long()
        tables = [part.tolist() for part in torch.arange(sum(counts)).split(counts)]
        return PagedCase(
            self.q[: sum(self.queries[:n])],
            self.k_cache[blocks],
            self.v_cache[blocks],
            padded(tables, self.q.device),
            self.seq_lens[:n],
            self.query_start[: n + 1],
            self.lengths[:n],
            self.queries[:n],
        )


def error_of(out: Tensor, exact: Tensor) -> float:
    """The largest distance of a token's output from the right one, by the size of that; NaN is infinite.

    Over the heads of a token together, in the Euclidean norm. Where the right one is zero, the distance.
    """
    off = (out.double() - exact.double()).flatten(1).norm(dim=1)
    size = exact.double().flatten(1).norm(dim=1)
    return (off / size.where(size > 0, 1.0)).nan_to_num(nan=float("inf")).max().item()


def bound_of(dtype: torch.dtype, torch_error: float) -> float:
    """The largest error that is still rounding: 8 times what the reference has in this dtype on the same
    numbers, or 8 times the dtype's rounding where that is more. A forgotten key costs more than that in half
    precision up to a thousand keys, and in float32 always."""
    return 8 * max(torch_error, torch.finfo(dtype).eps / 2)
