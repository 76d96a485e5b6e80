"""Chapter 8: paged attention, step 1 of 4: a program for each query and head, which goes from key to key.

With 4 query heads, of which two share a key/value head, the programs of one token that sees 10 keys read

                      keys of key/value head 0     keys of key/value head 1
    (token, head 0)   0 1 2 3 4 5 6 7 8 9
    (token, head 1)   0 1 2 3 4 5 6 7 8 9
    (token, head 2)                                0 1 2 3 4 5 6 7 8 9
    (token, head 3)                                0 1 2 3 4 5 6 7 8 9          -> time

one after the other, each through the block table: block_table[key // block_size] has the block, and the key
is number key % block_size in it. The softmax cannot wait for all scores, since nothing keeps them. So it is
done online: the program holds the largest score so far, the sum of the weights and the weighted sum of the
values, both relative to that largest score. A larger one scales down what was summed (Milakov and
Gimelshein, 2018, arXiv 1805.02867).

Bytes of K and V that the programs ask for; keys(token) is the number of keys that a token sees:

    sum over tokens of keys(token)  *  num_heads  *  2 * head_dim * itemsize

A decode step at 4,096 keys with 32 heads of 128 numbers in bfloat16: 4096 * 32 * 2 * 128 * 2 = 67 MB for each
sequence and layer, where its keys and values are 17 MB with 8 key/value heads. The GPU's L2 cache may serve
some of what is asked for twice.

And each key waits: for a table entry, then for its two rows of 256 bytes, then for a sum and two
exponentials, before the next one begins. A program has half a kilobyte under way at a time, so that only very
many programs side by side keep memory busy. How fast each step is has not been measured yet.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from minivllm.kernels.triton_step import launch, place_of
from minivllm.kernels.triton_store import store_kv

__all__ = ["paged_attention", "store_kv"]


@triton.jit(do_not_specialize=["num_seqs", "table_row"])  # they change from step to step
def naive_kernel(  # type: ignore[no-untyped-def]
    q, k_cache, v_cache, out, block_tables, seq_lens, query_start, scale, num_seqs,
    q_token, q_head, out_token, out_head,
    k_block, k_head, k_slot, v_block, v_head, v_slot, table_row,
    HEAD_DIM: tl.constexpr, GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Program (t, h) does query head h of token t; names like `k_block` are strides."""
    token = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)  # int64 for addresses: a pool may be larger than 2**31 numbers
    kv_head = head // GROUP
    seq, num_keys = place_of(token, query_start, seq_lens, num_seqs)

    dim = tl.arange(0, BLOCK_D)
    inside = dim < HEAD_DIM
    query = tl.load(q + token.to(tl.int64) * q_token + head * q_head + dim, mask=inside, other=0.0)
    query = query.to(tl.float32)

    largest = -float("inf")
    total = 0.0
    summed = tl.zeros([BLOCK_D], tl.float32)
    for key in tl.range(0, num_keys):
        block = tl.load(block_tables + seq * table_row + key // BLOCK_SIZE).to(tl.int64)
        offset = tl.cast(key % BLOCK_SIZE, tl.int64)
        k_from = block * k_block + kv_head * k_head + offset * k_slot
        v_from = block * v_block + kv_head * v_head + offset * v_slot
        k = tl.load(k_cache + k_from + dim, mask=inside, other=0.0)
        v = tl.load(v_cache + v_from + dim, mask=inside, other=0.0)

        score = tl.sum(query * k.to(tl.float32)) * scale
        larger = tl.maximum(largest, score)
        weight = tl.exp(score - larger)
        shrink = tl.exp(largest - larger)  # 0 at the first key, where largest is -inf
        total = total * shrink + weight
        summed = summed * shrink + weight * v.to(tl.float32)
        largest = larger

    total = tl.where(total == 0.0, 1.0, total)  # a sequence of length 0: no key, and zeros
    tl.store(out + token.to(tl.int64) * out_token + head * out_head + dim, summed / total, mask=inside)


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
        naive_kernel, "triton-naive", q.shape[1], naive_tile(q.shape[2]),
        q, k_cache, v_cache, block_tables, seq_lens, query_start, scale, out,
    )  # fmt: skip


def naive_tile(head_dim: int) -> dict[str, int]:
    """What one program holds: a key of BLOCK_D numbers, in one warp: so no sum goes from warp to warp."""
    return {"BLOCK_D": triton.next_power_of_2(head_dim), "num_warps": 1}
