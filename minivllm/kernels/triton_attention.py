"""Chapter 8: paged attention, step 4 of 4: several queries in a tile, and keys shared out among programs.

Decode, prefill and a chunk with history differ only in how many queries a sequence has. A program takes one
tile of queries of one sequence, for one key/value head, and walks over that sequence's keys. With 4 query
heads in groups of two, BLOCK_Q = 2, BLOCK_N = 4, and the queries 8 and 9 of a sequence with 10 keys:

                            keys of key/value head 0           keys of key/value head 1
    (queries 8-9, head 0)   [0 1 2 3] [4 5 6 7] [8 9 - -]
        rows: 8h0 8h1 9h0 9h1
    (queries 8-9, head 1)                                      [0 1 2 3] [4 5 6 7] [8 9 - -]
        rows: 8h2 8h3 9h2 9h3                                                                     -> time

Bytes of K and V that the programs ask for; a tile's keys are those that its last query sees:

    sum over tiles of keys(tile)  *  num_kv_heads  *  2 * head_dim * itemsize

In a long prefill that is nearly BLOCK_Q times less than in step 3. In a decode step it is the same: there the
gain is where sequences are few, and their keys are cut into parts for several programs (`triton_split.py`).

Where it is not faster: decode with many sequences. What it costs: a program of many rows takes more registers
and shared memory, so fewer run at a time; and a sequence with few queries in the company of a long prompt has
tiles that are mostly empty rows.

    rows of the tile     a group of query heads shares a key/value head (grouped-query attention). Its heads
                         stand beside each other in the tile, so each key is read once for the whole group.
                         With 3 heads, row r is query r // 3, head r % 3:   q0h0 q0h1 q0h2 q1h0 q1h1 q1h2 ...
    columns              BLOCK_N keys at a time, whatever the block size: each column looks up its own block,
                         so a tile may span many blocks, or lie inside of one.
    online softmax       the largest score so far, the sum and the output so far, all in float32; when a
                         larger score comes, what was summed is scaled down (Milakov and Gimelshein, 2018,
                         arXiv 1805.02867; Dao et al., 2022, arXiv 2205.14135).
    the causal bound     the walk ends at the last key that the last query of the tile may see. Whole tiles of
                         keys that the first query sees too need no mask; only the rest is masked.
    base 2               exp(x) is 2 ** (x * log2(e)), and a GPU has 2 ** x as an instruction: the factor goes
                         into the scale. Scores are scaled after the product, which is summed in float32.

Which tile is mine? In decode every sequence has one tile: tile i is sequence i. Else the host does not know
how many tiles there are: query_start lies on the device, and to read it there would stop the pipeline. So the
grid is an upper bound that follows from shapes alone. Sequence i gets the tiles from
query_start[i] // BLOCK_Q + i on: since it is rounded down, up to one tile more than it needs, and never one
less. A program finds its sequence by bisection, and ends if its tile is the spare one.

    BLOCK_Q = 4, query_start = [0, 5, 6, 16]     tiles from 0, from 2, from 3; at most 16 // 4 + 3 = 7 in all
    tile      0     1     2     3     4      5      6
    queries   0-3   4     5     6-9   10-13  14-15  none

The idea of that grid is vLLM's. Slots that hold no token of the sequence are never read: NaN in them is no
harm. Addresses are int64: the pool of a model with 8 billion parameters passes 2**31 numbers.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from minivllm.kernels.triton_limits import capability, check_attention, num_multiprocessors
from minivllm.kernels.triton_split import PROGRAMS_EACH, choose_num_splits, combine
from minivllm.kernels.triton_tile import attention_tile


@triton.jit(do_not_specialize=["num_seqs", "table_row", "sums_split"])  # they change from step to step
def paged_attention_kernel(  # type: ignore[no-untyped-def]
    q, k_cache, v_cache, out, sums, block_tables, seq_lens, query_start, scale_log2, num_seqs,
    q_token, q_head, out_split, out_token, out_head, sums_split, sums_token,
    k_block, k_head, k_slot, v_block, v_head, v_slot, table_row,
    HEAD_DIM: tl.constexpr, GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    ONE_TILE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Program (t, h, s) does part s of the keys for tile t of the queries and key/value head h.

    Names like `k_block` are strides. ONE_TILE: no sequence has more than BLOCK_Q queries. SPLIT: the keys are
    shared out among several programs; `out` and `sums` take what each has, for `combine`.
    """
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the last queries walk longest: they start first
    kv_head = tl.program_id(1).to(tl.int64)
    if ONE_TILE:
        seq = tile
        first_token = tl.load(query_start + seq)
        first_query = 0
    else:
        low, high = 0, num_seqs  # my sequence: the last whose first tile is not after mine
        while high - low > 1:
            middle = (low + high) // 2
            if tl.load(query_start + middle) // BLOCK_Q + middle <= tile:
                low = middle
            else:
                high = middle
        seq = low
        first_token = tl.load(query_start + seq)
        first_query = (tile - first_token // BLOCK_Q - seq) * BLOCK_Q
    query_len = tl.load(query_start + seq + 1) - first_token
    if first_query >= query_len:
        return
    seq_len = tl.load(seq_lens + seq)

    row = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, BLOCK_D)
    query = first_query + row // GROUP
    token = (first_token + query).to(tl.int64)
    head = kv_head * GROUP + row % GROUP
    row_inside = (row < BLOCK_Q * GROUP) & (query < query_len)
    inside = row_inside[:, None] & (dim < HEAD_DIM)[None, :]
    q_from = (token * q_token + head * q_head)[:, None] + dim[None, :]
    q_tile = tl.load(q + q_from, mask=inside, other=0.0)

    position = seq_len - query_len + query  # of a query: the last key that it sees
    first_position = seq_len - query_len + first_query
    end = tl.minimum(seq_len, first_position + BLOCK_Q)
    each = tl.cdiv(tl.cdiv(end, BLOCK_N), tl.num_programs(2)) * BLOCK_N  # whole tiles of keys to each part
    first = tl.program_id(2) * each
    last = tl.minimum(end, first + each)
    unmasked = tl.maximum(first, tl.minimum(last, (first_position + 1) // BLOCK_N * BLOCK_N))

    largest = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    summed = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    table = block_tables + seq.to(tl.int64) * table_row
    k_cache += kv_head * k_head
    v_cache += kv_head * v_head
    largest, total, summed = walk(
        first, unmasked, q_tile, position, largest, total, summed, scale_log2,
        k_cache, v_cache, table, k_block, k_slot, v_block, v_slot,
        HEAD_DIM, BLOCK_SIZE, BLOCK_N, BLOCK_D, False,
    )  # fmt: skip
    largest, total, summed = walk(
        unmasked, last, q_tile, position, largest, total, summed, scale_log2,
        k_cache, v_cache, table, k_block, k_slot, v_block, v_slot,
        HEAD_DIM, BLOCK_SIZE, BLOCK_N, BLOCK_D, True,
    )  # fmt: skip

    part = tl.program_id(2).to(tl.int64)
    divisor = tl.where(total == 0.0, 1.0, total)  # no key seen: zeros, and a weight of -inf
    out_to = (part * out_split + token * out_token + head * out_head)[:, None] + dim[None, :]
    tl.store(out + out_to, summed / divisor[:, None], mask=inside)
    if SPLIT:  # how much this part weighs: log2 of its sum
        weight = largest + tl.log2(divisor)
        tl.store(sums + part * sums_split + token * sums_token + head, weight, mask=row_inside)


@triton.jit
def walk(  # type: ignore[no-untyped-def]
    first, last, q_tile, position, largest, total, summed, scale_log2,
    k_cache, v_cache, table, k_block, k_slot, v_block, v_slot,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Attend to the keys from `first` to before `last`; returns (largest, total, summed) with them.

    Without MASKED every row sees all of these keys, and they fill whole tiles.
    """
    column = tl.arange(0, BLOCK_N)
    dim = tl.arange(0, BLOCK_D)
    for start in tl.range(first, last, BLOCK_N):
        key = start + column
        key_inside = key < last
        if MASKED:
            entry = tl.load(table + key // BLOCK_SIZE, mask=key_inside, other=0)
        else:
            entry = tl.load(table + key // BLOCK_SIZE)
        block, offset = entry.to(tl.int64), (key % BLOCK_SIZE).to(tl.int64)

        k_from = (block * k_block + offset * k_slot)[None, :] + dim[:, None]
        v_from = (block * v_block + offset * v_slot)[:, None] + dim[None, :]
        if MASKED or HEAD_DIM < BLOCK_D:
            dim_inside = dim < HEAD_DIM
            k = tl.load(k_cache + k_from, mask=dim_inside[:, None] & key_inside[None, :], other=0.0)
            v = tl.load(v_cache + v_from, mask=key_inside[:, None] & dim_inside[None, :], other=0.0)
        else:
            k = tl.load(k_cache + k_from)
            v = tl.load(v_cache + v_from)

        scores = tl.dot(q_tile, k, input_precision="ieee") * scale_log2
        if MASKED:
            scores = tl.where(key[None, :] <= position[:, None], scores, -float("inf"))
        larger = tl.maximum(largest, tl.max(scores, axis=1))
        # A row may see no key of its part yet: then 0 stands for -inf, and no -inf - -inf gives NaN.
        base = tl.where(larger == -float("inf"), 0.0, larger)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(largest - base)
        total = total * shrink + tl.sum(weights, axis=1)
        summed = summed * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        largest = larger
    return largest, total, summed


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

    Arguments as in `reference.paged_attention`. Without max_query_len and max_seq_len the shapes give their
    bounds: with as many tokens as sequences each has one query, and no sequence is longer than its table. Any
    strides, but the last dimension of q, caches and out must be contiguous. Nothing waits for the device.
    Raises InvalidOption for what the kernels do not have.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_seqs, num_kv_heads, block_size = len(seq_lens), k_cache.shape[1], k_cache.shape[2]
    out = torch.empty_like(q) if out is None else out
    group = num_heads // num_kv_heads
    check_attention("triton", q, k_cache, v_cache, block_tables, seq_lens, query_start, out)
    if num_tokens == 0:
        return out
    if max_query_len is None:
        max_query_len = num_tokens - num_seqs + 1
    if max_seq_len is None:
        max_seq_len = block_tables.shape[1] * block_size
    query_len = -(-num_tokens // num_seqs)
    tile = attention_tile(query_len, group, head_dim, q.element_size(), capability(q.device))
    one_tile = max_query_len <= tile["BLOCK_Q"]
    num_tiles = num_seqs if one_tile else num_tokens // tile["BLOCK_Q"] + num_seqs
    num_programs, processors = num_tiles * num_kv_heads, num_multiprocessors(q.device)
    num_splits = 1
    if (
        one_tile or num_programs < PROGRAMS_EACH * processors
    ):  # else parts of many rows cost more than they gain
        key_tiles = triton.cdiv(max_seq_len, tile["BLOCK_N"])
        num_splits = choose_num_splits(num_programs, key_tiles, processors)
    launch(
        q, k_cache, v_cache, block_tables, seq_lens, query_start, scale, out, tile, num_tiles, num_splits,
        one_tile,
    )  # fmt: skip
    return out


def launch(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start: Tensor,
    scale: float,
    out: Tensor,
    tile: dict[str, int],
    num_tiles: int,
    num_splits: int,
    one_tile: bool,
) -> None:
    """Start num_tiles x num_kv_heads x num_splits programs; with several splits, then those that combine."""
    num_tokens, num_heads, head_dim = q.shape
    parts = out[None]  # [num_splits, num_tokens, num_heads, head_dim]
    sums = q.new_empty((num_splits, num_tokens, num_heads), dtype=torch.float32)
    if num_splits > 1:
        parts = q.new_empty((num_splits, *q.shape), dtype=torch.float32)
    with torch.cuda.device_of(q):  # Triton launches on the current device
        paged_attention_kernel[num_tiles, k_cache.shape[1], num_splits](
            q, k_cache, v_cache, parts, sums,
            block_tables.contiguous(), seq_lens.contiguous(), query_start.contiguous(),
            scale * math.log2(math.e), len(seq_lens),
            *q.stride()[:2], *parts.stride()[:3], *sums.stride()[:2],
            *k_cache.stride()[:3], *v_cache.stride()[:3], block_tables.shape[1],
            HEAD_DIM=head_dim, GROUP=num_heads // k_cache.shape[1], BLOCK_SIZE=k_cache.shape[2],
            ONE_TILE=one_tile, SPLIT=num_splits > 1, **tile,
        )  # fmt: skip
    if num_splits > 1:
        combine(parts, sums, out)
