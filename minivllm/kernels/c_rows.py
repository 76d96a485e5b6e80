"""Chapter 8: the norm and the rotary embedding in C, with the numbers of `RMSNorm` and `apply_rotary`.

Between the matrix products of a layer PyTorch starts some 30 operations on rows that are a few hundred
numbers long; what they cost is the start. Here they are four.
"""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_int64, c_void_p

import torch
from torch import Tensor

from minivllm.kernels.c_build import library

DTYPES = {torch.float32: 0, torch.bfloat16: 2}  # as c_numbers.h counts them
MAX_ROW = 16384  # numbers


class Rows(ctypes.Structure):
    """Where rows stand; strides count numbers."""

    _fields_ = [("data", c_void_p), ("token", c_int64), ("head", c_int64)]

    @classmethod
    def of(cls, x: Tensor) -> Rows:
        """x [num_tokens, num_heads, size]."""
        token, head, last = x.stride()
        assert last == 1, "numbers of a row lie beside each other"
        return cls(x.data_ptr(), token, head)


class RowKernels:
    """The compiled functions. Raises InvalidOption where they cannot be had."""

    def __init__(self) -> None:
        loaded = library()
        self._norm, self._rotary = loaded.rms_norm, loaded.apply_rotary
        self._norm.argtypes = [Rows, Rows, c_void_p, *[c_int64] * 3, c_double, *[c_int64] * 2]
        self._rotary.argtypes = [Rows, *[c_void_p] * 2, *[c_int64] * 5]

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [..., size] of two or three dimensions, weight [size], contiguous -> x / rms(x) * weight."""
        out = torch.empty(x.shape, dtype=x.dtype)
        rows = x.unsqueeze(1) if x.dim() == 2 else x
        to = Rows(out.data_ptr(), rows.shape[1] * rows.shape[2], rows.shape[2])
        threads = torch.get_num_threads()
        self._norm(Rows.of(rows), to, weight.data_ptr(), *rows.shape, eps, DTYPES[x.dtype], threads)
        return out

    def apply_rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [num_tokens, num_heads, head_dim] turned in place; cos, sin [num_tokens, 1, head_dim / 2]."""
        threads = torch.get_num_threads()
        self._rotary(Rows.of(x), cos.data_ptr(), sin.data_ptr(), *x.shape, DTYPES[x.dtype], threads)
        return x
