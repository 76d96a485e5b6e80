"""Above the chapters: one query a sequence: how fast the keys and values come out of memory.

Nothing else takes time there: a key is read once and used for a handful of multiplications. So the bytes of K
and V over the time are set beside what a copy on the same device moves in a second, bytes read and written.
The shape is a layer of Llama-3-8B: 32 query heads, 8 key/value heads, head_dim 128, in bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

import torch

from minivllm import kernels
from minivllm.kernels import reference
from minivllm.lab.gpu_check.here import Here, Item, Row, copy_time, free_bytes, release, seconds_of
from minivllm.lab.gpu_check.kernel_choice import choosing
from minivllm.lab.gpu_check.paged_case import PagedCase, bound_of, error_of
from minivllm.lab.gpu_check.processes import last_words

HEADS = (32, 8, 128)
SMALL = (4, 2, 16)
LAYERS = 32  # of the pool, in which a block has all layers: so blocks of one layer lie far apart
BATCHES, CONTEXTS = (1, 4, 16, 64, 256), (512, 4096, 32_768)
BLOCK_SIZES = (8, 16, 32, 128)
SWEPT, STEPS = (64, 4096), (16, 2048)  # batch and context of the other measurements
TARGETS = {(64, 4096): 0.85, (1, 32_768): 0.80}


def shares(here: Here) -> list[Here]:
    """One process: only one may use the memory at a time."""
    return [here]


def run(here: Here) -> Iterator[Item]:
    """The copy, then the shapes, those with a target first; block sizes; the kernels one beside another."""
    seconds, num_bytes = copy_time(here)
    rate = num_bytes / seconds
    yield "copy", {"bytes": num_bytes, **here.timing(seconds, gb_s=rate / 1e9)}
    for list_name, name, batch, context, block_size, layers in plan(here):
        release(here)  # what the shape before this one had
        kv_bytes = 2 * batch * context * HEADS[1] * HEADS[2] * torch.bfloat16.itemsize
        room = free_bytes(here) // 2
        if here.gpu and kv_bytes > room:
            what = f"{list_name}, {name}, batch {batch}, context {context:,}"
            yield "left_out", {"what": what, "why": f"{kv_bytes:,} bytes of keys and values do not fit"}
            continue
        while layers > 1 and layers * kv_bytes > room:
            layers //= 2
        try:
            row = measure(name, batch, context, block_size, layers, rate, here)
        except Exception as error:  # the other shapes may still work
            row = {"kernels": name, "batch": batch, "context": context, "block_size": block_size}
            row |= {"ok": False, "why": last_words(error)}
        yield list_name, row
        if list_name == "decode" and (batch, context) in TARGETS and here.gpu:
            what = f"decode at batch {batch}, context {context:,}: share of the copy's bytes a second"
            yield from here.target(what, row.get("share_of_copy"), TARGETS[batch, context])


def plan(here: Here) -> list[tuple[str, str, int, int, int, int]]:
    """(list, kernels, batch, context, block size, layers of the pool) of every measurement."""
    if not here.gpu:
        return [("steps", name, 2, 9, 4, 1) for name in here.names()]
    shapes = [*TARGETS, *(shape for shape in product(BATCHES, CONTEXTS) if shape not in TARGETS)]
    return [
        *(("decode", "triton", *shape, 16, LAYERS) for shape in shapes),
        *(("block_sizes", "triton", *SWEPT, size, LAYERS) for size in BLOCK_SIZES),
        ("one_layer", "triton", *SWEPT, 16, 1),
        *(("steps", name, *STEPS, 16, LAYERS) for name in here.names()),
    ]


def measure(
    name: str, batch: int, context: int, block_size: int, layers: int, rate: float, here: Here
) -> Row:
    """The kernels of this name at one shape, timed, and compared with float64 on the first two sequences."""
    heads, dtype = here.pick((HEADS, torch.bfloat16), (SMALL, torch.float32))
    module, sizes = kernels.get(name), ([context] * batch, [1] * batch)
    case = PagedCase.make(heads, block_size, *sizes, dtype, here.device, layers=layers)
    kv_bytes = 2 * batch * context * heads[1] * heads[2] * dtype.itemsize
    seconds = seconds_of(lambda: case.run(module), here)
    few = case.first(min(2, batch))
    exact = few.exact()
    bound = bound_of(dtype, error_of(few.run(reference), exact))
    error = error_of(case.run(module)[: len(few.lengths)], exact)
    return {
        "kernels": name,
        "batch": batch,
        "context": context,
        "block_size": block_size,
        "pool_layers": layers,
        "num_splits": num_splits(case) if name == "triton" else None,
        "kv_bytes": kv_bytes,
        **here.timing(seconds, gb_s=kv_bytes / seconds / 1e9, share_of_copy=kv_bytes / seconds / rate),
        "error": error,
        "ok": error <= bound < math.inf,
    }


def num_splits(case: PagedCase) -> int | None:
    """Into how many parts the last kernel cuts the keys."""
    with choosing() as chosen:
        case.run(kernels.get("triton"))
    return chosen.get("num_splits")
