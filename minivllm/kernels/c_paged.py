"""Chapter 8: the C kernels under the names of the reference: `store_kv` and `paged_attention`.

Python hands over addresses, sizes and strides, in the order in which the structures of c_paged.c have them.
To fill a structure and to check what goes into it takes longer than a short step's attention. All layers of
a step have the same tables and the same strides; so a `Plan` keeps both structures, and from the second layer
on only addresses change.

Sums, scores and weights are in float32 throughout. Only factors stay 16 bits wide: keys, values and queries
in bfloat16, whose products float32 holds exactly. Keys and values in float16 are converted as they are read,
queries and results here. As many threads work as PyTorch's operations have; compiled with GCC, they are the
same threads.
"""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_int64, c_void_p
from typing import TypeAlias

import torch
from torch import Tensor

from minivllm.kernels import limits
from minivllm.kernels.c_build import library

DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # in the order of c_numbers.h
CACHES = [(f"{cache}_{name}", c_void_p if name == "data" else c_int64)
          for cache in ("k_cache", "v_cache") for name in ("data", "block", "head", "slot")]  # fmt: skip

Layout: TypeAlias = tuple[tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device], ...]


class Step(ctypes.Structure):
    """The arguments of `paged_attention`; strides count numbers."""

    _fields_ = [
        *CACHES,
        *((name, c_int64) for name in ("block_size", "num_kv_heads", "head_dim", "dtype", "num_threads")),
        *((name, c_void_p) for name in ("q", "out")),
        *((name, c_int64) for name in ("row_dtype", "q_token", "q_head", "out_token", "out_head", "group")),
        *((name, c_void_p) for name in ("block_tables", "seq_lens", "query_start")),
        *((name, c_int64) for name in ("table_row", "num_seqs")),
        ("scale", c_double),
    ]


class Tokens(ctypes.Structure):
    """The arguments of `store_kv`; strides count numbers."""

    _fields_ = [
        *CACHES,
        *((name, c_void_p) for name in ("k", "v")),
        *((name, c_int64) for name in ("k_token", "k_head", "v_token", "v_head")),
        ("slot_mapping", c_void_p),
        *((name, c_int64) for name in ("num_tokens", "num_kv_heads", "head_dim", "block_size")),
        *((name, c_int64) for name in ("itemsize", "num_threads")),
    ]


class Plan:
    """What the layers of a step have in common: tables and lengths, and both structures, filled for tensors
    of one layout. The tables and lengths must stay as they are while it is in use."""

    def __init__(self, block_tables: Tensor, seq_lens: Tensor, query_start: Tensor):
        self.tables, self.lengths, self.starts = (
            tensor.int().contiguous() for tensor in (block_tables, seq_lens, query_start)
        )
        self.step, self.tokens = Step(), Tokens()
        self.step_layout: Layout = ()
        self.tokens_layout: Layout = ()


def prepare(block_tables: Tensor, seq_lens: Tensor, query_start: Tensor, block_size: int) -> Plan:
    """A plan for all layers of a step, to be handed to `store_kv` and `paged_attention`."""
    return Plan(block_tables, seq_lens, query_start)


def store_kv(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, *, plan: Plan | None = None
) -> None:
    """Write each token's key and value into its slot; arguments as in `reference.store_kv`.

    Any strides, but the last dimension must be contiguous. Raises InvalidOption for what the kernels do not
    have.
    """
    tokens, layout = (
        Tokens() if plan is None else plan.tokens,
        layout_of(k, v, k_cache, v_cache, slot_mapping),
    )
    if plan is None or plan.tokens_layout != layout:
        check_device(k.device)
        limits.check_store("c", k, v, k_cache, v_cache, slot_mapping)
        tokens.k_cache_block, tokens.k_cache_head, tokens.k_cache_slot = k_cache.stride()[:3]
        tokens.v_cache_block, tokens.v_cache_head, tokens.v_cache_slot = v_cache.stride()[:3]
        tokens.k_token, tokens.k_head, tokens.v_token, tokens.v_head = *k.stride()[:2], *v.stride()[:2]
        tokens.num_tokens, tokens.num_kv_heads, tokens.head_dim = k.shape
        tokens.block_size, tokens.itemsize = k_cache.shape[2], k.element_size()
        if plan is not None:
            plan.tokens_layout = layout
    slot_mapping = slot_mapping.long().contiguous()
    tokens.k_cache_data, tokens.v_cache_data = k_cache.data_ptr(), v_cache.data_ptr()
    tokens.k, tokens.v, tokens.slot_mapping = k.data_ptr(), v.data_ptr(), slot_mapping.data_ptr()
    tokens.num_threads = torch.get_num_threads()
    library().store_kv(ctypes.byref(tokens))


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
    lengths. Any strides, but the last dimension of q, caches and out must be contiguous. Raises InvalidOption
    for what the kernels do not have.
    """
    out = torch.empty_like(q) if out is None else out
    plan = plan or Plan(block_tables, seq_lens, query_start)
    step, layout = plan.step, layout_of(q, k_cache, v_cache, out)
    rows, result = (
        (q.float(), torch.empty_like(q, dtype=torch.float32)) if q.dtype == torch.float16 else (q, out)
    )
    if plan.step_layout != layout:
        check_device(q.device)
        limits.check_attention("c", q, k_cache, v_cache, block_tables, seq_lens, query_start, out)
        step.k_cache_block, step.k_cache_head, step.k_cache_slot = k_cache.stride()[:3]
        step.v_cache_block, step.v_cache_head, step.v_cache_slot = v_cache.stride()[:3]
        step.num_kv_heads, step.block_size, step.head_dim = k_cache.shape[1:]
        step.dtype, step.row_dtype = DTYPES.index(q.dtype), DTYPES.index(rows.dtype)
        step.q_token, step.q_head, step.out_token, step.out_head = *rows.stride()[:2], *result.stride()[:2]
        step.group = q.shape[1] // k_cache.shape[1]
        step.block_tables, step.table_row = plan.tables.data_ptr(), plan.tables.shape[1]
        step.seq_lens, step.num_seqs = plan.lengths.data_ptr(), len(plan.lengths)
        step.query_start = plan.starts.data_ptr()
        plan.step_layout = layout
    step.k_cache_data, step.v_cache_data = k_cache.data_ptr(), v_cache.data_ptr()
    step.q, step.out, step.scale = rows.data_ptr(), result.data_ptr(), scale
    step.num_threads = torch.get_num_threads()
    if library().paged_attention(ctypes.byref(step)):
        raise MemoryError("attention='c' has no memory for its intermediate results.")
    return out if result is out else out.copy_(result)


def layout_of(*tensors: Tensor) -> Layout:
    """All that matters of tensors but where they lie and what stands in them."""
    return tuple((t.shape, t.stride(), t.dtype, t.device) for t in tensors)


def check_machine() -> None:
    """Raises InvalidOption where the kernels cannot be compiled; compiles them at the first call."""
    library()


def check_model(dtype: torch.dtype, device: torch.device, head_dim: int, group: int) -> None:
    """Raises InvalidOption for a dtype, device, head_dim or group that the kernels do not have."""
    limits.check_numbers("c", dtype, head_dim, group)
    check_device(device)


def check_device(device: torch.device) -> None:
    """Raises InvalidOption for any device but the CPU."""
    if device.type != "cpu":
        raise limits.refusal(
            "c", f"tensors on {device}", "only the CPU", "Take attention='torch' or 'triton'."
        )
