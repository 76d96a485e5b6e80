"""Chapter 1: the naive KV cache: a tensor of keys and one of values per sequence and layer.

A token's key and value depend on that token and those before it, never on later ones, so they are
computed once and kept. New ones are joined on with `torch.cat`, which makes a longer tensor and copies the
whole of the old one: n tokens one at a time copy 1 + 2 + ... + (n - 1) rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minivllm.model.attention import causal_attention
from minivllm.model.batch import Batch


class NaiveStore:
    """Keys and values [seq_len, num_kv_heads, head_dim] of each sequence and layer, grown by joining."""

    keeps_kv = True

    def __init__(self) -> None:
        self._kv: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # (seq_id, layer)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        """Join the new keys and values to the old ones, then attend over all of them; q's shape.

        q [num_tokens, num_heads, head_dim]; k, v [num_tokens, num_kv_heads, head_dim]. Iterating over the
        batch gives (seq_id, start, end, seq_len): rows start to end are a sequence's newest, and seq_len is
        how many tokens it has with them. self._kv maps (seq_id, layer) to its keys and values of earlier
        steps. Nothing kept is a view of k or v. Raises ValueError where a sequence's rows do not add up to
        seq_len; what it had is kept.
        """
        out = torch.empty_like(q)
        for seq_id, start, end, seq_len in batch:
            keys, values = k[start:end], v[start:end]
            if (seq_id, layer) in self._kv:
                old_keys, old_values = self._kv[seq_id, layer]
                keys, values = torch.cat((old_keys, keys)), torch.cat((old_values, values))
            else:
                keys, values = keys.clone(), values.clone()  # not a view that pins the whole batch
            if len(keys) != seq_len:  # two sequences under one id would give fluent, wrong text
                raise ValueError(
                    f"Sequence {seq_id} has {len(keys)} tokens in memory; the batch says {seq_len}."
                )
            self._kv[seq_id, layer] = keys, values
            out[start:end] = causal_attention(q[start:end], keys, values, q.shape[-1] ** -0.5)
        return out

    def free(self, seq_id: int) -> None:
        """Drop a sequence's tensors; an unknown id does nothing."""
        for key in [key for key in self._kv if key[0] == seq_id]:
            del self._kv[key]

    def num_bytes(self) -> int:
        """Bytes of all tensors held now."""
        return sum(t.nbytes for pair in self._kv.values() for t in pair)
