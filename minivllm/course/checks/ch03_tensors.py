"""Above the chapters: the checks of chapter 3 whose answers work on tensors.

The plain models are loops over single slots. The memory is a layer of a block-major pool, so its view is
strided, and every slot that must not be read holds NaN, which spoils whatever reads it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

import torch
from torch import Tensor

from minivllm.course.checking import CheckFailed

SIZES = ((1, 3), (4, 2), (3, 5), (7, 1))  # (block_size, num_kv_heads)
HEAD_DIM, NUM_LAYERS, LAYER = 6, 3, 1


def check_3_5(store_kv: Callable[..., Any]) -> None:
    """Any slots in any order, some of them -1; the rest of the pool, other layers too, must stay."""
    generator = torch.Generator().manual_seed(35)
    random = Random(35)
    for block_size, kv_heads in SIZES:
        for num_tokens, nowhere in ((1, 0), (2, 1), (5, 2), (9, 4), (3, 3)):
            num_blocks = 4 + -(-num_tokens // block_size)
            pool = _random(generator, num_blocks, NUM_LAYERS, 2, kv_heads, block_size, HEAD_DIM)
            k, v = (_random(generator, num_tokens, kv_heads, HEAD_DIM) for _ in range(2))
            slots = random.sample(range(1, num_blocks * block_size), num_tokens)
            if num_tokens > 1:
                slots[0] = 0 if nowhere < num_tokens else -1
            for token in random.sample(range(1, num_tokens), min(nowhere, num_tokens - 1)):
                slots[token] = -1
            before = pool.clone()
            given = [k, v, torch.tensor(slots)]
            copies = [tensor.clone() for tensor in given]
            store_kv(k, v, pool[:, LAYER, 0], pool[:, LAYER, 1], given[2])
            what = f"the pool after store_kv with slots {slots} and blocks of {block_size}"
            right = _stored(before, k, v, slots, block_size)
            _expect_tensor(what, pool, right, _store_mistakes(before, k, v, slots, block_size))
            _expect_unchanged(("k", "v", "slot_mapping"), given, copies)


def _random(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def _stored(before: Tensor, k: Tensor, v: Tensor, slots: list[int], block_size: int) -> Tensor:
    """The pool with each token's key and value in its slot, written one by one."""
    pool = before.clone()
    for token, slot in enumerate(slots):
        if slot >= 0:
            block, offset = divmod(slot, block_size)
            pool[block, LAYER, 0, :, offset], pool[block, LAYER, 1, :, offset] = k[token], v[token]
    return pool


