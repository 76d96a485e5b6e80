"""Chapter 4: the tensor half of shared blocks: a copy before a write."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from minivllm import kernels
from minivllm.memory.paged_store import PagedStore
from minivllm.model.config import ModelConfig


class SharingStore(PagedStore):
    """The pool, in which whole blocks can be copied."""

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        attention: str = "reference",
    ):
        super().__init__(config, num_blocks, block_size, dtype, device, attention)
        self._copy = kernels.get_copy(attention)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy blocks with all their layers, (block read, block written); no block is both, and none is
        written twice."""
        self._copy.copy_blocks(self.kv, self.kv, copies)
