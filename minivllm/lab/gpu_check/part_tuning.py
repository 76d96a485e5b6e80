"""Above the chapters: the choices of the last kernel beside others: how many parts of the keys, which tiles.

`triton_split.py` and `attention_tile` choose by estimates; here others are timed at the same shapes, so that
the estimates can be set right. It comes last: where no time is left, nothing else is missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch

from minivllm import kernels
from minivllm.kernels import reference
from minivllm.lab.gpu_check.here import Here, Item, Row, release, seconds_of
from minivllm.lab.gpu_check.kernel_choice import choosing
from minivllm.lab.gpu_check.paged_case import PagedCase, bound_of, error_of
from minivllm.lab.gpu_check.part_decode import HEADS, SMALL
from minivllm.lab.gpu_check.processes import last_words

BLOCK_SIZE = 16
DECODE = ((1, 512), (1, 4096), (1, 32_768), (8, 4096), (64, 512), (64, 4096))  # batch, context
SPLITS = (1, 2, 4, 8, 16, 32, 64, 128)
PREFILL = (1, 4096)  # sequences, tokens of each
TILE = ("BLOCK_N", "num_warps", "num_stages", "BLOCK_M")
DECODE_TILES = ((32, 64, 128), (4, 8), (3, 4, 5, 6), (16,))
PREFILL_TILES = ((32, 64), (4, 8), (3, 5), (64, 128))
SMALL_TILES = ((16,), (4,), (2,), (16,))


def shares(here: Here) -> list[Here]:
    """One process."""
    return [here]


def run(here: Here) -> Iterator[Item]:
    """The kernel's own choice at each shape, then others, as long as there is time."""
    decode, (batch, prompt) = here.pick((DECODE, PREFILL), (((2, 21),), (1, 20)))
    splits = [{"num_splits": count} for count in here.pick(SPLITS, (2,))]
    shapes = [("splits", at[0], at[1], 1, splits) for at in decode]
    shapes += [("decode_tiles", *decode[-1], 1, tiles(here.pick(DECODE_TILES, SMALL_TILES)))]
    shapes += [("prefill_tiles", batch, prompt, prompt, tiles(here.pick(PREFILL_TILES, SMALL_TILES)))]
    for name, batch, length, queries, others in shapes if here.triton else ():
        release(here)  # what the shape before this one had
        heads, dtype = here.pick((HEADS, torch.bfloat16), (SMALL, torch.float32))
        case = PagedCase.make(heads, BLOCK_SIZE, [length] * batch, [queries] * batch, dtype, here.device)
        for number, other in enumerate([{}, *others]):
            if here.left() < 0:
                what = f"{name}, batch {batch}, context {length:,}: {len(others) - number + 1} choices"
                yield "left_out", {"what": what, "why": "no time was left"}
                break
            row: Row = {"batch": batch, "context": length, "queries": queries, "own_choice": not other}
            try:
                row |= measure(case, other, here)
            except Exception as error:  # a tile may need more memory than a multiprocessor has
                row |= {**other, "why": last_words(error)}
            yield name, row


def tiles(sizes: tuple[tuple[int, ...], ...]) -> list[dict[str, int]]:
    """Every combination of these sizes."""
    return [dict(zip(TILE, some, strict=True)) for some in product(*sizes)]


def measure(case: PagedCase, other: dict[str, int], here: Here) -> Row:
    """The kernel with this choice, timed, and compared with the reference on the first sequence."""
    module, few = kernels.get("triton"), case.first(1)
    with choosing(other) as chosen:
        seconds = seconds_of(lambda: case.run(module), here, 0.1)
        error = error_of(case.run(module)[: len(few.q)], few.run(reference))
    return {
        **chosen,
        **here.timing(seconds),
        "error": error,
        "ok": error <= 2 * bound_of(case.q.dtype, 0.0),  # both have one
    }
