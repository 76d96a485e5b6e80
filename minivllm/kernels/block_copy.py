"""Chapter 4: copying whole blocks, in PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def copy_blocks(source: Tensor, target: Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """Copy blocks with all their layers: pairs of (block read, block written), no block twice written.

    source, target: pools [num_blocks, ...] on one device, with blocks of the same shape and dtype. They may
    be the same pool, and then no block that is written is read. PyTorch gathers the blocks into a tensor of
    its own and writes them from there: each byte is read twice and written twice.
    """
    if pairs:
        read, written = torch.tensor(pairs, device=source.device).unbind(1)
        target[written] = source[read]
