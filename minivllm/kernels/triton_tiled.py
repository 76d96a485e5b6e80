"""Chapter 8: paged attention, step 2 of 4: the same programs, but a tile of keys at a time.

A program takes BLOCK_N keys at once, each with its own entry of the block table: a tile may span many blocks
or lie inside of one. With BLOCK_N = 4 and a token that sees 10 keys:

                      keys of key/value head 0              keys of key/value head 1
    (token, head 0)   [0 1 2 3] [4 5 6 7] [8 9 - -]
    (token, head 1)   [0 1 2 3] [4 5 6 7] [8 9 - -]
    (token, head 2)                                         [0 1 2 3] [4 5 6 7] [8 9 - -]
    (token, head 3)                                         [0 1 2 3] [4 5 6 7] [8 9 - -]     -> time

Bytes of K and V that the programs ask for: what step 1 asks for, to the byte. The two dashes are not loaded.

    sum over tokens of keys(token)  *  num_heads  *  2 * head_dim * itemsize

Why it should be faster than step 1: the waiting is shared. BLOCK_N table entries are under way together, then
BLOCK_N rows, each of them contiguous; and largest, exponential and sum are one round for BLOCK_N keys. What
was summed is scaled down once a tile.

Where it is not: a sequence with a handful of keys has little to wait for, and the rest of its tile is
computed for nobody. And it cannot be faster than memory gives these bytes: the heads of a group still ask for
the same keys, each for itself.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from minivllm.kernels.triton_step import launch, place_of
from minivllm.kernels.triton_store import store_kv

__all__ = ["paged_attention", "store_kv"]


@triton.jit(do_not_specialize=["num_seqs", "table_row"])  # they change from step to step
def tiled_kernel(  # type: ignore[no-untyped-def]
    q, k_cache, v_cache, out, block_tables, seq_lens, query_start, scale, num_seqs,
    q_token, q_head, out_token, out_head,
    k_block, k_head, k_slot, v_block, v_head, v_slot, table_row,
    HEAD_DIM: tl.constexpr, GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Program (t, h) does query head h of token t; names like `k_block` are strides."""
    token = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)  # int64 for addresses: a pool may be larger than 2**31 numbers
    kv_head = head // GROUP
    seq, num_keys = place_of(token, query_start, seq_lens, num_seqs)

    column = tl.arange(0, BLOCK_N)
    dim = tl.arange(0, BLOCK_D)
    dim_inside = dim < HEAD_DIM
    query = tl.load(q + token.to(tl.int64) * q_token + head * q_head + dim, mask=dim_inside, other=0.0)
    query = query.to(tl.float32)

    largest = -float("inf")
    total = 0.0
    summed = tl.zeros([BLOCK_D], tl.float32)
    for start in tl.range(0, num_keys, BLOCK_N):
        key = start + column
        key_inside = key < num_keys
        inside = key_inside[:, None] & dim_inside[None, :]
        entry = tl.load(block_tables + seq * table_row + key // BLOCK_SIZE, mask=key_inside, other=0)
        block, offset = entry.to(tl.int64), (key % BLOCK_SIZE).to(tl.int64)
        k_from = block * k_block + kv_head * k_head + offset * k_slot
        v_from = block * v_block + kv_head * v_head + offset * v_slot
        k = tl.load(k_cache + k_from[:, None] + dim[None, :], mask=inside, other=0.0)
        v = tl.load(v_cache + v_from[:, None] + dim[None, :], mask=inside, other=0.0)

        scores = tl.sum(query[None, :] * k.to(tl.float32), axis=1) * scale
        scores = tl.where(key_inside, scores, -float("inf"))
        larger = tl.maximum(largest, tl.max(scores, axis=0))  # each tile has a key
        weights = tl.exp(scores - larger)
        shrink = tl.exp(largest - larger)
        total = total * shrink + tl.sum(weights, axis=0)
        summed = summed * shrink + tl.sum(weights[:, None] * v.to(tl.float32), axis=0)
        largest = larger

    total = tl.where(total == 0.0, 1.0, total)  # a sequence of length 0: no key, and zeros
    tl.store(out + token.to(tl.int64) * out_token + head * out_head + dim, summed / total, mask=dim_inside)


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

    Arguments as in `reference.paged_attention`; strides are free but the last. Raises InvalidOption.
    """
    return launch(
        tiled_kernel, "triton-tiled", q.shape[1], tiled_tile(q.shape[2]),
        q, k_cache, v_cache, block_tables, seq_lens, query_start, scale, out,
    )  # fmt: skip


def tiled_tile(head_dim: int) -> dict[str, int]:
    """The keys that one program holds, [BLOCK_N, BLOCK_D]: 4,096 numbers, or 64 keys; not tuned yet.

    maxnreg, the most registers of a thread, keeps the compiler from sparing some and spilling to memory.
    """
    dims = triton.next_power_of_2(head_dim)
    return {"BLOCK_N": min(64, 4096 // dims), "BLOCK_D": dims, "num_warps": 4, "maxnreg": 255}
