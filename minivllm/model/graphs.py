"""Chapter 9: decode steps recorded once as CUDA graphs, and replayed.

A kernel is started by the host: Python, PyTorch and the driver take some microseconds for each. Where a
kernel is shorter than that, as many are in a decode step of a small model, the GPU waits for the host before
the next one: the launch gap. How wide it is has not been measured here yet. A CUDA graph is a recording of
all the launches of a step, with the addresses that they read and write; to replay it is one launch. The price
is that nothing of a recording can change but the contents of its tensors: a graph for every number of
sequences would be many graphs, so there are a few sizes, and a step is padded up to the next one.

    sizes up to 13: 1 2 4 8 13        a step with 3 sequences replays the graph for 4

                     sequence 0   1     2     padding
    token_ids        [ 17         5     99  | whatever was there before ]
    slot_mapping     [ 70         3     45  | -1 ]        written nowhere
    seq_lens         [ 39         4     14  |  0 ]        attends to nothing, gives zeros
    logits           [ row 0      1      2  |  not looked at ]

Only steps in which each sequence has one new token are recorded; others run as they are. Into how many parts
`kernels/triton_split.py` cuts the keys is chosen when the graph is recorded, for the longest context that
there may be.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor

from minivllm.memory.paged_store import PagedBatch, PagedStore
from minivllm.memory.store import KVStore
from minivllm.model.batch import Batch
from minivllm.model.decoder import Decoder

Run: TypeAlias = Callable[[], None]  # reads and writes tensors that stay where they are
# What the batch has one of for each sequence.
ROWS = ("token_ids", "positions", "seq_lens", "logits_indices", "slot_mapping", "block_tables")


def graph_sizes(max_num_seqs: int) -> list[int]:
    """The numbers of sequences that have a graph, in rising order; the last is max_num_seqs.

    1, 2, 4, 8, then in steps of 8, from 64 on of 16, from 128 on of 32, and so on: from 32 sequences on less
    than a fifth of a step is padding, and 256 sequences need 19 graphs.
    """
    sizes = [1]
    while sizes[-1] < max_num_seqs:
        last = sizes[-1]
        sizes.append(last + (last if last < 8 else max(8, 2 ** (last.bit_length() - 3))))
    return [*sizes[:-1], max_num_seqs]


class DecodeGraphs:
    """A decoder whose decode steps are replayed: called like the decoder, with the same logits.

    store: whose pool the recordings read and write. max_blocks: of the longest block table. record: makes a
    recording of a run, by default as a CUDA graph. Raises torch.OutOfMemoryError.
    """

    def __init__(
        self,
        model: Decoder,
        store: PagedStore,
        max_num_seqs: int,
        max_blocks: int,
        record: Callable[[Run], Run] | None = None,
    ):
        self.model, self.store = model, store
        self.sizes = graph_sizes(max_num_seqs)
        record = record or CudaGraphRecorder(model.device)
        with torch.device(model.device):
            rows = torch.arange(max_num_seqs)
            self._input = PagedBatch(
                token_ids=torch.zeros_like(rows),
                positions=torch.zeros_like(rows),
                query_start=torch.arange(max_num_seqs + 1, dtype=torch.int32),
                seq_lens=torch.zeros(max_num_seqs, dtype=torch.int32),
                logits_indices=rows,
                slices=(),
                slot_mapping=torch.full_like(rows, -1),
                block_tables=torch.zeros(max_num_seqs, max_blocks, dtype=torch.int32),
            )
            self._logits = torch.zeros(max_num_seqs, model.config.vocab_size, dtype=model.dtype)
        with torch.inference_mode():  # the largest first: the smaller ones find room in its memory
            replays = {size: record(self._run(size)) for size in reversed(self.sizes)}
        self._replays = dict(sorted(replays.items()))

    def __call__(self, batch: Batch, store: KVStore) -> Tensor:
        """Logits [len(batch.logits_indices), vocab_size], as `Decoder.forward` gives them."""
        num_seqs = len(batch.slices)
        if batch.num_tokens > num_seqs or num_seqs > self.sizes[-1] or store is not self.store:
            return self.model(batch, store)
        assert isinstance(batch, PagedBatch)
        size = next(size for size in self.sizes if size >= num_seqs)
        self._fill(batch, num_seqs, size)
        self._replays[size]()
        return self._logits[batch.logits_indices]  # a copy: the next replay writes over the original

    def _fill(self, batch: PagedBatch, num_seqs: int, size: int) -> None:
        """Put a batch into the first rows, and padding up to `size`. What stands in a table beyond a
        sequence's blocks is never looked up."""
        for name in ("token_ids", "positions", "seq_lens", "slot_mapping"):
            getattr(self._input, name)[:num_seqs] = getattr(batch, name)
        self._input.block_tables[:num_seqs, : batch.block_tables.shape[1]] = batch.block_tables
        self._input.slot_mapping[num_seqs:size] = -1
        self._input.seq_lens[num_seqs:size] = 0

    def _run(self, size: int) -> Run:
        """The model over the first `size` rows, to be recorded."""
        rows = {name: getattr(self._input, name)[:size] for name in ROWS}
        batch = replace(self._input, query_start=self._input.query_start[: size + 1], **rows)

        def run() -> None:
            self._logits[:size] = self.model(batch, self.store)

        return run


class CudaGraphRecorder:
    """Records runs as CUDA graphs whose passing tensors share one memory: only one of them runs at a time."""

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device)  # one for all: each has workspaces that stay
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Run) -> Run:
        """A function that repeats the run. It first runs for real: kernels are compiled, workspaces made."""
        with torch.cuda.device(self._stream.device):
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                run()
            torch.cuda.current_stream().wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                run()
        return graph.replay
