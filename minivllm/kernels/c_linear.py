"""Chapter 8: matrix products in C, with weights in panels; the numbers of a linear layer, up to rounding.

Sums are in float32. In bfloat16, rows and weights stay 16 bits wide, and two neighbours are multiplied at
once: by an instruction where the processor has one for it, which takes what is smaller than 2^-126 for zero;
else as float32.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_int64, c_void_p

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.kernels.c_build import library
from minivllm.kernels.c_rows import DTYPES

WORD = 4  # bytes, the unit of a panel: one number in float32, two in bfloat16
THEN = {"none": 0, "swish": 1, "add": 2, "mul": 3}  # as c_linear.c counts them


class Product(ctypes.Structure):
    """The arguments of `linear`; x_row counts words, other_row numbers."""

    _fields_ = [
        *((name, c_void_p) for name in ("x", "panels", "out", "bias", "other")),
        *((name, c_int64) for name in ("num_rows", "words", "out_features", "x_row", "other_row")),
        *((name, c_int64) for name in ("then", "dtype", "num_threads")),
    ]


class Panels:
    """How weights are kept and multiplied. size: rows of a panel; multiplies_bfloat16: whether pairs of
    bfloat16 are multiplied by one instruction. Raises InvalidOption where the kernels cannot be had."""

    def __init__(self) -> None:
        self._linear, self.size = library().linear, int(library().panel_size())
        self.multiplies_bfloat16 = bool(library().multiplies_bfloat16())

    def pack(self, weight: Tensor) -> Tensor:
        """weight [out_features, in_features], float32 or bfloat16 -> panels [num_panels, words of a row,
        size, numbers in a word]; what stands for no row or no number is zero."""
        in_word = WORD // weight.element_size()
        rows, columns = -weight.shape[0] % self.size, -weight.shape[1] % in_word
        whole = F.pad(weight, (0, columns, 0, rows)) if rows or columns else weight
        words = whole.reshape(-1, self.size, whole.shape[1] // in_word, in_word)
        return words.transpose(1, 2).clone(memory_format=torch.contiguous_format)

    def unpack(self, packed: Tensor, out_features: int, in_features: int) -> Tensor:
        """The weight [out_features, in_features] that was packed, a copy."""
        rows = packed.transpose(1, 2).reshape(-1, packed.shape[1] * packed.shape[3])
        return rows[:out_features, :in_features].clone()

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
        in_word = packed.shape[3]
        if x.shape[1] % in_word or x.stride(0) % in_word or x.data_ptr() % WORD:
            x = F.pad(x, (0, -x.shape[1] % in_word))  # a copy: rows begin and end with a word
        out = torch.empty((len(x), out_features), dtype=x.dtype)
        product = Product(
            x.data_ptr(), packed.data_ptr(), out.data_ptr(),
            None if bias is None else bias.data_ptr(), None if other is None else other.data_ptr(),
            len(x), packed.shape[1], out_features, x.stride(0) // in_word,
            0 if other is None else other.stride(0),
            THEN[then], DTYPES[x.dtype], torch.get_num_threads(),
        )  # fmt: skip
        for given in (x, other):
            assert given is None or given.stride(1) == 1 or given.shape[1] == 1, (
                "numbers of a row lie together"
            )
        assert x.shape[1] == packed.shape[1] * in_word
        assert x.device.type == "cpu"
        assert other is None or other.shape == out.shape
        assert bias is None or (bias.shape == (out_features,) and bias.is_contiguous())
        assert packed.shape[0] == -(-out_features // self.size)
        assert all(given is None or given.dtype == x.dtype for given in (packed, bias, other))
        self._linear(byref(product))
        return out
