"""Above the chapters: a call of each Triton kernel, in every shape that may change what is compiled.

A kernel is compiled anew for a dtype, a head_dim, a block size, a group, a tile and a capability. Here they
are named, and a call is made with tensors that have no numbers, as `ahead_of_time` takes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import product

import torch

from minivllm.kernels import MODULES
from minivllm.lab.ahead_of_time import Compiled, compile_launches

MOVES = {"store_kv": "triton_store", "copy_blocks": "triton_copy"}  # kernels that only move numbers
KERNELS = (*MOVES, *(name for name in MODULES if name.startswith("triton")))
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
KV_HEADS = 4


@dataclass(frozen=True)
class Step:
    """num_seqs sequences with query_len new tokens each; none is longer than max_seq_len."""

    num_seqs: int
    query_len: int
    max_seq_len: int


STEPS = {
    "decode": Step(64, 1, 16),
    "decode in parts": Step(1, 1, 8192),  # one sequence alone: its keys are shared out among programs
    "few queries": Step(8, 5, 4096),
    "prefill": Step(2, 1024, 4096),
}


@dataclass(frozen=True, order=True)
class Configuration:
    """One way to call a kernel. group: query heads to a key/value head; capability: 90 is 9.0."""

    kernel: str
    dtype: str
    head_dim: int
    block_size: int
    group: int
    step: str
    capability: int


def combinations(
    kernel: Iterable[str],
    dtype: Iterable[str],
    head_dim: Iterable[int],
    block_size: Iterable[int],
    group: Sequence[int],
    step: Sequence[str],
    capability: Iterable[int],
) -> list[Configuration]:
    """Every combination of these values, in sorted order. What only moves numbers knows neither group nor
    step, and has the first of each."""
    rest = list(product(dtype, head_dim, block_size, group, step, capability))
    found = {
        Configuration(name, *values)
        for name, values in product(kernel, rest)
        if name not in MOVES or values[3:5] == (group[0], step[0])
    }
    return sorted(found)


def compiled(configuration: Configuration) -> list[Compiled]:
    """The kernels that this call launches, compiled. Raises InvalidOption as `check_compiler` does."""
    return compile_launches(lambda: call(configuration), configuration.capability)


def call(c: Configuration) -> None:
    """Call the kernel on the meta device. The pool has two layers, and this is the second."""
    step, dtype = STEPS[c.step], DTYPES[c.dtype]
    num_tokens, max_blocks = step.num_seqs * step.query_len, -(-step.max_seq_len // c.block_size)
    heads = 1 if step.num_seqs == 1 else KV_HEADS
    module = import_module(f"minivllm.kernels.{MOVES.get(c.kernel) or MODULES[c.kernel]}")
    with torch.device("meta"):
        pool = torch.empty(9, 2, 2, heads, c.block_size, c.head_dim, dtype=dtype)
        k = torch.empty(num_tokens, heads, c.head_dim, dtype=dtype)
        q = torch.empty(num_tokens, heads * c.group, c.head_dim, dtype=dtype)
        slots = torch.empty(num_tokens, dtype=torch.int64)
        tables = torch.empty(step.num_seqs, max_blocks, dtype=torch.int32)
        lengths = torch.empty(step.num_seqs, dtype=torch.int32)
        starts = torch.empty(step.num_seqs + 1, dtype=torch.int32)
    k_cache, v_cache = pool[:, 1, 0], pool[:, 1, 1]
    if c.kernel == "copy_blocks":
        module.copy_blocks(pool, pool, [(1, 2)])
    elif c.kernel == "store_kv":
        module.store_kv(k, k, k_cache, v_cache, slots)
    else:
        hints = {"max_query_len": step.query_len, "max_seq_len": step.max_seq_len}
        module.paged_attention(q, k_cache, v_cache, tables, lengths, starts, 1.0, **hints)
