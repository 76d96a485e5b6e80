"""Chapter 6: the tensor half of swapping: a second pool in CPU memory, and copies between the two.

On a GPU the copies are queued behind each other and behind the step's kernels, on one stream: so they happen
in the order of the calls, and the host need not wait. For that the CPU pool must be pinned, that is, kept
by the operating system where it is, so that the GPU can reach it by itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from minivllm.memory.sharing_store import SharingStore
from minivllm.model.config import ModelConfig


class SwapStore(SharingStore):
    """The device's pool, and cpu_kv[num_cpu_blocks, ...] with blocks of the same shape and dtype."""

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        attention: str = "reference",
        num_cpu_blocks: int = 0,
    ):
        super().__init__(config, num_blocks, block_size, dtype, device, attention)
        shape = (num_cpu_blocks, *self.kv.shape[1:])
        self.cpu_kv = torch.empty(shape, dtype=dtype, device="cpu", pin_memory=self.kv.is_cuda)

    def swap_out(self, transfers: Sequence[tuple[int, int]]) -> None:
        """Copy blocks to the CPU, (device block read, CPU block written); one copy each, all layers in it."""
        for source, target in transfers:
            self.cpu_kv[target].copy_(self.kv[source], non_blocking=True)

    def swap_in(self, transfers: Sequence[tuple[int, int]]) -> None:
        """Copy blocks to the device, (CPU block read, device block written), after all swap-outs."""
        for source, target in transfers:
            self.kv[target].copy_(self.cpu_kv[source], non_blocking=True)
