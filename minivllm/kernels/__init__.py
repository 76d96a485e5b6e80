"""Attention over paged memory, one module for each way to compute it (from chapter 3 on)."""

from importlib import import_module
from types import ModuleType


def get(name: str) -> ModuleType:
    """The module whose `store_kv` and `paged_attention` compute in this way: "torch"."""
    return import_module({"torch": "minivllm.kernels.reference"}[name])
