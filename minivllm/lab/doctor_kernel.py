"""Above the chapters: one Triton kernel whose right answer is known, to test an installation with.

Run as a module it compares the kernel with PyTorch and prints one line. It says nothing of this project's
own kernels: where it fails, the installation is at fault.
"""

from __future__ import annotations

import sys

import torch
import triton
import triton.language as tl


@triton.jit
def row_softmax_kernel(x_ptr, out_ptr, num_columns, x_stride, out_stride, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Softmax of one row per program: a masked load, two reductions, a masked store."""
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < num_columns
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=-float("inf"))
    numerator = tl.exp(x - tl.max(x, axis=0))
    tl.store(out_ptr + row * out_stride + column, numerator / tl.sum(numerator, axis=0), mask=inside)


def largest_error(device: str) -> float:
    """The kernel's largest distance from PyTorch's softmax, on an odd shape with distinct values."""
    x = torch.linspace(-9, 7, 5 * 37, device=device).sin().mul(4).view(5, 37)
    out = torch.full_like(x, float("nan"))
    row_softmax_kernel[(x.shape[0],)](x, out, x.shape[1], x.stride(0), out.stride(0), BLOCK=64)
    return (out - x.softmax(dim=-1)).abs().nan_to_num(nan=float("inf")).max().item()


if __name__ == "__main__":
    sys.stdout.write(f"{largest_error(sys.argv[1])}\n")
