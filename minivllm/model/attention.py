"""Chapter 0: causal attention of one sequence's new tokens over all its keys and values, written out.

This is the reference that every faster attention in the book is compared with.
"""

from __future__ import annotations

import torch
from torch import Tensor


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Attend from the last query_len of seq_len positions; returns [query_len, num_heads, head_dim].

    q [query_len, num_heads, head_dim]; k, v [seq_len, num_kv_heads, head_dim], seq_len >= query_len.
    Query i sits at position seq_len - query_len + i and sees the positions up to its own. num_heads is
    a multiple of num_kv_heads: neighbouring query heads share a key/value head (grouped-query
    attention, Ainslie et al., 2023, arXiv 2305.13245).
    """
    # Query heads that share a KV head stand beside each other: their rows are folded into one matrix per KV
    # head, [group * query_len, head_dim], so that one product serves the group and no key is copied.
    query_len, num_heads, head_dim = q.shape
    seq_len, num_kv_heads, _ = k.shape
    group = num_heads // num_kv_heads
    q = q * scale  # before the product: in float16 the product may overflow
    grouped = q.view(query_len, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)  # [kv, group, query, dim]
    grouped = grouped.reshape(num_kv_heads, group * query_len, head_dim)
    scores = grouped @ k.permute(1, 2, 0)  # [kv, group * query, seq]
    if query_len > 1:
        scores = scores.view(num_kv_heads, group, query_len, seq_len)
        future = torch.ones(query_len, seq_len, dtype=torch.bool, device=q.device).triu(
            seq_len - query_len + 1
        )
        scores = scores.masked_fill(future, float("-inf")).view(num_kv_heads, group * query_len, seq_len)
    out = scores.softmax(dim=-1) @ v.permute(1, 0, 2)
    return (
        out.view(num_kv_heads, group, query_len, head_dim)
        .permute(2, 0, 1, 3)
        .reshape(query_len, num_heads, head_dim)
    )
