"""Chapter 0: the tokens of one step, packed into one row.

Sequences of any length stand one after the other, without padding: three sequences with 5, 1 and 2 new
tokens make a row of 8. The model computes over the row; only attention needs to know where a sequence
begins, and it asks the batch.

    token_ids       [ a a a a a | b | c c ]
    positions       [ 0 1 2 3 4 | 7 | 3 4 ]      b has 7 tokens in memory already, c has 3
    query_start     [ 0, 5, 6, 8 ]
    seq_lens        [ 5, 8, 5 ]                  tokens of each sequence, the new ones included
    logits_indices  [ 4, 5, 7 ]                  the last row of each: only these reach the output layer
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class SequenceSlice(NamedTuple):
    """Where one sequence stands in a batch: rows start to end, ending at position seq_len - 1."""

    seq_id: int
    start: int
    end: int
    seq_len: int


def lay_out(
    sequences: Sequence[tuple[int, Sequence[int], int]],
) -> tuple[list[int], list[int], list[SequenceSlice]]:
    """Lay sequences out in one row: (token ids, positions, a slice for each sequence).

    sequences: (seq_id, new token ids, tokens already in memory), in the order of the row. A new token's
    position counts from the start of its own sequence, so it goes on where memory ends. A slice says in
    which rows the sequence's new tokens stand, start to end (not included), and how many tokens it has
    with them: seq_len.
    """
    tokens: list[int] = []
    positions: list[int] = []
    slices: list[SequenceSlice] = []
    for seq_id, new_tokens, num_computed in sequences:
        start, seq_len = len(tokens), num_computed + len(new_tokens)
        tokens.extend(new_tokens)
        positions.extend(range(num_computed, seq_len))
        slices.append(SequenceSlice(seq_id, start, len(tokens), seq_len))
    return tokens, positions, slices


@dataclass(frozen=True)
class Batch:
    """One step's input. All tensors are on the model's device.

    token_ids, positions [num_tokens] int64; query_start [num_seqs + 1] int32; seq_lens [num_seqs] int32;
    logits_indices [num_logits] int64. slices has the same facts as plain integers, so that code on the
    host need not wait for a device; it alone knows each sequence's id, which memory is keyed by: a
    sequence's place in the batch changes whenever a neighbour leaves.
    """

    token_ids: Tensor
    positions: Tensor
    query_start: Tensor
    seq_lens: Tensor
    logits_indices: Tensor
    slices: tuple[SequenceSlice, ...]

    @classmethod
    def pack(
        cls, sequences: Sequence[tuple[int, Sequence[int], int]], device: torch.device | str = "cpu"
    ) -> Batch:
        """Pack (seq_id, new token ids, tokens already in memory) triples, in the order given.

        Each sequence needs at least one new token, and an id of its own. Logits are asked for at the
        last token of each.
        """
        for seq_id, new_tokens, _ in sequences:
            if not new_tokens:
                raise ValueError(
                    f"Sequence {seq_id} has no new token in this step; leave it out of the batch."
                )
        tokens, positions, slices = lay_out(sequences)
        if len({s.seq_id for s in slices}) < len(slices):
            raise ValueError("A sequence id stands twice in this step; give all its new tokens at once.")

        def tensor(values: list[int], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        return cls(
            token_ids=tensor(tokens, torch.int64),
            positions=tensor(positions, torch.int64),
            query_start=tensor([0, *(s.end for s in slices)], torch.int32),
            seq_lens=tensor([s.seq_len for s in slices], torch.int32),
            logits_indices=tensor([s.end - 1 for s in slices], torch.int64),
            slices=tuple(slices),
        )

    def __iter__(self) -> Iterator[SequenceSlice]:
        return iter(self.slices)

    @property
    def num_tokens(self) -> int:
        """Rows in the packed batch."""
        return self.slices[-1].end if self.slices else 0
