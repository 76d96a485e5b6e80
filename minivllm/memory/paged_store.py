"""Chapter 3: the tensor half of paged memory: one pool tensor, made once.

kv[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]: a block is one contiguous page with all
its layers, so that copying or swapping it is one copy, and one head's slots in a block are contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minivllm import kernels
from minivllm.memory.paged import PagedManager, slot_mapping
from minivllm.model.batch import Batch
from minivllm.model.config import ModelConfig


@dataclass(frozen=True)
class PagedBatch(Batch):
    """A batch that also says where its tokens lie.

    slot_mapping [num_tokens] int64, the slot that each new token is written to; block_tables [num_seqs,
    max_blocks] int32, padded with 0.
    """

    slot_mapping: Tensor
    block_tables: Tensor

    @classmethod
    def place(cls, batch: Batch, manager: PagedManager) -> PagedBatch:
        """The batch with the places that the manager has allocated for its sequences."""
        slots: list[int] = []
        tables: list[list[int]] = []
        for seq_id, start, end, seq_len in batch:
            table = manager.block_table(seq_id)
            slots += slot_mapping(table, manager.block_size, seq_len - (end - start), seq_len)
            tables.append(table)
        device = batch.token_ids.device
        fields = {name: getattr(batch, name) for name in Batch.__dataclass_fields__}
        return cls(
            **fields,
            slot_mapping=torch.tensor(slots, dtype=torch.int64, device=device),
            block_tables=padded(tables, device),
        )


def padded(tables: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Block tables of any lengths as one int32 tensor, filled up with 0."""
    width = max((len(table) for table in tables), default=0)
    rows = [[*table, *[0] * (width - len(table))] for table in tables]
    return torch.tensor(rows, dtype=torch.int32, device=device).view(len(tables), width)


class PagedStore:
    """The pool. Nothing ever clears a block: what an earlier sequence left there is not read."""

    keeps_kv = True

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        attention: str = "reference",
    ):
        shape = (
            num_blocks,
            config.num_hidden_layers,
            2,
            config.num_key_value_heads,
            block_size,
            config.head_dim,
        )
        self.kv = torch.empty(shape, dtype=dtype, device=device)
        self._caches = [(self.kv[:, layer, 0], self.kv[:, layer, 1]) for layer in range(shape[1])]  # views
        self._kernels = kernels.get(attention)
        self._plan: tuple[Batch | None, dict[str, Any]] = None, {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        """Write the new keys and values into their slots, then attend through the block tables."""
        if not isinstance(batch, PagedBatch):
            raise TypeError("Paged memory needs a PagedBatch: PagedBatch.place(batch, manager).")
        if layer == 0 or self._plan[0] is not batch:
            self._plan = batch, self._prepare(batch)
        plan = self._plan[1]
        k_cache, v_cache = self._caches[layer]
        self._kernels.store_kv(k, v, k_cache, v_cache, batch.slot_mapping, **plan)
        scale = q.shape[-1] ** -0.5
        tables, lengths, starts = batch.block_tables, batch.seq_lens, batch.query_start
        return self._kernels.paged_attention(q, k_cache, v_cache, tables, lengths, starts, scale, **plan)

    def _prepare(self, batch: PagedBatch) -> dict[str, Any]:
        """What kernels can work out once for all layers of a step, as an argument for them; {} for others."""
        if not hasattr(self._kernels, "prepare"):
            return {}
        tables, lengths, starts = batch.block_tables, batch.seq_lens, batch.query_start
        return {"plan": self._kernels.prepare(tables, lengths, starts, self.kv.shape[4])}

    def free(self, seq_id: int) -> None:
        """The pool stays as it is; the manager gives the blocks back."""
