"""Chapter 4: the tensor half of shared blocks: a copy before a write."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from minivllm.memory.paged_store import PagedStore


class SharingStore(PagedStore):
    """The pool, in which whole blocks can be copied."""

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy blocks with all their layers, (block read, block written); no block is both, and none is
        written twice."""
        if copies:
            source, target = torch.tensor(copies, device=self.kv.device).unbind(1)
            self.kv[target] = self.kv[source]
