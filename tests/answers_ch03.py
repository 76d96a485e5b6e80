"""Answers to the exercises of chapter 3: right ones built differently, wrong ones with the mistake."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.errors import OutOfBlocks
from minivllm.memory.blocks import BlockPool
from minivllm.memory.paged import PagedManager


def pool(allocate: Callable[..., Any]) -> type[BlockPool]:
    return type("Mine", (BlockPool,), {"allocate": allocate})


def append_then_refuse(self, n):
    taken = []
    for _ in range(n):
        if not self._free:
            raise OutOfBlocks("too few")
        taken.append(self._free.popitem(last=False)[0])
    return taken


def never_refuse(self, n):
    return [self._free.popitem(last=False)[0] for _ in range(min(n, len(self._free)))]


def last_first(self, n):
    if n > len(self._free):
        raise OutOfBlocks("too few")
    return [self._free.popitem()[0] for _ in range(n)]


def pairs(self, n):
    if n > len(self._free):
        raise OutOfBlocks("too few")
    return [self._free.popitem(last=False) for _ in range(n)]


def only_looked(self, n):
    if n > len(self._free):
        raise OutOfBlocks("too few")
    return list(self._free)[:n]


def looked_then_deleted(self, n):
    """Right, in another way."""
    if len(self._free) - n < 0:
        raise OutOfBlocks("too few")
    taken = [block for _, block in zip(range(n), self._free, strict=False)]
    for block in taken:
        del self._free[block]
    return taken


def one_by_one(table, size, start, end):
    """Right, in another way."""
    slots = []
    for token in range(start, end):
        block, offset = divmod(token, size)
        slots.append(table[block] * size + offset)
    return slots


def one_too_many(t, b, s, e):
    return [t[i // b] * b + i % b for i in range(s, e + 1) if i // b < len(t)]


def from_the_start(t, b, s, e):
    return [t[i // b] * b + i % b for i in range(e - s)]


def taking_back(free: Callable[..., Any]) -> type[BlockPool]:
    return type("Mine", (BlockPool,), {"free": free})


def refused(self, block_ids):
    return len(set(block_ids)) < len(block_ids) or any(
        block in self._free or not 0 <= block < self.num_blocks for block in block_ids
    )


def on_a_copy_first(self, block_ids):
    """Right, in another way."""
    after = self._free.copy()
    for block in block_ids:
        if block in after or block not in range(self.num_blocks):
            raise ValueError("not in use")
        after[block] = None
    self._free = after


def one_by_one_until_wrong(self, block_ids):
    for block in block_ids:
        if block in self._free or not 0 <= block < self.num_blocks:
            raise ValueError("not in use")
        self._free[block] = None


def believes_the_caller(self, block_ids):
    self._free.update(dict.fromkeys(block_ids))


def free_ones_only(self, block_ids):
    if any(block in self._free or not 0 <= block < self.num_blocks for block in block_ids):
        raise ValueError("not in use")
    self._free.update(dict.fromkeys(block_ids))


def last_given_first(self, block_ids):
    if refused(self, block_ids):
        raise ValueError("not in use")
    self._free.update(dict.fromkeys(block_ids[::-1]))


def to_the_head(self, block_ids):
    if refused(self, block_ids):
        raise ValueError("not in use")
    for block in block_ids[::-1]:
        self._free[block] = None
        self._free.move_to_end(block, last=False)


def in_order_of_number(self, block_ids):
    if refused(self, block_ids):
        raise ValueError("not in use")
    self._free = OrderedDict.fromkeys(sorted([*self._free, *block_ids]))


def manager(allocate: Callable[..., Any]) -> type[PagedManager]:
    return type("Mine", (PagedManager,), {"allocate": allocate})


def with_the_rounding_written_out(self, seq_id, n):
    """Right, in another way."""
    table, tokens = self._tables.get(seq_id, []), self._num_tokens.get(seq_id, 0)
    need = (n + self.block_size - 1) // self.block_size - len(table)
    new = self.pool.allocate(need) if need > 0 else []
    self._tables[seq_id] = table + new
    self._num_tokens[seq_id] = tokens if tokens > n else n


def growing(
    count: Callable[[int, int], int] = lambda n, size: -(-n // size),
    keep: Callable[[int, int], int] = max,
    join: Callable[[list[int], list[int]], list[int]] = lambda table, new: table + new,
) -> type[PagedManager]:
    """Right but for the part that is given."""

    def allocate(self, seq_id, n):
        table = self._tables.get(seq_id, [])
        new = self.pool.allocate(max(0, count(n, self.block_size) - len(table)))
        self._tables[seq_id] = join(table, new)
        self._num_tokens[seq_id] = keep(n, self._num_tokens.get(seq_id, 0))

    return manager(allocate)


def all_anew(self, seq_id, n):
    new = self.pool.allocate(-(-n // self.block_size))
    self._tables.setdefault(seq_id, []).extend(new)
    self._num_tokens[seq_id] = max(n, self._num_tokens.get(seq_id, 0))


def block_by_block(self, seq_id, n):
    table = self._tables.setdefault(seq_id, [])
    self._num_tokens.setdefault(seq_id, 0)
    while len(table) * self.block_size < n:
        table += self.pool.allocate(1)
    self._num_tokens[seq_id] = max(n, self._num_tokens[seq_id])


def table_before_refusal(self, seq_id, n):
    table = self._tables.setdefault(seq_id, [])
    self._num_tokens[seq_id] = max(n, self._num_tokens.get(seq_id, 0))
    table += self.pool.allocate(max(0, -(-n // self.block_size) - len(table)))


def no_tokens_noted(self, seq_id, n):
    new = self.pool.allocate(self.num_missing_blocks(seq_id, n))
    self._tables.setdefault(seq_id, []).extend(new)


def slot_by_slot(k, v, k_cache, v_cache, slot_mapping):
    """Right, in another way."""
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot != -1:
            block, offset = divmod(slot, k_cache.shape[2])
            k_cache[block, :, offset] = k[token]
            v_cache[block, :, offset] = v[token]


def by_a_view_with_slots_in_front(k, v, k_cache, v_cache, slot_mapping):
    """Right, in another way."""
    kept = (slot_mapping != -1).nonzero()[:, 0]
    block = torch.div(slot_mapping[kept], k_cache.shape[2], rounding_mode="floor")
    where = block, slot_mapping[kept].remainder(k_cache.shape[2])
    k_cache.transpose(1, 2)[where] = k[kept]
    v_cache.transpose(1, 2)[where] = v[kept]


def by_reshape(k, v, k_cache, v_cache, slot_mapping):
    kept = slot_mapping >= 0
    for new, cache in ((k, k_cache), (v, v_cache)):
        cache.transpose(1, 2).reshape(-1, *new.shape[1:])[slot_mapping[kept]] = new[kept]


def writes_minus_one(k, v, k_cache, v_cache, slot_mapping):
    size = k_cache.shape[2]
    k_cache[slot_mapping // size, :, slot_mapping % size] = k
    v_cache[slot_mapping // size, :, slot_mapping % size] = v


def storing(
    place: Callable[[Tensor, int], tuple[Tensor, Tensor]], values: bool = True, swap: bool = False
) -> Any:
    def store_kv(k, v, k_cache, v_cache, slot_mapping):
        kept = slot_mapping >= 0
        block, offset = place(slot_mapping[kept], k_cache.shape[2])
        k, v = (v, k) if swap else (k, v)
        k_cache[block, :, offset] = k[kept]
        if values:
            v_cache[block, :, offset] = v[kept]

    return store_kv


def rightly(slot: Tensor, size: int) -> tuple[Tensor, Tensor]:
    return slot // size, slot % size


def attending(
    q, k_cache, v_cache, block_tables, seq_lens, query_start, scale, *, last="own", order=list, cut=True,
    whole_table=False, interleaved=False, out=None, **hints,
):  # fmt: skip
    """Slot by slot and head by head; right but for the part that is given."""
    out = torch.zeros_like(q) if out is None else out
    size, group = k_cache.shape[2], q.shape[1] // k_cache.shape[1]
    for i, n in enumerate(seq_lens.tolist()):
        start, end = int(query_start[i]), int(query_start[i + 1])
        if n == 0:
            out[start:end] = 0
            continue
        table = order(block_tables[i].tolist()[: None if whole_table else -(-n // size)])
        slots = [(block, offset) for block in table for offset in range(size)]
        n = n if cut else len(slots)
        slots = slots[:n]
        k, v = (torch.stack([cache[b, :, o] for b, o in slots]) for cache in (k_cache, v_cache))
        for row in range(end - start):
            seen = {"own": n - (end - start) + row + 1, "all": n, "query": row + 1}[last]
            for head in range(q.shape[1]):
                kv = head % k.shape[1] if interleaved else head // group
                weights = torch.softmax(k[:seen, kv] @ q[start + row, head] * scale, dim=0)
                out[start + row, head] = weights @ v[:seen, kv]
    return out


def with_head_repeated(
    q,
    k_cache,
    v_cache,
    block_tables,
    seq_lens,
    query_start,
    scale,
    *,
    max_query_len=None,
    max_seq_len=None,
    out=None,
):
    """Right, in another way: PyTorch's own attention, with a mask."""
    outs = []
    for i, n in enumerate(seq_lens.tolist()):
        queries = q[query_start[i] : query_start[i + 1]]
        position = torch.arange(n)
        block, offset = block_tables[i][position // k_cache.shape[2]].long(), position % k_cache.shape[2]
        k, v = (
            cache[block, :, offset].repeat_interleave(q.shape[1] // cache.shape[1], dim=1).transpose(0, 1)
            for cache in (k_cache, v_cache)
        )
        mask = position <= torch.arange(n - len(queries), n)[:, None]
        attended = F.scaled_dot_product_attention(queries.transpose(0, 1), k, v, attn_mask=mask, scale=scale)
        outs.append(attended.transpose(0, 1) if n else torch.zeros_like(queries))
    result = torch.cat(outs)
    return result if out is None else out.copy_(result)


def ignores_out(q, k, v, tables, lengths, starts, scale, *, out=None):
    return attending(q, k, v, tables, lengths, starts, scale)


def free_unless_in_the_middle(self, block_ids):
    ends = [*block_ids[:1], *block_ids[-1:]]
    outside = any(not 0 <= block < self.num_blocks for block in block_ids)
    if outside or len(set(block_ids)) < len(block_ids) or any(block in self._free for block in ends):
        raise ValueError("not in use")
    self._free.update(dict.fromkeys(block_ids))


def next_ones_only(self, block_ids):
    some_free = len(set(block_ids)) < len(block_ids) or any(block in self._free for block in block_ids)
    if some_free or -1 in block_ids or self.num_blocks in block_ids:
        raise ValueError("not in use")
    self._free.update(dict.fromkeys(block_ids))


def moved_to_the_end(self, seq_id, n):
    new = self.pool.allocate(self.num_missing_blocks(seq_id, n))
    self._tables[seq_id] = self._tables.pop(seq_id, []) + new
    self._num_tokens[seq_id] = max(n, self._num_tokens.get(seq_id, 0))


def moved_by_a_refusal(self, seq_id, n):
    if seq_id in self._tables:
        where = list(self._tables)
        self._tables[seq_id] = self._tables.pop(seq_id)
    new = self.pool.allocate(self.num_missing_blocks(seq_id, n))
    if seq_id in self._tables:
        self._tables = {i: self._tables[i] for i in where}
    self._tables.setdefault(seq_id, []).extend(new)
    self._num_tokens[seq_id] = max(n, self._num_tokens.get(seq_id, 0))


def zero_tokens_before_refusal(self, seq_id, n):
    had = self._num_tokens.setdefault(seq_id, 0)
    new = self.pool.allocate(self.num_missing_blocks(seq_id, n))
    self._tables.setdefault(seq_id, []).extend(new)
    self._num_tokens[seq_id] = max(n, had)


def empty_table_before_refusal(self, seq_id, n):
    table = self._tables.setdefault(seq_id, [])
    table += self.pool.allocate(self.num_missing_blocks(seq_id, n))
    self._num_tokens[seq_id] = max(n, self._num_tokens.get(seq_id, 0))


def as_new_tokens(self, seq_id, n):
    n += self._num_tokens.get(seq_id, 0)
    growing().allocate(self, seq_id, n)


def counted_as_new_tokens(self, seq_id, n):
    new = self.pool.allocate(self.num_missing_blocks(seq_id, n))
    self._tables.setdefault(seq_id, []).extend(new)
    self._num_tokens[seq_id] = self._num_tokens.get(seq_id, 0) + n


def stale_where_empty(q, k, v, tables, lengths, starts, scale, *, out=None):
    result = attending(q, k, v, tables, lengths, starts, scale)
    out = torch.zeros_like(q) if out is None else out
    for i, n in enumerate(lengths.tolist()):
        if n == 0:
            continue
        out[starts[i] : starts[i + 1]] = result[starts[i] : starts[i + 1]]
    return out


def another_than_out(q, k, v, tables, lengths, starts, scale, *, out=None):
    return attending(q, k, v, tables, lengths, starts, scale, out=out).clone()


def out_in_part(q, k, v, tables, lengths, starts, scale, *, out=None):
    result = attending(q, k, v, tables, lengths, starts, scale)
    if out is not None:
        out[: starts[-2]] = result[: starts[-2]]
    return result


def in_doubles(q, k, v, tables, lengths, starts, scale, *, out=None):
    result = attending(q.double(), k.double(), v.double(), tables, lengths, starts, scale)
    return result if out is None else out.copy_(result)


def doubles_inside(q, k, v, tables, lengths, starts, scale, *, out=None):
    """Right, in another way."""
    result = attending(q.double(), k.double(), v.double(), tables, lengths, starts, scale).to(q.dtype)
    return result if out is None else out.copy_(result)


def first_minus_one_dropped(k, v, k_cache, v_cache, slot_mapping):
    kept = torch.ones_like(slot_mapping, dtype=torch.bool)
    kept[(slot_mapping == -1).nonzero()[:1, 0]] = False
    writes_minus_one(k[kept], v[kept], k_cache, v_cache, slot_mapping[kept])


def fails_where_all_are_nowhere(k, v, k_cache, v_cache, slot_mapping):
    if bool((slot_mapping == -1).all()):
        slot_mapping = torch.zeros_like(slot_mapping)
    slot_by_slot(k, v, k_cache, v_cache, slot_mapping)


def eats_the_table(table, size, start, end):
    slots: list[int] = []
    while table:
        block = table.pop(0)
        slots += range(block * size, block * size + size)
    return slots[start:end]


# exercise -> right answers, none of them the package's own
RIGHT: dict[str, list[Any]] = {
    "3.1": [one_by_one],
    "3.2": [pool(looked_then_deleted)],
    "3.3": [taking_back(on_a_copy_first)],
    "3.4": [manager(with_the_rounding_written_out), growing()],
    "3.5": [slot_by_slot, by_a_view_with_slots_in_front, storing(rightly)],
    "3.6": [attending, with_head_repeated, doubles_inside],
}

# (exercise, answer, what the message must say of the mistake)
WRONG: list[tuple[str, Any, str]] = [
    ("3.1", one_too_many, "end is not included"),
    ("3.1", from_the_start, "from the start of the sequence"),
    ("3.1", lambda t, b, s, e: [t[0] * b + i for i in range(s, e)], "side by side"),
    ("3.1", lambda t, b, s, e: [t[i // b] + i % b * b for i in range(s, e)], "changed places"),
    ("3.1", lambda t, b, s, e: None, "expected"),
    ("3.1", lambda t, b, s, e: [], r"expected \[10, 11, 20, 21\], got \[\]\.$"),
    ("3.1", lambda t, b, s, e: [t[i // b] * b + i % b for i in range(s, e + 1)], "end is not included"),
    ("3.1", lambda t, b, s, e: [float(slot) for slot in one_by_one(t, b, s, e)], "whole numbers.*float"),
    ("3.1", lambda t, b, s, e: list(torch.tensor(one_by_one(t, b, s, e))), "whole numbers.*Tensor"),
    ("3.2", pool(append_then_refuse), "before the refusal"),
    ("3.2", pool(never_refuse), "OutOfBlocks"),
    ("3.2", pool(last_first), "given back last"),
    ("3.2", pool(pairs), "not pairs"),
    ("3.2", pool(only_looked), "still count as free"),
    ("3.1", eats_the_table, "belongs to the sequence"),
    ("3.3", taking_back(one_by_one_until_wrong), "all or nothing"),
    ("3.3", taking_back(believes_the_caller), "ValueError"),
    ("3.3", taking_back(free_ones_only), "ValueError"),
    ("3.3", taking_back(last_given_first), "the other way round"),
    ("3.3", taking_back(to_the_head), "at the head"),
    ("3.3", taking_back(in_order_of_number), "order of number"),
    ("3.3", taking_back(free_unless_in_the_middle), "ValueError"),
    ("3.3", taking_back(next_ones_only), "ValueError"),
    ("3.4", growing(count=lambda n, size: n // size), "round up"),
    ("3.4", growing(count=lambda n, size: n // size + 1), "no room for the next"),
    ("3.4", growing(keep=lambda n, had: n), "has shrunk"),
    ("3.4", growing(join=lambda table, new: new + table), "put in front"),
    ("3.4", manager(all_anew), "once more"),
    ("3.4", manager(block_by_block), "all or nothing"),
    ("3.4", manager(table_before_refusal), "all or nothing"),
    ("3.4", manager(no_tokens_noted), "_num_tokens"),
    ("3.4", manager(moved_to_the_end), "keeps its place"),
    ("3.4", manager(moved_by_a_refusal), "all or nothing"),
    ("3.4", manager(zero_tokens_before_refusal), "_num_tokens after .*all or nothing"),
    ("3.4", manager(empty_table_before_refusal), "all or nothing"),
    ("3.4", manager(as_new_tokens), r"allocate\(3, 6\).*taken for new tokens"),
    ("3.4", manager(counted_as_new_tokens), r"allocate\(3, 6\).*taken for new tokens"),
    ("3.5", by_reshape, "strided"),
    ("3.5", writes_minus_one, "nowhere"),
    ("3.5", storing(lambda slot, size: (slot % size, slot // size % size)), "differ"),
    ("3.5", storing(rightly, values=False), "values were not written"),
    ("3.5", storing(rightly, swap=True), "changed places"),
    ("3.5", first_minus_one_dropped, "each means nowhere"),
    ("3.5", fails_where_all_are_nowhere, "differ"),
    ("3.6", partial(attending, last="all"), "later tokens"),
    ("3.6", partial(attending, last="query"), "history"),
    ("3.6", partial(attending, cut=False), "exactly seq_len slots"),
    ("3.6", partial(attending, whole_table=True, cut=False), "exactly seq_len slots"),
    ("3.6", partial(attending, order=sorted), "another order"),
    ("3.6", partial(attending, interleaved=True), "neighbouring heads share one"),
    ("3.6", lambda q, k, v, t, n, s, scale, **o: attending(q, k, v, t, n, s, 1.0, **o), "left out"),
    ("3.6", ignores_out, "nothing was written to out"),
    ("3.6", stale_where_empty, "length 0 were left as they were"),
    ("3.6", another_than_out, "given as out itself"),
    ("3.6", out_in_part, "given as out, which takes"),
    ("3.6", in_doubles, "expected numbers of torch.float32"),
    ("3.6", lambda *a, **o: None, "a tensor of shape"),
]  # fmt: skip
