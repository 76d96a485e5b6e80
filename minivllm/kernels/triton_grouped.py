"""Chapter 8: paged attention, step 3 of 4: one program for all query heads that share a key/value head.

In grouped-query attention (Ainslie et al., 2023, arXiv 2305.13245) a group of query heads has one key/value
head. So its heads become the rows of one tile, and a tile of keys is read once for all of them. With 4 query
heads in groups of two, BLOCK_N = 4, and a token that sees 10 keys:

                            keys of key/value head 0           keys of key/value head 1
    (token, kv head 0)      [0 1 2 3] [4 5 6 7] [8 9 - -]
        rows: heads 0, 1
    (token, kv head 1)                                         [0 1 2 3] [4 5 6 7] [8 9 - -]
        rows: heads 2, 3                                                                          -> time

Bytes of K and V that the programs ask for: those of step 2 divided by the group.

    sum over tokens of keys(token)  *  num_kv_heads  *  2 * head_dim * itemsize

Why it should be faster than step 2: memory gives fewer bytes. In a decode step a sequence has one token, so
that its keys and values are read once: that is the least. Rows against keys is a product of matrices,
`tl.dot`, for which a GPU has instructions of its own. They take 16 rows at least: a group of 4 fills a
quarter of them, and the rest is computed for nobody.

Where it is not: with a group of 1 the bytes are the same, and 15 rows of 16 are idle. With few sequences
there are few programs: 8 for one sequence with 8 key/value heads, on a GPU that has room for hundreds. And in
a prefill each token still reads all keys before it. Step 4, `triton_attention`, shares out the keys of one
sequence among several programs, and puts several queries in a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from minivllm.kernels.triton_step import launch, place_of
from minivllm.kernels.triton_store import store_kv

__all__ = ["paged_attention", "store_kv"]


@triton.jit(do_not_specialize=["num_seqs", "table_row"])  # they change from step to step
def grouped_kernel(  # type: ignore[no-untyped-def]
    q, k_cache, v_cache, out, block_tables, seq_lens, query_start, scale, num_seqs,
    q_token, q_head, out_token, out_head,
    k_block, k_head, k_slot, v_block, v_head, v_slot, table_row,
    HEAD_DIM: tl.constexpr, GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Program (t, h) does the heads of key/value head h for token t; names like `k_block` are strides."""
    token = tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)  # int64 for addresses: a pool may be larger than 2**31 numbers
    seq, num_keys = place_of(token, query_start, seq_lens, num_seqs)

    row = tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_N)
    dim = tl.arange(0, BLOCK_D)
    dim_inside = dim < HEAD_DIM
    head = kv_head * GROUP + row
    inside = (row < GROUP)[:, None] & dim_inside[None, :]
    q_from = token.to(tl.int64) * q_token + head * q_head
    q_tile = tl.load(q + q_from[:, None] + dim[None, :], mask=inside, other=0.0)

    largest = tl.full([BLOCK_M], -float("inf"), tl.float32)  # one for each row, as are the sums
    total = tl.zeros([BLOCK_M], tl.float32)
    summed = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in tl.range(0, num_keys, BLOCK_N):
        key = start + column
        key_inside = key < num_keys
        kv_inside = key_inside[:, None] & dim_inside[None, :]
        entry = tl.load(block_tables + seq * table_row + key // BLOCK_SIZE, mask=key_inside, other=0)
        block, offset = entry.to(tl.int64), (key % BLOCK_SIZE).to(tl.int64)
        k_from = block * k_block + kv_head * k_head + offset * k_slot
        v_from = block * v_block + kv_head * v_head + offset * v_slot
        k = tl.load(k_cache + k_from[:, None] + dim[None, :], mask=kv_inside, other=0.0)
        v = tl.load(v_cache + v_from[:, None] + dim[None, :], mask=kv_inside, other=0.0)

        scores = tl.dot(q_tile, k.T, input_precision="ieee") * scale
        scores = tl.where(key_inside[None, :], scores, -float("inf"))
        larger = tl.maximum(largest, tl.max(scores, axis=1))  # finite: each tile has a key
        weights = tl.exp(scores - larger[:, None])
        shrink = tl.exp(largest - larger)
        total = total * shrink + tl.sum(weights, axis=1)
        summed = summed * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        largest = larger

    total = tl.where(total == 0.0, 1.0, total)  # a sequence of length 0: no key, and zeros
    out_to = token.to(tl.int64) * out_token + head * out_head
    tl.store(out + out_to[:, None] + dim[None, :], summed / total[:, None], mask=inside)


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
    num_kv_heads = k_cache.shape[1]
    tile = grouped_tile(q.shape[1] // num_kv_heads, q.shape[2], q.element_size())
    return launch(
        grouped_kernel, "triton-grouped", num_kv_heads, tile,
        q, k_cache, v_cache, block_tables, seq_lens, query_start, scale, out,
    )  # fmt: skip


def grouped_tile(group: int, head_dim: int, itemsize: int) -> dict[str, int]:
    """BLOCK_M rows for the heads and BLOCK_N keys, of BLOCK_D numbers; 16 is the least that `tl.dot` takes.

    In float32 the operands stand in registers, so the tile is smaller, and has more threads. Not tuned yet.
    """
    rows, dims = max(16, triton.next_power_of_2(group)), max(16, triton.next_power_of_2(head_dim))
    if itemsize == 2:
        num_warps = 4 if rows * dims < 8192 else 8
    else:
        num_warps = max(4, rows // 4, dims // 32)
    return {
        "BLOCK_M": rows,
        "BLOCK_N": min(64, 8192 // dims) if itemsize == 2 else 16,
        "BLOCK_D": dims,
        "num_warps": num_warps,
        "maxnreg": min(255, 65_536 // (32 * num_warps)),  # 65,536 is what there is for all threads
    }
