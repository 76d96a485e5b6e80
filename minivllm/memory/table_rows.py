"""Chapter 9: the block tables of a step as rows of one array, kept from step to step.

A step of 256 sequences reads 256 block tables, and since the step before hardly one of them has changed. So
the rows stay, and only what changed is written:

    block_size 4     step 7   a has 11 tokens   [ 4 9 2 ]     a and b get one token each
                              b has  7 tokens   [ 7 1 0 ]
                     step 8   a has 12 tokens   [ 4 9 2 ]     nothing is new
                              b has  8 tokens   [ 7 1 0 ]
                     step 9   a has 13 tokens   [ 4 9 2 6 ]   a begins a block: every row is one wider
                              c has  5 tokens   [ 3 5 0 0 ]   b has ended, c has come: its table is written

What has changed need not be announced: a table is the same list as long as its sequence keeps its memory, and
in such a list only the blocks that the step writes to are new (`PagedManager.tables`). So a row is never read
stale: it belongs to the list that it was written from, and to no sequence id.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_

import numpy as np


class TableRows:
    """The block tables of the last step, one row each.

    Invariant: row i begins with what table i held when it was last given, and is filled up with 0.
    """

    def __init__(self) -> None:
        self._tables: list[Sequence[int]] = []  # held, so that no other list can have the identity of one
        self._rows = np.zeros((0, 0), np.int32)

    def update(self, tables: list[Sequence[int]], first_changed: np.ndarray) -> np.ndarray:
        """These tables, none of them empty, as rows [len(tables), longest table] int32, filled up with 0.

        first_changed [len(tables)]: the block from which on a table may differ from what it was in the last
        call; of a table that was not there then, all is read. The rows are good until the next call.
        """
        ends = np.array([len(table) for table in tables], dtype=np.int64)
        begins = first_changed
        width = int(ends.max(initial=0))
        same = len(tables) == len(self._tables) and all(map(is_, tables, self._tables))
        if not same or width != self._rows.shape[1]:
            kept = self._move(tables, width)
            begins = np.where(kept, first_changed, 0)
        for i in np.flatnonzero(begins < ends - 1):
            self._rows[i, begins[i] : ends[i]] = tables[i][begins[i] : ends[i]]
        self._rows[np.arange(len(tables)), ends - 1] = [table[-1] for table in tables]
        return self._rows

    def _move(self, tables: list[Sequence[int]], width: int) -> np.ndarray:
        """Put each table that has a row into its new place; returns which have. The others' rows are 0."""
        old = {id(table): row for row, table in enumerate(self._tables)}
        places = np.array([old.get(id(table), -1) for table in tables], dtype=np.int64)
        kept = places >= 0
        rows = np.zeros((len(tables), width), np.int32)
        common = min(width, self._rows.shape[1])
        rows[kept, :common] = self._rows[places[kept], :common]
        self._tables, self._rows = tables, rows
        return kept
