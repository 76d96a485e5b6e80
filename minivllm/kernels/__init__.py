"""Attention over paged memory, one module for each way to compute it (from chapter 3 on)."""

from __future__ import annotations

import warnings
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from minivllm.errors import InvalidOption

if TYPE_CHECKING:
    import torch

# name -> the module that has it
MODULES = {
    "reference": "reference",  # what all others are compared with
    "torch": "torch_paged",
    "triton": "triton_paged",
    "triton-naive": "triton_naive",  # the steps on the way to "triton", kept to be compared with it
    "triton-tiled": "triton_tiled",
    "triton-grouped": "triton_grouped",
    "c": "c_paged",  # for a CPU
}


def get(name: str) -> ModuleType:
    """The module that has `store_kv` and `paged_attention` in this way: a name of MODULES: "torch", ...

    Raises InvalidOption for another name, and for kernels that cannot run on this machine.
    """
    if not isinstance(name, str) or name not in MODULES:
        raise InvalidOption(f"attention={name!r} is not possible: it must be {' or '.join(MODULES)}.")
    if name.startswith("triton"):
        try:
            import_module("triton")
        except ImportError as error:
            raise InvalidOption(
                f"attention={name!r} is not possible: Triton cannot be imported ({error}). "
                "It is made for Linux. Take attention='torch'."
            ) from error
        import_module("minivllm.kernels.triton_limits").check_machine(name)
    if name == "c":
        import_module("minivllm.kernels.c_paged").check_machine()
    return import_module(f"minivllm.kernels.{MODULES[name]}")


def get_copy(name: str) -> ModuleType:
    """The module that has `copy_blocks` for these kernels (chapter 4; in Triton, chapter 8)."""
    get(name)
    return import_module(f"minivllm.kernels.{'triton_copy' if name.startswith('triton') else 'block_copy'}")


def check_model(name: str, dtype: torch.dtype, device: torch.device, head_dim: int, group: int) -> None:
    """Raises InvalidOption where these kernels cannot serve a model of this kind.

    group: query heads that share one key/value head.
    """
    get(name)
    if name.startswith("triton"):
        import_module("minivllm.kernels.triton_limits").check_model(dtype, device, head_dim, group, name)
    if name == "c":
        import_module("minivllm.kernels.c_paged").check_model(dtype, device, head_dim, group)


def fastest(dtype: torch.dtype, device: torch.device, head_dim: int, group: int) -> str:
    """The name of the fastest kernels that can serve a model of this kind on this machine."""
    kind = dtype, device, head_dim, group
    if device.type == "cuda" and _serves("triton", *kind):
        return "triton"
    if device.type == "cpu" and _has_numbers(*kind):
        try:
            get("c")
            return "c"
        except InvalidOption as error:  # shown once a program, as Python does with warnings
            said = "PyTorch's slower attention is used, and no products, norm and rotary embedding in C"
            warnings.warn(f"{said}: {error}", RuntimeWarning, stacklevel=2)
    return "torch"


def _serves(name: str, dtype: torch.dtype, device: torch.device, head_dim: int, group: int) -> bool:
    try:
        check_model(name, dtype, device, head_dim, group)
    except InvalidOption:
        return False
    return True


def _has_numbers(dtype: torch.dtype, device: torch.device, head_dim: int, group: int) -> bool:
    """Whether the kernel in C has these numbers, compiled or not."""
    try:
        import_module("minivllm.kernels.limits").check_numbers("c", dtype, head_dim, group)
    except InvalidOption:
        return False
    return True
