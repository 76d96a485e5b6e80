"""Tensors that end where a page ends, with a page after them that cannot be read: who reads on, crashes."""

from __future__ import annotations

import ctypes
import mmap

import torch
from torch import Tensor


def guarded(given: Tensor) -> Tensor:
    """A copy whose last number is the last that can be read. Linux and macOS."""
    size = given.numel() * given.element_size()
    pages = -(-size // mmap.PAGESIZE)
    memory = mmap.mmap(-1, (pages + 1) * mmap.PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    guard = ctypes.c_void_p(start + pages * mmap.PAGESIZE)
    assert ctypes.CDLL(None, use_errno=True).mprotect(guard, ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    room = memoryview(memory)[pages * mmap.PAGESIZE - size : pages * mmap.PAGESIZE]
    return torch.frombuffer(room, dtype=given.dtype).view(given.shape).copy_(given)
