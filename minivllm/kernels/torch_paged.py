"""Chapter 8: fast paged attention in PyTorch alone, for any device: whole blocks, and few large products.

The reference attends sequence by sequence: in decode, a dozen small operations for each. Here sequences with
one query each are gathered together into one padded group, whose attention is two batched products, a matrix
for each sequence and key/value head:

    scores [group, T]  =  queries [group, head_dim]  x  keys [head_dim, T]      the heads of a group are rows
    out [group, head_dim]  =  softmax(scores)  x  values [T, head_dim]

T is the longest of the group in whole blocks, so much of a group of mixed lengths would be padding: sequences
are sorted by length and cut into a few groups, where padding and groups together cost least (`cut`). Slots
that hold no token of a sequence may hold anything, NaN too. Their scores are replaced, not added to, and
their values become zero, since 0 x NaN is NaN.

Sequences with several queries are taken one by one, in tiles of queries: a tile ends at its own last key, so
that half of the products is saved, and the scores never take more than MAX_SCORES numbers.

What follows from tables and lengths alone is worked out once a step, in a `Plan`, for all layers. The
arithmetic is in float32 at least: a CPU multiplies it much faster than 16 bits, unless it has units for them.

What this costs: every key and value is copied before it is used, where the kernels in C and Triton read it in
place. The copies of all groups and layers of a step go to the same memory: memory that is new to a process
takes longer to hand out, page by page, than to fill.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from minivllm.kernels import reference

GROUP_COST = 256  # what one more group costs, in padded tokens that take as long
MAX_GATHERED = 4096  # most tokens of a group, padding included, unless one sequence has more
TILE = 64  # most queries at a time of a sequence that has several
MAX_SCORES = 2**21  # most scores at a time of such a sequence, unless one query has more


@dataclass(frozen=True)
class Group:
    """Sequences with one query each, padded to `width` slots: whole blocks.

    rows [num_seqs] int64: where their queries stand; blocks [num_seqs * blocks of each]: what to gather;
    unfilled [num_seqs, 1, width] bool: which slots hold no token; unfilled_rows: the same as indices of
    [num_seqs * width].
    """

    rows: Tensor
    blocks: Tensor
    unfilled: Tensor
    unfilled_rows: Tensor


@dataclass(frozen=True)
class Chunk:
    """A sequence with several queries, which stand in `rows`, or one of no length, without blocks."""

    rows: slice
    seq_len: int
    blocks: Tensor


class Room:
    """Memory for what is gathered, one group after another."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor of this kind that holds anything; it lies where the last one of this name did."""
        kept, size = self._kept.get(name), math.prod(shape)
        if kept is None or kept.numel() < size or (kept.dtype, kept.device) != (dtype, device):
            kept = self._kept[name] = torch.empty(size, dtype=dtype, device=device)
        return kept[:size].view(shape)


@dataclass(frozen=True)
class Plan:
    """What the layers of one step have in common. future [TILE, 1, TILE]: which keys of a tile are later."""

    groups: tuple[Group, ...]
    chunks: tuple[Chunk, ...]
    future: Tensor
    room: Room = field(default_factory=Room)


