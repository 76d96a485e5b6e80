"""Above the chapters: each kernel against float64, over shapes, dtypes and lengths, in poisoned memory.

Every head_dim meets every block size in every dtype, and every group size each dtype. The cases are shared
out to several processes: compiling takes far longer than running.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch

from minivllm import kernels
from minivllm.kernels import reference
from minivllm.lab.gpu_check.here import Here, Item, Row
from minivllm.lab.gpu_check.paged_case import PagedCase, bound_of, error_of
from minivllm.lab.gpu_check.processes import last_words

HEAD_DIMS = (64, 80, 96, 128, 256)
BLOCK_SIZES = (1, 8, 16, 32, 128)
GROUPS = 8  # 1 to 8 query heads to a key/value head
KV_HEADS = 2
FEWER = 4  # of the kernels that are steps on the way, each fourth case


@dataclass(frozen=True)
class Case:
    """The kernels of one name, and what they are tried with."""

    kernels: str
    dtype: str
    head_dim: int
    block_size: int
    group: int


def shares(here: Here) -> list[tuple[Here, list[Case]]]:
    """The cases of each process."""
    pairs = [(head_dim, block_size) for block_size in BLOCK_SIZES for head_dim in HEAD_DIMS]
    pairs = here.pick(pairs, [(20, 3)])
    cases = [
        Case(name, dtype, head_dim, block_size, 1 + (i + 3 * j) % GROUPS)
        for name in here.names()
        for j, dtype in enumerate(here.dtypes(name))
        for i, (head_dim, block_size) in enumerate(pairs)
        if name == "triton" or not here.gpu or i % FEWER == j
    ]
    return [(here, cases[i :: here.workers]) for i in range(here.workers)]


def run(share: tuple[Here, list[Case]]) -> Iterator[Item]:
    """A row for each case and call: its error, the bound, and whether that holds."""
    here, cases = share
    for case in cases:
        for check in (store_kv, one_query, several_queries):
            row: Row = {"call": check.__name__, **asdict(case)}
            try:
                row |= check(case, here)
            except Exception as error:  # a case that cannot be compiled says nothing of the others
                row |= {"error": None, "ok": False, "why": last_words(error)}
            yield "checks", row


def store_kv(case: Case, here: Here) -> Row:
    """Slots in random order, some of them -1; every number of the pool must be as the reference leaves it."""
    num_blocks, num_tokens = 9, min(7, 4 * case.block_size)
    shape = (num_blocks, 2, 2, KV_HEADS, case.block_size, case.head_dim)
    dtype = getattr(torch, case.dtype)
    expected = torch.full(shape, math.nan, dtype=dtype, device=here.device)
    got = expected.clone()
    generator = torch.Generator().manual_seed(case.head_dim)
    kv = torch.randn(2, num_tokens, KV_HEADS, case.head_dim, generator=generator).to(here.device, dtype)
    slots = torch.randperm(num_blocks * case.block_size, generator=generator)[:num_tokens]
    slots[::3] = -1
    slots = slots.to(here.device)
    reference.store_kv(kv[0], kv[1], expected[:, 1, 0], expected[:, 1, 1], slots)
    kernels.get(case.kernels).store_kv(kv[0], kv[1], got[:, 1, 0], got[:, 1, 1], slots)
    different = (got != expected) & ~(got.isnan() & expected.isnan())
    wrong = int(different.sum().item())
    return {"error": wrong, "bound": 0, "ok": wrong == 0}


def one_query(case: Case, here: Here) -> Row:
    """A step of decoding: a query for each sequence."""
    lengths = _lengths(case.block_size, here)
    return _attention(case, here, lengths, [1] * len(lengths))


def several_queries(case: Case, here: Here) -> Row:
    """Whole prompts, and chunks with history."""
    lengths, size = _lengths(case.block_size, here), case.block_size
    wanted = [1, size, 5, 2, 2 * size, here.pick(100, 5), 1]
    return _attention(case, here, lengths, [max(1, min(pair)) for pair in zip(lengths, wanted, strict=True)])


def _lengths(block_size: int, here: Here) -> list[int]:
    """Around one block and several, a long one, and none at all."""
    return [1, block_size - 1, block_size, block_size + 1, 3 * block_size, here.pick(1537, 13), 0]


def _attention(case: Case, here: Here, lengths: list[int], queries: list[int]) -> Row:
    dtype = getattr(torch, case.dtype)
    heads = (KV_HEADS * case.group, KV_HEADS, case.head_dim)
    tried = PagedCase.make(
        heads, case.block_size, lengths, queries, dtype, here.device, poisoned=True, seed=case.group
    )
    exact = tried.exact()
    error = error_of(tried.run(kernels.get(case.kernels)), exact)
    torch_error = error_of(tried.run(reference), exact)
    bound = bound_of(dtype, torch_error)
    return {"error": error, "torch_error": torch_error, "bound": bound, "ok": error <= bound < math.inf}
