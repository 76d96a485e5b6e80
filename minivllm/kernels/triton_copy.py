"""Chapter 8: copying whole blocks, as a Triton kernel.

A block is one contiguous page with all its layers, so a copy needs no shapes: program (j, i) moves part j of
the page of pair i, from where it is read to where it is written. Each byte is read once and written once,
where PyTorch's `pool[written] = pool[read]` moves it through a tensor in between: half the traffic. How much
time that saves is not measured yet.

    pairs [[7, 2], [4, 9]]     page 7: |0|1|2|3| -> page 2: |0|1|2|3|      page 4: |0|1|2|3| -> page 9
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from minivllm.errors import InvalidOption
from minivllm.kernels.triton_limits import check_device

PART = 4096  # numbers of a page that one program moves


@triton.jit
def copy_blocks_kernel(  # type: ignore[no-untyped-def]
    source, target, pairs, source_block, target_block, page, PART: tl.constexpr
):
    """Program (j, i) copies part j of pair i; `source_block` and `target_block` are strides."""
    pair = pairs + 2 * tl.program_id(1)
    read, written = tl.load(pair).to(tl.int64), tl.load(pair + 1).to(tl.int64)
    offset = tl.program_id(0) * PART + tl.arange(0, PART)
    inside = offset < page
    numbers = tl.load(source + read * source_block + offset, mask=inside)
    tl.store(target + written * target_block + offset, numbers, mask=inside)


def copy_blocks(source: Tensor, target: Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """Copy blocks with all their layers: `block_copy.copy_blocks` in one launch.

    One of the pools may also lie in pinned CPU memory, which a GPU reaches by itself. Raises InvalidOption
    for pools whose pages differ or are not contiguous, and for a device without kernels.
    """
    check_device(target.device if source.device.type == "cpu" else source.device)
    for name, pool in (("source", source), ("target", target)):
        if pool.shape[1:] != source.shape[1:] or pool.dtype != source.dtype or not pool[:1].is_contiguous():
            raise InvalidOption(
                f"copy_blocks is not possible with a {name} of {tuple(pool.shape)} in {pool.dtype}, strides "
                f"{pool.stride()}: both pools need contiguous blocks of one shape and dtype."
            )
    if not pairs:
        return
    limits = len(source), len(target)
    for pair in pairs:
        if len(pair) != 2 or not all(0 <= block < n for block, n in zip(pair, limits, strict=True)):
            raise InvalidOption(
                f"copy_blocks is not possible with {pair}: a pair is (block read, block written), of "
                f"{limits[0]} and {limits[1]} blocks."
            )
    page = source[0].numel()
    device = source.device if source.is_cuda else target.device
    with torch.cuda.device(device) if device.type == "cuda" else torch.cuda.device_of(source):
        copy_blocks_kernel[triton.cdiv(page, PART), len(pairs)](
            source, target, torch.tensor(pairs, dtype=torch.int32, device=device),
            source.stride(0), target.stride(0), page, PART=PART,
        )  # fmt: skip
