"""Above the chapters: copies of whole blocks: on the device, as copy-on-write needs them, and to and from
pinned memory, as swapping does. A block has the keys and values of all layers in one piece, 2 MiB of
Llama-3-8B in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from minivllm import kernels
from minivllm.lab.gpu_check.here import Here, Item, Row, host_tensor, seconds_of
from minivllm.lab.gpu_check.processes import last_words

SHAPE = (32, 2, 8, 16, 128)  # layers, key and value, heads, slots, head_dim
SMALL = (2, 2, 2, 4, 8)
Pairs: TypeAlias = Sequence[tuple[int, int]]  # (block read, block written)
Copy: TypeAlias = Callable[[Tensor, Tensor, Pairs], object]


def shares(here: Here) -> list[Here]:
    """One process."""
    return [here]


@torch.inference_mode()
def run(here: Here) -> Iterator[Item]:
    """Ways of copying, by how many blocks; then the ways between device and host."""
    num_blocks, counts = here.pick((1024, (1, 4, 16, 64, 256)), (16, (1, 4)))
    dtype = here.pick(torch.bfloat16, torch.float32)
    pool = torch.empty((num_blocks, *here.pick(SHAPE, SMALL)), dtype=dtype, device=here.device).normal_()
    for count in counts:
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(count)).tolist()
        pairs = list(zip(order[:count], order[count : 2 * count], strict=True))
        for way, copy in ways(here).items():
            yield from _measure("copy_on_write", way, copy, pool, pool, pairs, here)
    host = host_tensor((counts[-1], *pool.shape[1:]), dtype, here).copy_(pool[-counts[-1] :])
    for count in counts[2:] or counts[-1:]:
        blocks = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(count))[:count].tolist()
        out = list(zip(blocks, range(count), strict=True))
        for way, copy in swap_ways(here).items():
            yield from _measure("swap_out", way, copy, pool, host, out, here)
            yield from _measure("swap_in", way, copy, host, pool, [(b, a) for a, b in out], here)


def ways(here: Here) -> dict[str, Copy]:
    """How blocks are copied within the device's pool."""
    found: dict[str, Copy] = {
        "index": by_index,
        "loop of copy_": one_by_one,
    }
    if here.triton:
        found["triton"] = by_kernel
    return found


def swap_ways(here: Here) -> dict[str, Copy]:
    """How blocks get from one memory to the other; the host's are neighbours in the second way."""
    found: dict[str, Copy] = {
        "copy_ for each block": one_by_one,
        "gather, one copy, scatter": gathered,
    }
    if here.triton:
        found["triton, over pinned memory"] = by_kernel
    return found


def by_kernel(source: Tensor, target: Tensor, pairs: Pairs) -> None:
    """The project's kernel."""
    kernels.get_copy("triton").copy_blocks(source, target, pairs)


def by_index(source: Tensor, target: Tensor, pairs: Pairs) -> None:
    """`target[written] = source[read]`: through a tensor in between."""
    kernels.get_copy("torch").copy_blocks(source, target, pairs)


def one_by_one(source: Tensor, target: Tensor, pairs: Pairs) -> None:
    """A copy for each block, queued without waiting."""
    for read, written in pairs:
        target[written].copy_(source[read], non_blocking=True)


def gathered(source: Tensor, target: Tensor, pairs: Pairs) -> None:
    """One transfer for all: blocks that lie apart are gathered on the device, or scattered there."""
    read, written = (list(side) for side in zip(*pairs, strict=True))
    if written == list(range(len(pairs))):
        row = source[torch.tensor(read, device=source.device)]
        target[: len(pairs)].copy_(row, non_blocking=True)
    else:
        row = source[: len(pairs)].to(target.device, non_blocking=True)
        target[torch.tensor(written, device=target.device)] = row


def _measure(
    list_name: str, way: str, copy: Callable[[Tensor, Tensor, Pairs], object], source: Tensor, target: Tensor,
    pairs: Pairs, here: Here,
) -> Iterator[Item]:  # fmt: skip
    """A row. The bytes of a copy within the device count twice: they are read and written."""
    num_bytes = len(pairs) * source[0].numel() * source.element_size() * (2 if source is target else 1)
    read, written = ([pair[side] for pair in pairs] for side in (0, 1))
    expected = target.clone()
    expected[written] = source[read].to(target.device)
    target[written] = 0
    row: Row = {"way": way, "blocks": len(pairs), "bytes": num_bytes}
    try:
        seconds = seconds_of(lambda: copy(source, target, pairs), here)
        row |= here.timing(seconds, gb_s=num_bytes / seconds / 1e9)
        row["ok"] = torch.equal(target, expected)
    except Exception as error:  # the other ways may still work
        row |= {"ok": False, "why": last_words(error)}
    yield list_name, row
