"""Chapter 0: the one thing that the decoder knows of memory, and the store that keeps nothing.

`attend` is called once a layer with the new tokens' queries, keys and values. Where older keys and
values come from, and where new ones go, is the store's affair: every kind of KV memory in this book is
another store behind this call, and the decoder never changes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from minivllm.model.attention import causal_attention

if TYPE_CHECKING:
    from minivllm.model.batch import Batch


class KVStore(Protocol):
    """The tensor half of a KV memory.

    keeps_kv: whether the next step may leave out the tokens that this one computed.
    """

    keeps_kv: bool

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        """Attend over all tokens of each sequence, keeping the new k and v where it keeps any; q's shape.

        q [num_tokens, num_heads, head_dim]; k, v [num_tokens, num_kv_heads, head_dim], all packed as
        the batch says.
        """
        ...

    def free(self, seq_id: int) -> None:
        """Let go of a sequence's tensors; an unknown id does nothing."""
        ...


class RecomputeStore:
    """Keeps nothing: each step brings the whole sequence, and computes all of it anew."""

    keeps_kv = False

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        """Attention within the batch alone, so every sequence must be there from its first token."""
        out = torch.empty_like(q)
        for seq_id, start, end, seq_len in batch:
            if end - start != seq_len:
                raise ValueError(
                    f"Sequence {seq_id} brings {end - start} of its {seq_len} tokens; nothing else is kept."
                )
            out[start:end] = causal_attention(q[start:end], k[start:end], v[start:end], q.shape[-1] ** -0.5)
        return out

    def free(self, seq_id: int) -> None:
        """There is nothing to let go of."""
