"""Chapter 8: where the Triton kernels can run; anything else is refused, with the limit named.

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
from minivllm.kernels import limits

MIN_CAPABILITY = 80  # 8.0: before it there is no bfloat16, and less shared memory than the tiles take
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
        raise limits.refusal(name, f"tensors on {device}", "only a CUDA device", WHAT_WORKS)
    if device.type == "cuda" and (found := capability(device)) < MIN_CAPABILITY:
        raise limits.refusal(
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
    limits.check_numbers(name, dtype, head_dim, group)
    check_device(device, name)


def check_store(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Raises InvalidOption for arguments of `store_kv` that do not go together, or that it does not have."""
    check_device(k.device)
    limits.check_store("triton", k, v, k_cache, v_cache, slot_mapping)


def check_attention(name: str, q: Tensor, *others: Tensor) -> None:
    """Raises InvalidOption for arguments of `paged_attention` that do not go together, or that it does not
    have: the others in its order, and out."""
    check_device(q.device, name)
    limits.check_attention(name, q, *others)
