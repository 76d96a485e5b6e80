"""Attention over paged memory, one module for each way to compute it (from chapter 3 on)."""

from importlib import import_module
from types import ModuleType

from minivllm.errors import InvalidOption


def get(name: str) -> ModuleType:
    """The module that has `store_kv` and `paged_attention` in this way: "torch". Raises InvalidOption."""
    if name != "torch":
        raise InvalidOption(f"attention={name!r} is not possible: it must be torch.")
    return import_module("minivllm.kernels.reference")