def prepare(block_tables: Tensor, seq_lens: Tensor, query_start: Tensor, block_size: int) -> Plan:
    """A plan for all layers of a step; arguments as in `reference.paged_attention`."""
    starts, lengths = query_start.tolist(), seq_lens.tolist()
    blocks = [-(-n // block_size) for n in lengths]
    single = [n > 0 and starts[i + 1] - starts[i] == 1 for i, n in enumerate(lengths)]
    chunks = tuple(
        Chunk(slice(starts[i], starts[i + 1]), n, block_tables[i, : blocks[i]])
        for i, n in enumerate(lengths)
        if not single[i]
    )
    order = sorted((i for i, one in enumerate(single) if one), key=lengths.__getitem__)
    device = block_tables.device
    groups = []
    for part in cut([blocks[i] * block_size for i in order], GROUP_COST, MAX_GATHERED):
        members = torch.tensor(order[part], device=device)
        num_blocks = blocks[order[part][-1]]
        unfilled = torch.arange(num_blocks * block_size, device=device) >= seq_lens[members, None]
        tables = block_tables[members, :num_blocks].masked_fill(unfilled[:, ::block_size], 0)
        rows, unfilled_rows = query_start[members].long(), unfilled.flatten().nonzero().flatten()
        groups.append(Group(rows, tables.flatten(), unfilled[:, None], unfilled_rows))
    future = torch.ones(TILE, TILE, dtype=torch.bool, device=device).triu(1)[:, None]
    return Plan(tuple(groups), chunks, future)


def cut(lengths: Sequence[int], group_cost: int, most: int) -> list[slice]:
    """Where to cut ascending lengths into groups so that all together cost least.

    A group costs its size times its longest, and group_cost. It is at most `most` long, padded, or has one
    member. The best way to cut the first n is the best over where its last group begins, and what stands
    before that is cut in its own best way: n * n / 2 sums at most, instead of 2^(n - 1) ways.

        cut([16, 16, 32, 304, 320], 100, 4096)   ->  [16 16 32] [304 320], 96 + 640 + 2 * 100
    """
    costs, begins = [0], []  # of the first n: what they cost, and where their last group begins
    for end, longest in enumerate(lengths, start=1):
        possible = range(max(0, end - max(1, most // longest)), end)
        begin = min(possible, key=lambda first: costs[first] + (end - first) * longest)
        costs.append(costs[begin] + (end - begin) * longest + group_cost)
        begins.append(begin)
    parts, end = [], len(lengths)
    while end:
        parts.append(slice(begins[end - 1], end))
        end = begins[end - 1]
    return parts[::-1]


def store_kv(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, *, plan: Plan | None = None
) -> None:
    """Write each token's key and value into its slot, as `reference.store_kv` does; no plan is needed."""
    reference.store_kv(k, v, k_cache, v_cache, slot_mapping)


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
    plan: Plan | None = None,
) -> Tensor:
    """Causal attention of packed queries over the blocks of their sequences; returns q's shape.

    Arguments as in `reference.paged_attention`; no hint is needed. plan: of `prepare` with these tables and
    lengths.
    """
    out = torch.empty_like(q) if out is None else out
    plan = plan or prepare(block_tables, seq_lens, query_start, k_cache.shape[2])
    for group in plan.groups:
        found = _attend_group(q, k_cache, v_cache, group, scale, plan.room)
        out.index_copy_(0, group.rows, found.to(out.dtype))
    for chunk in plan.chunks:
        if chunk.seq_len == 0:
            out[chunk.rows] = 0
        else:
            _attend_chunk(q[chunk.rows], k_cache, v_cache, chunk, plan, scale, out[chunk.rows])
    return out


def _attend_group(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, group: Group, scale: float, room: Room
) -> Tensor:
    """One query for each sequence of a group: [num_seqs, num_heads, head_dim]."""
    queries = _by_head(q.index_select(0, group.rows), k_cache.shape[1], scale)  # [kv, seq, heads, dim]
    kv_heads, num_seqs, heads, dim = queries.shape
    width = group.unfilled.shape[2]
    matrices = (kv_heads * num_seqs, width, dim)
    keys = _gather(k_cache, group.blocks, queries.dtype, room, "keys").view(matrices)
    scores = torch.bmm(queries.reshape(-1, heads, dim), keys.mT)
    scores.view(kv_heads, num_seqs, heads, width).masked_fill_(group.unfilled, float("-inf"))
    values = _gather(v_cache, group.blocks, queries.dtype, room, "values")
    values.view(kv_heads, -1, dim).index_fill_(1, group.unfilled_rows, 0)
    found = torch.bmm(scores.softmax(dim=-1), values.view(matrices))
    return found.view(kv_heads, num_seqs, heads, dim).transpose(0, 1).flatten(1, 2)


def _attend_chunk(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, chunk: Chunk, plan: Plan, scale: float, out: Tensor
) -> None:
    """All queries of one sequence; writes out [query_len, num_heads, head_dim]."""
    queries = _by_head(q, k_cache.shape[1], scale)  # [kv, query, heads, dim]
    kv_heads, query_len, heads, dim = queries.shape
    queries = queries.reshape(kv_heads, query_len * heads, dim)  # the heads of a group beside each other
    keys, values = (
        _gather(cache, chunk.blocks, queries.dtype, plan.room, name).flatten(1, 2)[:, : chunk.seq_len]
        for name, cache in (("keys", k_cache), ("values", v_cache))
    )
    history = chunk.seq_len - query_len
    tile = max(1, min(TILE, MAX_SCORES // (q.shape[1] * chunk.seq_len)))
    for begin in range(0, query_len, tile):
        end = min(begin + tile, query_len)
        size, seen = end - begin, history + end
        scores = torch.bmm(queries[:, begin * heads : end * heads], keys[:, :seen].mT)
        own = scores.view(kv_heads, size, heads, seen)[..., seen - size :]  # queries and keys of the tile
        own.masked_fill_(plan.future[:size, :, :size], float("-inf"))
        found = torch.bmm(scores.softmax(dim=-1), values[:, :seen])
        out[begin:end] = found.view(kv_heads, size, heads, dim).transpose(0, 1).flatten(1, 2)


def _by_head(q: Tensor, kv_heads: int, scale: float) -> Tensor:
    """Queries [n, num_heads, head_dim], scaled, as [kv_heads, n, heads of the group, head_dim]."""
    q = q.to(torch.promote_types(q.dtype, torch.float32)) * scale
    return q.unflatten(1, (kv_heads, -1)).transpose(0, 1)


def _gather(cache: Tensor, blocks: Tensor, dtype: torch.dtype, room: Room, name: str) -> Tensor:
    """Whole blocks, each head's in a row: [num_kv_heads, len(blocks), block_size, head_dim]."""
    num_kv_heads, block_size, head_dim = cache.shape[1:]
    shape = num_kv_heads, len(blocks), block_size, head_dim
    gathered = room.take(name, shape, cache.dtype, cache.device)
    for head, target in zip(cache.unbind(1), gathered.unbind(), strict=True):
        torch.index_select(head, 0, blocks, out=target)
    if gathered.dtype == dtype:
        return gathered
    return room.take(f"{name} converted", shape, dtype, cache.device).copy_(gathered)
