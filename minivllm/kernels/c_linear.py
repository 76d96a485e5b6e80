"""Chapter 8: matrix products in C, with weights in panels; the numbers of a linear layer, up to rounding.

Sums are in float32. In bfloat16, weights stay 16 bits wide in memory and become float32 as they are read.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_int64, c_void_p

import torch
from torch import Tensor

from minivllm.kernels.c_build import library
from minivllm.kernels.c_rows import DTYPES

THEN = {"none": 0, "swish": 1, "add": 2, "mul": 3}  # as c_linear.c counts them


class Product(ctypes.Structure):
    """The arguments of `linear`; strides count numbers."""

    _fields_ = [
        *((name, c_void_p) for name in ("x", "out", "panels", "bias", "other")),
        *((name, c_int64) for name in ("num_rows", "in_features", "out_features", "x_row", "other_row")),
        *((name, c_int64) for name in ("then", "dtype", "num_threads")),
    ]


class Panels:
    """How weights are kept and multiplied. Raises InvalidOption where the kernels cannot be had."""

    def __init__(self) -> None:
        self._linear, self.size = library().linear, int(library().panel_size())

    def pack(self, weight: Tensor) -> Tensor:
        """weight [out_features, in_features], float32 or bfloat16 -> panels [num_panels, in_features, size],
        those of the last that stand for no row zero."""
        out_features, in_features = weight.shape
        num_panels = -(-out_features // self.size)
        packed = weight.new_zeros(num_panels, in_features, self.size)
        whole = out_features // self.size  # those that are full
        packed[:whole] = weight[: whole * self.size].view(whole, self.size, in_features).transpose(1, 2)
        packed[whole:, :, : out_features % self.size] = weight[whole * self.size :].T
        return packed

    def unpack(self, packed: Tensor, out_features: int) -> Tensor:
        """The weight [out_features, in_features] that was packed, a copy."""
        return packed.transpose(1, 2).reshape(-1, packed.shape[1])[:out_features].clone()

    def linear(
        self,
        x: Tensor,
        packed: Tensor,
        bias: Tensor | None,
        out_features: int,
        then: str,
        other: Tensor | None,
    ) -> Tensor:
        """x [rows, in_features] -> [rows, out_features]; then "swish": silu of it; "add", "mul": with `other`
        of its shape. All in one dtype."""
        rows, out = x.float(), torch.empty((len(x), out_features), dtype=x.dtype)
        product = Product(
            rows.data_ptr(), out.data_ptr(), packed.data_ptr(),
            None if bias is None else bias.data_ptr(), None if other is None else other.data_ptr(),
            *rows.shape, out_features, rows.stride(0), 0 if other is None else other.stride(0),
            THEN[then], DTYPES[x.dtype], torch.get_num_threads(),
        )  # fmt: skip
        for given in (rows, other):
            assert given is None or given.stride(1) == 1 or given.shape[1] == 1, (
                "numbers of a row lie together"
            )
        assert rows.shape[1] == packed.shape[1]
        assert packed.shape[0] == -(-out_features // self.size)
        assert all(given is None or given.dtype == x.dtype for given in (packed, bias, other))
        self._linear(byref(product))
        return out
