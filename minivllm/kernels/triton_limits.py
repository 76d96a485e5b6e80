"""Chapter 8: what the Triton kernels can do; anything else is refused, with the limit named.

Triton compiles for a GPU. On a CPU a kernel runs only in Triton's interpreter, program by program in NumPy:
right for learning and for tests, and far too slow for work. It is on where TRITON_INTERPRET=1 stands in the
environment before Triton is imported. That is the caller's to decide; this package never does it.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import JITFunction, driver

from minivllm.errors import InvalidOption

MIN_CAPABILITY = 80  # 8.0: before it there is no bfloat16, and less shared memory than the tiles take
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int32, torch.int64)
MAX_HEAD_DIM = 256  # above 64, one that is no multiple of 16 spills registers
MAX_GROUP = 64
INTERPRETED = not isinstance(tl.max, JITFunction)  # of Triton's own functions, so: since its import
WHAT_WORKS = (
    "Take attention='torch', or, to try the kernels out, set TRITON_INTERPRET=1 in the environment before "
    "Python starts: Triton's interpreter runs them on a CPU, slowly."
)


def check_machine(name: str = "triton") -> None:
    """Raises InvalidOption where no kernel can run at all: no GPU and no interpreter.

    name, here and below: what was asked for, one of the names of `kernels.MODULES`.
    """
    if not INTERPRETED and not torch.cuda.is_available():
        raise InvalidOption(
            f"attention={name!r} is not possible: it needs a GPU, and PyTorch finds none. {WHAT_WORKS}"
        )


def check_device(device: torch.device, name: str = "triton") -> None:
    """Raises InvalidOption for a device on which no kernel runs. On `meta` no number is there to run on, and
    kernels can be compiled for a GPU that is not here."""
    if device.type not in ("cuda", "cpu" if INTERPRETED else "meta"):
        raise _refusal(name, f"tensors on {device}", "only a CUDA device", WHAT_WORKS)
    if device.type == "cuda" and (found := capability(device)) < MIN_CAPABILITY:
        raise _refusal(
            name,
            f"{device}, whose compute capability is {found / 10:.1f}",
            f"{MIN_CAPABILITY / 10:.1f} or more",
            "Take attention='torch'.",
        )


def capability(device: torch.device) -> int:
    """Compute capability of a GPU, or of the one that is compiled for: 90 is 9.0. In the interpreter, 90."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return 10 * major + minor
    return 90 if INTERPRETED else driver.active.get_current_target().arch


def num_multiprocessors(device: torch.device) -> int:
    """Of a GPU; a CPU, in the interpreter, counts as one: programs run one after the other."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def check_model(
    dtype: torch.dtype, device: torch.device, head_dim: int, group: int, name: str = "triton"
) -> None:
    """Raises InvalidOption for a dtype, device, head_dim or group that the kernels do not have."""
    if dtype not in DTYPES:
        raise _refusal(
            name, f"{_name(dtype)} numbers", f"only {', '.join(map(_name, DTYPES))}", "Change dtype."
        )
    check_device(device, name)
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise _refusal(name, f"head_dim={head_dim}", f"at most {MAX_HEAD_DIM}", "Take attention='torch'.")
    if not 1 <= group <= MAX_GROUP:
        raise _refusal(
            name, f"{group} query heads to a key/value head", f"1 to {MAX_GROUP}", "Take attention='torch'."
        )


def check_tensors(group: int = 1, kernel: str = "triton", **tensors: Tensor) -> None:
    """Raises InvalidOption unless the kernels can read and write these tensors [..., head_dim]."""
    first = next(iter(tensors.values()))
    check_model(first.dtype, first.device, first.shape[-1], group, kernel)
    for name, tensor in tensors.items():
        if tensor.dtype != first.dtype or tensor.device != first.device:
            raise _refusal(
                kernel,
                f"{name} in {_name(tensor.dtype)} on {tensor.device}",
                f"what {next(iter(tensors))} is, {_name(first.dtype)} on {first.device}",
                "Convert one of them.",
            )
        if tensor.stride(-1) != 1:
            raise _refusal(
                kernel,
                f"{name} with a stride of {tensor.stride(-1)} in its last dimension",
                "only a last dimension that is contiguous, stride 1",
                "The other strides are free.",
            )


def check_store(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Raises InvalidOption for arguments of `store_kv` that do not go together, or that it does not have."""
    check_tensors(k=k, v=v, k_cache=k_cache, v_cache=v_cache)
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
    check_tensors(q.shape[1] // k_cache.shape[1], name, q=q, k_cache=k_cache, v_cache=v_cache, out=out)


def _misfit(function: str, **tensors: Tensor) -> InvalidOption:
    given = ", ".join(f"{name} {list(t.shape)} {_name(t.dtype)}" for name, t in tensors.items())
    return InvalidOption(
        f"{function} is not possible with {given}: these do not fit together. `kernels/reference.py` says "
        "which shape each has; tables, lengths and slots are int32 or int64."
    )


def _refusal(name: str, what: str, limit: str, advice: str) -> InvalidOption:
    return InvalidOption(f"attention={name!r} is not possible with {what}: {limit}. {advice}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
