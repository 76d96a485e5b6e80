"""What the tests of branches share: a memory that is poisoned and checked in every step, and plain books."""

from __future__ import annotations

import torch

from minivllm.memory.sharing import SharingManager
from minivllm.memory.sharing_store import SharingStore
from minivllm.model.config import ModelConfig
from minivllm.outputs import SharingReport


class PoisonedStore(SharingStore):
    """NaN wherever no token stands, before every step; and the books must balance there."""

    def __init__(self, config: ModelConfig, manager: SharingManager, dtype: torch.dtype = torch.float64):
        super().__init__(config, manager.pool.num_blocks, manager.block_size, dtype)
        self.manager = manager
        self.copies: list[list[tuple[int, int]]] = []
        self.kv.fill_(torch.nan)

    def copy_blocks(self, copies) -> None:
        super().copy_blocks(copies)
        self.copies.append(list(copies))
        self.manager.check_integrity()
        size = self.manager.block_size
        filled = torch.zeros(self.manager.pool.num_blocks, size, dtype=torch.bool)
        for s in self.manager.snapshot().sequences:
            for i in range(s.used):
                filled[s.block_ids[i // size], i % size] = True
        self.kv.movedim(4, 1)[~filled] = torch.nan


def memory(config: ModelConfig, num_blocks: int, block_size: int) -> tuple[PoisonedStore, SharingManager]:
    """An empty memory, its two halves."""
    manager = SharingManager(num_blocks, block_size, bytes_per_token=8)
    return PoisonedStore(config, manager), manager


def is_empty(manager: SharingManager) -> bool:
    """Whether all blocks are free, nobody has one, and no copy is left to make."""
    manager.check_integrity()
    all_free = manager.pool.num_free_blocks == manager.num_free_blocks == manager.pool.num_blocks
    return all_free and not manager.snapshot().sequences and not manager.take_copies()


class _Block:
    """A block that is known by its identity alone."""


def expected_report(prompt_len: int, block_size: int, parents: list[list[int]]) -> SharingReport:
    """By plain books: parents holds, for each step after the first, each branch's row in the step before."""
    length, num_copies = prompt_len, 0
    tables = [[_Block() for _ in range(-(-prompt_len // block_size))]]
    together, alone = [len(tables[0])], [len(tables[0])]
    for rows in parents:
        tables = [list(tables[row]) for row in rows]
        for i, table in enumerate(tables):
            if length % block_size == 0:
                table.append(_Block())
            elif any(other[-1] is table[-1] for other in tables[i + 1 :]):  # not the last who has it
                table[-1] = _Block()
                num_copies += 1
        length += 1
        together.append(len({block for table in tables for block in table}))
        alone.append(sum(map(len, tables)))
    return SharingReport(max(together), max(alone), num_copies)
