"""Chapter 8: what the kernels in Triton and in C can do; anything else is refused, with the limit named.

A kernel takes addresses and strides on trust: what does not fit would be read from somewhere else. So shapes,
dtypes and strides are looked at before each launch, or once for all layers of a step that are alike. What
stands in tables and lengths is not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minivllm.errors import InvalidOption

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int32, torch.int64)
MAX_HEAD_DIM = 256  # in Triton, one above 64 that is no multiple of 16 spills registers
MAX_GROUP = 64


def check_numbers(name: str, dtype: torch.dtype, head_dim: int, group: int) -> None:
    """Raises InvalidOption for a dtype, head_dim or group that the kernels do not have.

    name, here and below: what was asked for, one of the names of `kernels.MODULES`.
    """
    if dtype not in DTYPES:
        raise refusal(
            name, f"{_name(dtype)} numbers", f"only {', '.join(map(_name, DTYPES))}", "Change dtype."
        )
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise refusal(name, f"head_dim={head_dim}", f"at most {MAX_HEAD_DIM}", "Take attention='torch'.")
    if not 1 <= group <= MAX_GROUP:
        raise refusal(
            name, f"{group} query heads to a key/value head", f"1 to {MAX_GROUP}", "Take attention='torch'."
        )


def check_tensors(kernel: str, group: int = 1, **tensors: Tensor) -> None:
    """Raises InvalidOption unless the kernels can read and write these tensors [..., head_dim]."""
    first = next(iter(tensors.values()))
    check_numbers(kernel, first.dtype, first.shape[-1], group)
    for name, tensor in tensors.items():
        if tensor.dtype != first.dtype or tensor.device != first.device:
            raise refusal(
                kernel,
                f"{name} in {_name(tensor.dtype)} on {tensor.device}",
                f"what {next(iter(tensors))} is, {_name(first.dtype)} on {first.device}",
                "Convert one of them.",
            )
        if tensor.stride(-1) != 1:
            raise refusal(
                kernel,
                f"{name} with a stride of {tensor.stride(-1)} in its last dimension",
                "only a last dimension that is contiguous, stride 1",
                "The other strides are free.",
            )


def check_store(
    name: str, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Raises InvalidOption for arguments of `store_kv` that do not go together, or that it does not have."""
    check_tensors(name, k=k, v=v, k_cache=k_cache, v_cache=v_cache)
    fits = k.dim() == 3 and k_cache.dim() == 4 and k.shape == v.shape and k_cache.shape == v_cache.shape
    fits = fits and k.shape[1:] == (k_cache.shape[1], k_cache.shape[3])
    if not fits or slot_mapping.shape != k.shape[:1] or slot_mapping.dtype not in INTEGERS:
        raise _misfit("store_kv", k=k, v=v, k_cache=k_cache, v_cache=v_cache, slot_mapping=slot_mapping)


def check_attention(
    name: str,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start: Tensor,
    out: Tensor,
) -> None:
    """Raises InvalidOption for arguments of `paged_attention` that do not go together, or that it does not
    have. What the tables and lengths say is not looked at: it lies on the device."""
    fits = q.dim() == 3 and k_cache.dim() == 4 and k_cache.shape == v_cache.shape and out.shape == q.shape
    fits = fits and q.shape[2] == k_cache.shape[3] and k_cache.shape[1] > 0
    fits = fits and q.shape[1] % k_cache.shape[1] == 0
    fits = fits and seq_lens.dim() == 1 and query_start.shape == (len(seq_lens) + 1,)
    fits = fits and block_tables.dim() == 2 and len(block_tables) == len(seq_lens) <= len(q)
    integers = all(tensor.dtype in INTEGERS for tensor in (block_tables, seq_lens, query_start))
    if not fits or not integers or (len(q) > 0 and len(seq_lens) == 0):
        raise _misfit(
            "paged_attention", q=q, k_cache=k_cache, v_cache=v_cache, block_tables=block_tables,
            seq_lens=seq_lens, query_start=query_start, out=out,
        )  # fmt: skip
    check_tensors(name, q.shape[1] // k_cache.shape[1], q=q, k_cache=k_cache, v_cache=v_cache, out=out)


def _misfit(function: str, **tensors: Tensor) -> InvalidOption:
    given = ", ".join(f"{name} {list(t.shape)} {_name(t.dtype)}" for name, t in tensors.items())
    return InvalidOption(
        f"{function} is not possible with {given}: these do not fit together. `kernels/reference.py` says "
        "which shape each has; tables, lengths and slots are int32 or int64."
    )


def refusal(name: str, what: str, limit: str, advice: str) -> InvalidOption:
    """The error for what these kernels do not have."""
    return InvalidOption(f"attention={name!r} is not possible with {what}: {limit}. {advice}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
