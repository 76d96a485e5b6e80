"""Chapter 8: what the steps on the way to the last kernel share: a program's place, and the launch.

Each step gives every query token its own programs. The tokens of all sequences lie in one row, and
query_start says where each sequence begins; so a program that has a token must find out whose it is.

    query_start = [0, 5, 6, 9]      token 0-4: sequence 0     5: sequence 1     6-8: sequence 2

The last query of a sequence sees all its keys, the one before it one fewer, and so on: with 10 keys and the
queries 6-8, token 8 sees 10 keys, token 7 sees 9 and token 6 sees 8. That is the causal rule.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from minivllm.kernels.triton_limits import check_attention


@triton.jit
def place_of(token, query_start, seq_lens, num_seqs):  # type: ignore[no-untyped-def]
    """The sequence of a query token, and how many of its keys the token sees: 0 or less in an empty one."""
    low, high = 0, num_seqs  # bisection: the last sequence that does not begin after the token
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start + middle) <= token:
            low = middle
        else:
            high = middle
    last_token = tl.load(query_start + low + 1) - 1
    return tl.cast(low, tl.int64), tl.load(seq_lens + low) - (last_token - token)


def launch(
    kernel: Any,
    name: str,
    num_heads: int,
    tile: dict[str, int],
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start: Tensor,
    scale: float,
    out: Tensor | None,
) -> Tensor:
    """Run num_heads programs for each token of q; the arguments from q on are those of `paged_attention`.

    name: what a refusal calls the kernel. Raises InvalidOption for what the kernels do not have.
    """
    out = torch.empty_like(q) if out is None else out
    group = q.shape[1] // k_cache.shape[1]
    check_attention(name, q, k_cache, v_cache, block_tables, seq_lens, query_start, out)
    if len(q) == 0:
        return out
    with torch.cuda.device_of(q):  # Triton launches on the current device
        kernel[len(q), num_heads](
            q, k_cache, v_cache, out,
            block_tables.contiguous(), seq_lens.contiguous(), query_start.contiguous(), scale, len(seq_lens),
            *q.stride()[:2], *out.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3],
            block_tables.shape[1],
            HEAD_DIM=q.shape[2], GROUP=group, BLOCK_SIZE=k_cache.shape[2], **tile,
        )  # fmt: skip
    return out