def _store_mistakes(
    before: Tensor, k: Tensor, v: Tensor, slots: list[int], block_size: int
) -> dict[str, Tensor]:
    num_slots = before.shape[0] * block_size
    wrapped = [slot % num_slots for slot in slots]
    mixed = [slot % block_size * block_size + slot // block_size if slot >= 0 else -1 for slot in slots]
    right = _stored(before, k, v, slots, block_size)
    mistakes = {
        "nothing was written: a layer's view is strided, so reshape or flatten makes a copy of it": before,
        "a slot of -1 was written to; -1 counts from the end, and here each means nowhere": _stored(
            before, k, v, wrapped, block_size
        ),
        "the values were not written": torch.cat((right[:, :, :1], before[:, :, 1:]), dim=2),
        "keys and values have changed places": _stored(before, v, k, slots, block_size),
    }
    if max(mixed) < num_slots:
        mistakes["block and offset have changed places"] = _stored(before, k, v, mixed, block_size)
    return mistakes


def check_3_6(paged_attention: Callable[..., Any]) -> None:
    """Sequences of lengths about the edges of blocks, with and without history, tables in any order.

    Numbers of 8 bytes tell a mistake from a rounding error; numbers of 4 must give numbers of 4.
    """
    generator = torch.Generator().manual_seed(36)
    for block_size, kv_heads in SIZES:
        lengths = [block_size + 1, 1, 0, 2 * block_size, 3 * block_size + 2, max(1, block_size - 1)]
        queries = [1, 1, 1, min(3, 2 * block_size), 3 * block_size + 2, 1]
        for group, dtype in ((1, torch.float64), (3, torch.float64), (2, torch.float32)):
            for with_out in (False, True):
                case = (generator, block_size, kv_heads, group, lengths, queries)
                _check_attention(paged_attention, *case, dtype=dtype, with_out=with_out)


def _check_attention(
    paged_attention: Callable[..., Any],
    generator: torch.Generator,
    block_size: int,
    kv_heads: int,
    group: int,
    lengths: list[int],
    queries: list[int],
    dtype: torch.dtype,
    with_out: bool,
) -> None:
    counts = [-(-n // block_size) for n in lengths]
    order = (1 + torch.randperm(sum(counts) + 1, generator=generator)).tolist()  # block 0 is nobody's
    tables = [[order.pop() for _ in range(count)] for count in counts]
    shape = (sum(counts) + 2, NUM_LAYERS, 2, kv_heads, block_size, HEAD_DIM)
    pool = torch.full(shape, math.nan, dtype=dtype)
    keys, values = ([_random(generator, n, kv_heads, HEAD_DIM).to(dtype) for n in lengths] for _ in range(2))
    for table, k, v in zip(tables, keys, values, strict=True):
        slots = [table[i // block_size] * block_size + i % block_size for i in range(len(k))]
        pool = _stored(pool, k, v, slots, block_size)
    starts = [sum(queries[:i]) for i in range(len(queries) + 1)]
    q = _random(generator, starts[-1], kv_heads * group, HEAD_DIM).to(dtype)
    width = max(counts) + 2
    padded = torch.tensor([[*t, *[0] * (width - len(t))] for t in tables], dtype=torch.int32)
    given = [
        q,
        pool,
        padded,
        torch.tensor(lengths, dtype=torch.int32),
        torch.tensor(starts, dtype=torch.int32),
    ]
    copies = [tensor.clone() for tensor in given]
    out = torch.full_like(q, 7) if with_out else None
    extra = {"out": out} if with_out else {}
    got = paged_attention(q, pool[:, LAYER, 0], pool[:, LAYER, 1], *given[2:], 0.3, **extra)
    what = (
        f"paged_attention of sequences of {lengths} tokens, the last {queries} of them queries, "
        f"with blocks of {block_size}, {kv_heads} KV heads and {kv_heads * group} heads"
        + (", and an out full of 7s" if with_out else "")
    )
    exact = [[tensor.double() for tensor in tensors] for tensors in (keys, values)]
    case = (q.double(), exact[0], exact[1], starts)
    right = _plain(*case)
    stale = right.clone()
    for i, n in enumerate(lengths):
        if n == 0:
            stale[starts[i] : starts[i + 1]] = 7
    mistakes = {
        "later tokens were seen: query i sits at position seq_len - query_len + i": _plain(*case, last="all"),
        "the history was not seen: query i sits at position seq_len - query_len + i, not i": _plain(
            *case, last="query"
        ),
        "the scale was left out": _plain(*case, scale=1.0),
        "the scale was applied twice": _plain(*case, scale=0.09),
        "a head reads another head's keys: neighbouring heads share one": _plain(*case, interleaved=True),
        "the blocks were read in another order than the table's": _plain(
            *_by_address(case, tables, block_size)
        ),
        "the rows of a sequence of length 0 were left as they were; they must be zeros": stale,
    }
    nan = (
        "Slots were read that hold no token of the sequence: the end of a last block, a free block, or "
        "block 0, which a padded table names. Read exactly seq_len slots"
    )
    _expect_tensor(what, got, right.to(dtype), mistakes, nan)
    if out is not None:
        where = f"the tensor given as out, which takes the result, after {what}"
        untouched = {"nothing was written to out": torch.full_like(right, 7)}
        _expect_tensor(where, out, right.to(dtype), untouched)
        if got.data_ptr() != out.data_ptr():
            raise CheckFailed(f"{what}: the result is right, but it must be the tensor given as out itself.")
    _expect_unchanged(("q", "the pool", "block_tables", "seq_lens", "query_start"), given, copies)


def _expect_unchanged(names: Sequence[str], given: Sequence[Tensor], copies: Sequence[Tensor]) -> None:
    for name, now, was in zip(names, given, copies, strict=True):
        if not _close(now, was):
            raise CheckFailed(f"{name} is not as it was before the call: it is to be read, not written.")


def _plain(
    q: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
    starts: list[int],
    scale: float = 0.3,
    last: str = "own",
    interleaved: bool = False,
) -> Tensor:
    """Attention, one query and head at a time. last: the last position that a query sees."""
    out = torch.zeros_like(q)
    for i, (k, v) in enumerate(zip(keys, values, strict=True)):
        query_len, seq_len = starts[i + 1] - starts[i], len(k)
        for row in range(query_len):
            end = {"own": seq_len - query_len + row + 1, "all": seq_len, "query": row + 1}[last]
            for head in range(q.shape[1]):
                kv = head % k.shape[1] if interleaved else head // (q.shape[1] // k.shape[1])
                if seq_len:
                    weights = (k[:end, kv] @ q[starts[i] + row, head] * scale).softmax(dim=0)
                    out[starts[i] + row, head] = weights @ v[:end, kv]
    return out


def _by_address(
    case: tuple[Tensor, list[Tensor], list[Tensor], list[int]], tables: list[list[int]], block_size: int
) -> tuple[Tensor, list[Tensor], list[Tensor], list[int]]:
    """What would be read by one who goes through each sequence's blocks in order of address."""
    q, keys, values, starts = case
    moved = []
    for tensors in (keys, values):
        of_one = []
        for table, tensor in zip(tables, tensors, strict=True):
            order = sorted(range(len(table)), key=table.__getitem__)
            full = torch.cat(
                (tensor, tensor.new_full((-len(tensor) % block_size, *tensor.shape[1:]), math.nan))
            )
            parts = [full[b * block_size : (b + 1) * block_size] for b in order]
            of_one.append(torch.cat([tensor[:0], *parts])[: len(tensor)])
        moved.append(of_one)
    return q, moved[0], moved[1], starts


def _expect_tensor(
    what: str,
    got: Any,
    expected: Tensor,
    mistakes: Mapping[str, Tensor] | None = None,
    nan: str | None = None,
) -> None:
    """Raises CheckFailed unless got is a tensor of this shape and dtype and, but for rounding, these numbers.

    mistakes: name of a mistake -> what it would have given; nan: what a NaN would come from.
    """
    if not isinstance(got, Tensor) or got.shape != expected.shape:
        shape = f"a tensor of shape {list(got.shape)}" if isinstance(got, Tensor) else repr(got)
        raise CheckFailed(f"{what}: expected a tensor of shape {list(expected.shape)}, got {shape}.")
    if got.dtype != expected.dtype:
        raise CheckFailed(f"{what}: expected numbers of {expected.dtype}, as in q, got {got.dtype}.")
    if _close(got, expected):
        return
    error = _rounding(got)
    wrong = ~torch.isclose(got, expected, rtol=error, atol=error, equal_nan=True)
    place = wrong.nonzero()[0].tolist()
    found = [mistake for mistake, would_give in (mistakes or {}).items() if _close(got, would_give)]
    if nan is not None and got.isnan().any():
        found.append(nan)
    raise CheckFailed(
        f"{what}: {int(wrong.sum())} of {wrong.numel()} numbers differ. At {place}, expected "
        f"{expected[tuple(place)].item():.4g}, got {got[tuple(place)].item():.4g}."
        + (f" It looks as if this is the mistake: {found[0]}." if found else "")
    )


def _close(a: Tensor, b: Tensor) -> bool:
    error = _rounding(a)
    return torch.allclose(a.double(), b.double(), rtol=error, atol=error, equal_nan=True)


def _rounding(tensor: Tensor) -> float:
    return 1e-5 if tensor.dtype == torch.float32 else 1e-9
