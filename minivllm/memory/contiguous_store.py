"""Chapter 2: the tensor half of contiguous memory: all slots in one tensor, a sequence's side by side.

Reading is a plain slice: nothing is gathered and nothing is copied, which is why paging must justify its
indirection (chapter 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minivllm.memory.contiguous import ContiguousManager, Move
from minivllm.model.attention import causal_attention
from minivllm.model.batch import Batch
from minivllm.model.config import ModelConfig


@dataclass(frozen=True)
class ContiguousBatch(Batch):
    """A batch that also says where each sequence's first token lies: starts, one slot per sequence."""

    starts: tuple[int, ...]

    @classmethod
    def place(cls, batch: Batch, manager: ContiguousManager) -> ContiguousBatch:
        """The batch with the places that the manager has reserved for its sequences."""
        fields = {name: getattr(batch, name) for name in Batch.__dataclass_fields__}
        return cls(**fields, starts=tuple(manager.start(piece.seq_id) for piece in batch))


class ContiguousStore:
    """kv[num_layers, 2, num_slots, num_kv_heads, head_dim], made once; no code ever clears a slot."""

    keeps_kv = True

    def __init__(
        self,
        config: ModelConfig,
        num_slots: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ):
        shape = (config.num_hidden_layers, 2, num_slots, config.num_key_value_heads, config.head_dim)
        self.kv = torch.empty(shape, dtype=dtype, device=device)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        """Write the new keys and values behind the old ones, then attend over the slice of all of them."""
        if not isinstance(batch, ContiguousBatch):
            raise TypeError(
                "Contiguous memory needs a ContiguousBatch: ContiguousBatch.place(batch, manager)."
            )
        out = torch.empty_like(q)
        keys, values = self.kv[layer]
        for (_, begin, end, seq_len), start in zip(batch, batch.starts, strict=True):
            new = slice(start + seq_len - (end - begin), start + seq_len)
            keys[new], values[new] = k[begin:end], v[begin:end]
            everything = slice(start, start + seq_len)
            scale = q.shape[-1] ** -0.5
            out[begin:end] = causal_attention(q[begin:end], keys[everything], values[everything], scale)
        return out

    def move(self, moves: Sequence[Move]) -> int:
        """Carry out what `ContiguousManager.compact` planned; returns the bytes copied.

        A destination may be another's source, so all are read before any is written.
        """
        pieces = [self.kv[:, :, m.source : m.source + m.length].clone() for m in moves]
        for m, piece in zip(moves, pieces, strict=True):
            self.kv[:, :, m.destination : m.destination + m.length] = piece
        return sum(piece.nbytes for piece in pieces)

    def free(self, seq_id: int) -> None:
        """The tensor stays as it is; the manager gives the run back."""
