"""Attention over paged memory, one module for each way to compute it (from chapter 3 on)."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from minivllm.errors import InvalidOption

if TYPE_CHECKING:
    import torch

# name -> the module that has it
MODULES = {
    "torch": "reference",
    "triton": "triton_paged",
    "triton-naive": "triton_naive",  # the steps on the way to "triton", kept to be compared with it
    "triton-tiled": "triton_tiled",
    "triton-grouped": "triton_grouped",
}


def get(name: str) -> ModuleType:
    """The module that has `store_kv` and `paged_attention` in this way: a name of MODULES, such as "torch".

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
    return import_module(f"minivllm.kernels.{MODULES[name]}")


def get_copy(name: str) -> ModuleType:
    """The module that has `copy_blocks` for these kernels (chapter 4; in Triton, chapter 8)."""
    get(name)
    return import_module(f"minivllm.kernels.{'block_copy' if name == 'torch' else 'triton_copy'}")


def check_model(name: str, dtype: torch.dtype, device: torch.device, head_dim: int, group: int) -> None:
    """Raises InvalidOption where these kernels cannot serve a model of this kind.

    group: query heads that share one key/value head.
    """
    get(name)
    if name.startswith("triton"):
        import_module("minivllm.kernels.triton_limits").check_model(dtype, device, head_dim, group, name)


def fastest(dtype: torch.dtype, device: torch.device, head_dim: int, group: int) -> str:
    """The name of the fastest kernels that can serve a model of this kind."""
    if device.type == "cuda":
        try:
            check_model("triton", dtype, device, head_dim, group)
            return "triton"
        except InvalidOption:
            pass
    return "torch"
