"""Chapter 8: the keys of one sequence shared out among several programs, and their results put together.

In decode there is one program for each sequence and key/value head. One sequence of a model with 8 such heads
keeps 8 programs busy, on a GPU with 132 multiprocessors. So each program's walk over the keys is cut into
parts that run side by side (Dao et al., "Flash-Decoding for long-context inference", 2023). A part gives its
own output, normed, and how much it weighs: log2 of the sum of its exponentials. With these the parts are
averaged:

    300 keys in tiles of 64, 4 parts of two tiles each:

    keys        0 ...... 127 | 128 ..... 255 | 256 ... 299 | nothing
    sums        w0           | w1            | w2          | -inf         log2 of the part's sum
    weight      2^(w0 - m)   | 2^(w1 - m)    | 2^(w2 - m)  | 0            m: the largest of them

Where the parts lie is worked out on the device, from the true length of the sequence. How many there are is
chosen on the host, which knows only how long a sequence may be: in a CUDA graph the count stays what it was
when the graph was recorded.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS_EACH = 2  # programs that a multiprocessor runs at a time, for the choice of the count
START = 1  # what it costs to begin a part, in tiles of keys
COMBINE = 3  # what a second kernel costs
MAX_SPLITS = 128
# The smallest count is taken that costs at most so much more than the best: it suits short sequences too.
GOOD_ENOUGH = 1.05
PARTS = 16  # parts that `combine_kernel` reads at a time


@lru_cache(maxsize=4096)
def choose_num_splits(num_programs: int, num_tiles: int, num_multiprocessors: int) -> int:
    """Into how many parts each program's num_tiles tiles of keys are cut.

    The time is estimated, in the time that one tile takes: programs run in waves of PROGRAMS_EACH for each
    multiprocessor, and a wave lasts as long as one part. When a tile is added, the least estimate grows by at
    most one tile's time in each wave, and what is good enough is at most a twentieth above it: so there is no
    length at which the time jumps. The constants are estimates too, not measured yet.
    """
    room = PROGRAMS_EACH * num_multiprocessors
    costs = [
        triton.cdiv(num_programs * splits, room) * (triton.cdiv(num_tiles, splits) + START)
        + (COMBINE if splits > 1 else 0)
        for splits in range(1, max(1, min(num_tiles, MAX_SPLITS)) + 1)
    ]
    limit = GOOD_ENOUGH * min(costs)
    return next(splits for splits, cost in enumerate(costs, start=1) if cost <= limit)


@triton.jit(do_not_specialize=["num_splits", "sums_split"])
def combine_kernel(  # type: ignore[no-untyped-def]
    parts, sums, out, num_splits, parts_split, parts_token, parts_head, sums_split, sums_token,
    out_token, out_head,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Program (t, h) averages the parts of token t, head h, PARTS at a time; the rest are strides."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    dim = tl.arange(0, BLOCK_D)
    dim_inside = dim < HEAD_DIM
    parts += token * parts_token + head * parts_head
    sums += token * sums_token + head

    largest = -float("inf")
    total = 0.0
    summed = tl.zeros([BLOCK_D], tl.float32)
    for first in tl.range(0, num_splits, PARTS):
        part = first + tl.arange(0, PARTS)
        weight = tl.load(sums + part * sums_split, mask=part < num_splits, other=-float("inf"))
        larger = tl.maximum(largest, tl.max(weight, axis=0))
        base = tl.where(larger == -float("inf"), 0.0, larger)  # no key at all: every weight is 0
        weight = tl.exp2(weight - base)
        shrink = tl.exp2(largest - base)
        part_from = (part.to(tl.int64) * parts_split)[:, None] + dim[None, :]
        result = tl.load(parts + part_from, mask=(weight > 0)[:, None] & dim_inside[None, :], other=0.0)
        total = total * shrink + tl.sum(weight, axis=0)
        summed = summed * shrink + tl.sum(weight[:, None] * result, axis=0)
        largest = larger
    result = summed / tl.where(total == 0.0, 1.0, total)
    tl.store(out + token * out_token + head * out_head + dim, result, mask=dim_inside)


def combine(parts: Tensor, sums: Tensor, out: Tensor) -> None:
    """Put the parts together: parts [num_splits, num_tokens, num_heads, head_dim] float32, each normed;
    sums [num_splits, num_tokens, num_heads] float32, log2 of each part's sum, -inf for a part without a key;
    out [num_tokens, num_heads, head_dim] is written, zeros where no part has a key.
    """
    num_splits, num_tokens, num_heads, head_dim = parts.shape
    with torch.cuda.device_of(out):
        combine_kernel[num_tokens, num_heads](
            parts, sums, out, num_splits, *parts.stride()[:3], *sums.stride()[:2], *out.stride()[:2],
            HEAD_DIM=head_dim, BLOCK_D=triton.next_power_of_2(head_dim), PARTS=PARTS, num_warps=4,
        )  # fmt: skip
