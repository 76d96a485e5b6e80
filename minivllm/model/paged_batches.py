"""Chapter 9: the batch of each step for paged memory, made from arrays.

`Batch.pack` and `PagedBatch.place` say number by number what a batch is, in lists that become tensors. That
is long while a GPU waits, or beside a small model: 256 sequences of 1,000 tokens have 16,000 block numbers.
Here the same batch is made without a loop over tokens or blocks:

    num_new_tokens  [ 3       1   2   ]      num_computed_tokens  [ 0  7  3 ]
    sequence        [ 0 0 0 | 1 | 2 2 ]      each number as often as the sequence has new tokens
    row             [ 0 1 2   3   4 5 ]
    positions       [ 0 1 2 | 7 | 3 4 ]      row - start + num_computed_tokens, each of its sequence

Tokens are kept as arrays of bytes, of which a step copies its pieces; block tables stay from step to step.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from minivllm.memory.paged import PagedManager
from minivllm.memory.paged_store import PagedBatch
from minivllm.memory.table_rows import TableRows
from minivllm.model.batch import SequenceSlice
from minivllm.scheduling.plan import ScheduledSequence


class PagedBatches:
    """Makes the batches of one engine: those that `Batch.pack` and `PagedBatch.place` would make, faster."""

    def __init__(self, manager: PagedManager, device: torch.device):
        self.manager, self.device = manager, device
        self._rows = TableRows()

    def __call__(self, parts: Sequence[ScheduledSequence]) -> PagedBatch:
        """The batch of a step, with logits for the parts that sample. On a CPU it is good until the next."""
        block_size, tables = self.manager.block_size, self.manager.tables
        tokens = array("q")
        for part in parts:
            tokens += part.new_token_ids()
        sequences = [part.sequence for part in parts]
        seq_ids = [sequence.seq_id for sequence in sequences]
        num_new = np.array([part.num_new_tokens for part in parts])
        computed = np.array([sequence.num_computed_tokens for sequence in sequences])
        seq_lens, end = computed + num_new, num_new.cumsum()
        start = end - num_new
        sequence = np.arange(len(parts)).repeat(num_new)
        positions = np.arange(len(tokens)) + (computed - start)[sequence]
        rows = self._rows.update([tables[i] for i in seq_ids], computed // block_size)
        block, offset = np.divmod(positions, block_size)
        samples = [i for i, part in enumerate(parts) if part.samples]
        slices = map(SequenceSlice, seq_ids, start.tolist(), end.tolist(), seq_lens.tolist())
        return PagedBatch(
            token_ids=self._tensor(np.frombuffer(tokens, np.int64)),
            positions=self._tensor(positions),
            query_start=self._tensor(np.append(0, end).astype(np.int32)),
            seq_lens=self._tensor(seq_lens.astype(np.int32)),
            logits_indices=self._tensor(end[samples] - 1),
            slices=tuple(slices),
            slot_mapping=self._tensor(rows[sequence, block].astype(np.int64) * block_size + offset),
            block_tables=self._tensor(rows),
        )

    def _tensor(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self.device)
