"""Above the chapters: what blocks waste, and what it costs to find keys through a table.

Waste is counted, exactly, from lengths; time is measured, by gathering through tables against slices of a
contiguous memory with the same keys and values.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from random import Random

import torch
from torch import Tensor

from minivllm.kernels import reference
from minivllm.memory.contiguous import ContiguousManager
from minivllm.memory.contiguous_store import ContiguousBatch, ContiguousStore
from minivllm.memory.paged import PagedManager, num_blocks_for
from minivllm.memory.paged_store import PagedBatch, PagedStore, padded
from minivllm.memory.store import KVStore
from minivllm.model.attention import causal_attention
from minivllm.model.batch import Batch
from minivllm.model.decoder import Decoder


def unfilled_slots(lengths: Sequence[tuple[int, int]], block_size: int) -> float:
    """Slots of a last block that hold no token, the mean over every step of every sequence.

    lengths: (prompt_len, output_len). A sequence is in memory with prompt_len tokens, then one more at each
    step, up to prompt_len + output_len - 1: the last token is never put there.
    """
    left = sum(-n % block_size for prompt, output in lengths for n in range(prompt, prompt + output))
    return left / sum(output for _, output in lengths)


def used_share(lengths: Sequence[tuple[int, int]], block_size: int) -> float:
    """Tokens over slots, both summed over every step of every sequence: the utilisation of what is held."""
    tokens = sum(n for prompt, output in lengths for n in range(prompt, prompt + output))
    steps = sum(output for _, output in lengths)
    return tokens / (tokens + steps * unfilled_slots(lengths, block_size))


def time_attention(
    lengths: Sequence[int],
    block_size: int | None,
    *,
    num_heads: int = 9,
    num_kv_heads: int = 3,
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    repeats: int = 7,
) -> float:
    """Seconds of one layer's attention, one new token for each of the sequences: the median of repeats.

    block_size: through block tables, the blocks in random order; None: over slices of contiguous memory.
    """
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    q, scale = random(len(lengths), num_heads, head_dim), head_dim**-0.5
    if block_size is None:
        keys, values = (random(sum(lengths), num_kv_heads, head_dim) for _ in range(2))
        starts = [sum(lengths[:i]) for i in range(len(lengths))]

        def attend() -> None:
            for i, (start, n) in enumerate(zip(starts, lengths, strict=True)):
                run = slice(start, start + n)
                causal_attention(q[i : i + 1], keys[run], values[run], scale)

        return _median_seconds(attend, repeats, device)
    counts = [num_blocks_for(n, block_size) for n in lengths]
    blocks = Random(0).sample(range(sum(counts)), sum(counts))
    tables = padded([[blocks.pop() for _ in range(count)] for count in counts], torch.device(device))
    caches = [random(sum(counts), num_kv_heads, block_size, head_dim) for _ in range(2)]
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    query_start = torch.arange(len(lengths) + 1, dtype=torch.int32, device=device)
    return _median_seconds(
        lambda: reference.paged_attention(q, caches[0], caches[1], tables, seq_lens, query_start, scale),
        repeats,
        device,
    )


@torch.inference_mode()
def time_decode(model: Decoder, lengths: Sequence[int], block_size: int | None, repeats: int = 3) -> float:
    """Seconds of one step of the whole model that gives each sequence its next token: the median of repeats.

    lengths: tokens of each sequence, the new one included. What the older ones' keys and values are does
    not matter to time; they are random. block_size None: contiguous memory.
    """
    batch = Batch.pack([(i, [i + 1], n - 1) for i, n in enumerate(lengths)], model.device)
    store: KVStore
    if block_size is None:
        room = max(lengths)
        slots = len(lengths) * (1 << (room - 1).bit_length())
        contiguous = ContiguousManager(slots, 1, room)
        store = ContiguousStore(model.config, slots, model.dtype, model.device)
        for i, n in enumerate(lengths):
            contiguous.allocate(i, n)
        placed: Batch = ContiguousBatch.place(batch, contiguous)
        store.kv.normal_()
    else:
        num_blocks = sum(num_blocks_for(n, block_size) for n in lengths)
        paged = PagedManager(num_blocks, block_size, 1)
        store = PagedStore(model.config, num_blocks, block_size, model.dtype, model.device)
        for i, n in enumerate(lengths):
            paged.allocate(i, n)
        placed = PagedBatch.place(batch, paged)
        store.kv.normal_()
    return _median_seconds(lambda: model(placed, store), repeats, model.device)


def _median_seconds(work: Callable[[], object], repeats: int, device: torch.device | str) -> float:
    """The first run is not counted: it is slow, whatever it computes."""
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        work()
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])
