"""Chapter 4: the branches of one prompt in shared memory.

Samples of one prompt, or the beams of a search, grow from the same tokens. After each step every branch has a
parent among those before, and one token more. So one operation is enough: fork a child from each parent
that is chosen, as often as it is chosen, then let all parents go.

    rows  0: A    1: B    2: C        become([(1, x), (1, y), (2, z)])        rows  0: Bx    1: By    2: Cz

Of A nothing is left. Bx and By share B's blocks; the first of them to write into B's last block copies it,
if it is filled in part; the other, then its only reader, writes where it stands. Cz has C's blocks to itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from torch import Tensor

from minivllm.memory.paged_store import PagedBatch
from minivllm.memory.sharing import SharingManager
from minivllm.memory.sharing_store import SharingStore
from minivllm.model.batch import Batch
from minivllm.model.decoder import Decoder
from minivllm.outputs import SharingReport


class Branches:
    """What grows from one prompt, one sequence a branch; at first one branch, the prompt itself.

    tokens: each branch's tokens, prompt included. report: what sharing saved so far. The k-th sequence made
    has the id seq_id + k * 2**32, so several prompts with ids below 2**32 can be in the memory.
    """

    def __init__(
        self,
        model: Decoder,
        store: SharingStore,
        manager: SharingManager,
        prompt: Sequence[int],
        seq_id: int = 0,
    ):
        self.model, self.store, self.manager = model, store, manager
        self._ids = count(seq_id, 2**32)
        self._seq_ids = [next(self._ids)]
        self.tokens = [list(prompt)]
        self.num_computed = 0  # of each branch: all have the same length
        self.report = SharingReport()

    def step(self) -> Tensor:
        """Compute what is new in each branch; the logits of their last tokens [num_branches, vocab_size].

        Raises OutOfBlocks.
        """
        made = self.manager.num_copies
        for seq_id, tokens in zip(self._seq_ids, self.tokens, strict=True):
            self.manager.allocate(seq_id, len(tokens))
        self.store.copy_blocks(self.manager.take_copies())
        self.report = self.report.after(
            *self.manager.num_blocks(self._seq_ids), self.manager.num_copies - made
        )
        new = [
            (i, t[self.num_computed :], self.num_computed)
            for i, t in zip(self._seq_ids, self.tokens, strict=True)
        ]
        self.num_computed = len(self.tokens[0])
        batch = Batch.pack(new, self.model.device)
        logits: Tensor = self.model(PagedBatch.place(batch, self.manager), self.store)
        return logits

    def become(self, chosen: Sequence[tuple[int, int]]) -> None:
        """Branch: for each (parent row, token) a child with one token more. All that was there goes."""
        children = [next(self._ids) for _ in chosen]
        for child, (row, _) in zip(children, chosen, strict=True):
            self.manager.fork(self._seq_ids[row], child)
        self.free()
        self.tokens = [[*self.tokens[row], token] for row, token in chosen]
        self._seq_ids = children

    def free(self) -> None:
        """Let go of the memory of all branches."""
        for seq_id in self._seq_ids:
            self.manager.free(seq_id)
