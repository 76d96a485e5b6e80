"""Chapter 3: reading and writing paged KV memory, in PyTorch: gather, then attend.

This is the reference that every faster kernel is compared with. It uses exactly the slots that hold a
sequence's tokens: what stands in the rest of a last block, or in a free block, cannot matter.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minivllm.model.attention import causal_attention


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write each token's key and value into its slot.

    k, v [num_tokens, num_kv_heads, head_dim]; k_cache, v_cache [num_blocks, num_kv_heads, block_size,
    head_dim], views of the pool with any strides; slot_mapping [num_tokens] int64, where -1 is written
    nowhere.
    """
    kept = slot_mapping >= 0
    if not kept.all():
        k, v, slot_mapping = k[kept], v[kept], slot_mapping[kept]
    block_size = k_cache.shape[2]
    block, offset = slot_mapping // block_size, slot_mapping % block_size
    k_cache[block, :, offset] = k  # not through a flattened view: of a layer's strided view there is none
    v_cache[block, :, offset] = v


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start: Tensor,
    scale: float,
    *,
    max_query_len: int | None = None,
    max_seq_len: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Causal attention of packed queries over the blocks of their sequences; returns q's shape.

    q [num_tokens, num_heads, head_dim]; k_cache, v_cache as in `store_kv`; block_tables [num_seqs,
    max_blocks] int32, padded with 0 and never read past a sequence's length; seq_lens [num_seqs] int32;
    query_start [num_seqs + 1] int32. Query i of a sequence sits at position seq_len - query_len + i and
    sees the positions up to its own. A sequence of length 0 gives zeros. max_query_len and max_seq_len are
    hints for kernels that need them on the host; out receives the result where it is given.
    """
    out = torch.empty_like(q) if out is None else out
    block_size = k_cache.shape[2]
    starts, lengths = query_start.tolist(), seq_lens.tolist()
    for i, seq_len in enumerate(lengths):
        start, end = starts[i], starts[i + 1]
        if seq_len == 0:
            out[start:end] = 0
            continue
        blocks = block_tables[i, : -(-seq_len // block_size)].long()
        k, v = (cache[blocks].transpose(1, 2).flatten(0, 1)[:seq_len] for cache in (k_cache, v_cache))
        out[start:end] = causal_attention(q[start:end], k, v, scale)
    return out
