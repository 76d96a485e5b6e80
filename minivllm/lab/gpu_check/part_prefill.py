"""Above the chapters: many queries a sequence, beside PyTorch's FlashAttention over memory without blocks.

There the arithmetic takes the time, not the memory. Both compute the same: causal attention, and for a chunk
with history the same mask moved to the right. The heads are those of Llama-3-8B in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from minivllm import kernels
from minivllm.lab.gpu_check.here import Here, Item, Row, release, seconds_of
from minivllm.lab.gpu_check.paged_case import PagedCase, error_of
from minivllm.lab.gpu_check.part_decode import HEADS, SMALL
from minivllm.lab.gpu_check.processes import last_words

BLOCK_SIZE = 16
# (sequences, new tokens of each, history of each)
SHAPES = (
    (1, 1024, 0),
    (1, 4096, 0),
    (1, 8192, 0),
    (4, 1024, 0),
    (4, 2048, 0),
    (4, 4096, 0),
    (1, 512, 4096),
    (1, 512, 16_384),
)
TARGET = 0.7
CLOSE = 0.02  # two results in bfloat16 are this near to each other; a wrong mask is far beyond


def shares(here: Here) -> list[Here]:
    """One process."""
    return [here]


def run(here: Here) -> Iterator[Item]:
    """A row for each shape; the target holds for the whole prompts."""
    shares_of_flash = []
    for shape in here.pick(SHAPES, ((2, 7, 0), (1, 5, 11))):
        release(here)  # what the shape before this one had
        try:
            row = measure("triton" if here.triton else "torch", *shape, here)
        except Exception as error:  # the other shapes may still work
            row = dict(zip(("sequences", "new_tokens", "history"), shape, strict=True))
            row |= {"ok": False, "why": last_words(error)}
        yield "prefill", row
        if shape[2] == 0:
            shares_of_flash.append(row.get("share_of_flash"))
    what = "prefill: speed beside FlashAttention in PyTorch, the slowest of the whole prompts"
    yield from here.target(what, min(filter(None, shares_of_flash), default=None), TARGET)


@torch.inference_mode()
def measure(name: str, batch: int, new: int, history: int, here: Here) -> Row:
    """The kernels of this name at one shape, timed, and compared with PyTorch's attention."""
    heads, dtype = here.pick((HEADS, torch.bfloat16), (SMALL, torch.float32))
    length = history + new
    case = PagedCase.make(heads, BLOCK_SIZE, [length] * batch, [new] * batch, dtype, here.device)
    module = kernels.get(name)
    seconds = seconds_of(lambda: case.run(module), here)
    attend, how = flash(case, batch, new, here)
    flash_seconds = seconds_of(attend, here)
    other = attend().transpose(1, 2).flatten(0, 1)
    error = error_of(case.run(module), other)
    pairs = batch * (new * history + new * (new + 1) / 2)  # a query and a key that it sees
    flops = 4 * heads[0] * heads[2] * pairs
    row = {"kernels": name, "sequences": batch, "new_tokens": new, "history": history, "beside": how}
    row |= here.timing(seconds, tflop_s=flops / seconds / 1e12, share_of_flash=flash_seconds / seconds)
    if here.gpu:
        row["flash_ms"] = 1e3 * flash_seconds
    return {**row, "error": error, "ok": error <= CLOSE}


def flash(case: PagedCase, batch: int, new: int, here: Here) -> tuple[Callable[[], Tensor], str]:
    """The same attention by PyTorch, [batch, heads, new, head_dim], and how: keys and values are laid out
    without blocks, and repeated for their query heads where its kernel does not share them."""
    scale, length = case.q.shape[-1] ** -0.5, case.lengths[0]
    q = case.q.unflatten(0, (batch, new)).transpose(1, 2)

    def laid_out(cache: Tensor) -> Tensor:
        rows = [cache[table.long()].transpose(1, 2).flatten(0, 1)[:length] for table in case.block_tables]
        return torch.stack(rows).transpose(1, 2)

    k, v = laid_out(case.k_cache), laid_out(case.v_cache)

    def shared() -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)

    if new == length:
        try:
            shared()
        except RuntimeError:
            pass
        else:
            return shared, "flash, shared heads"
    group = q.shape[1] // k.shape[1]
    many_k, many_v = (tensor.repeat_interleave(group, dim=1) for tensor in (k, v))
    if new == length:

        def repeated() -> Tensor:
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                return F.scaled_dot_product_attention(q, many_k, many_v, is_causal=True, scale=scale)

        return repeated, "flash, repeated heads"
    from torch.nn.attention.bias import causal_lower_right  # loads PyTorch's compiler, which takes seconds

    mask = causal_lower_right(new, length)  # with it PyTorch takes FlashAttention where it can
    return (
        lambda: F.scaled_dot_product_attention(q, many_k, many_v, attn_mask=mask, scale=scale),
        "flash, repeated heads, history",
    )
