"""Chapter 8: writing keys and values into their slots, as a Triton kernel.

A kernel is started as a grid of programs: all run the same code, each with its own number, and where they run
on the GPU's multiprocessors is not theirs to say. A program works on tiles, small arrays whose sizes are
powers of two and are fixed when it is compiled (`tl.constexpr`); what of a tile is not wanted is masked: not
read, and not written.

A slot's number says where it lies: block = slot // block_size, offset = slot % block_size. A program writes
one token: it reads the number, works out the address once, and moves its heads of key and value at a time.

    slot_mapping [ 38 | -1 | 7 ]  with blocks of 16:   program 0 writes block 2, offset 6
                                                       program 1 ends at once
                                                       program 2 writes block 0, offset 7
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minivllm.kernels.triton_limits import check_store

TILE = 4096  # most numbers of a key that one program holds


@triton.jit
def store_kv_kernel(  # type: ignore[no-untyped-def]
    k, v, k_cache, v_cache, slot_mapping,
    k_token, k_head, v_token, v_head,
    k_cache_block, k_cache_head, k_cache_slot, v_cache_block, v_cache_head, v_cache_slot,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    """Program (t, h) writes the heads h * HEADS and on of token t; names like `k_token` are strides."""
    token = tl.program_id(0).to(tl.int64)  # times a stride it may pass 2**31
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if slot < 0:
        return
    block, offset = (
        slot // BLOCK_SIZE,
        slot % BLOCK_SIZE,
    )  # int64 too: a pool may be larger than 2**31 numbers
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None].to(tl.int64)
    dim = tl.arange(0, DIMS)[None, :]
    inside = (head < NUM_HEADS) & (dim < HEAD_DIM)
    key = tl.load(k + token * k_token + head * k_head + dim, mask=inside)
    value = tl.load(v + token * v_token + head * v_head + dim, mask=inside)
    k_to = block * k_cache_block + offset * k_cache_slot + head * k_cache_head + dim
    v_to = block * v_cache_block + offset * v_cache_slot + head * v_cache_head + dim
    tl.store(k_cache + k_to, key, mask=inside)
    tl.store(v_cache + v_to, value, mask=inside)


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write each token's key and value into its slot: `reference.store_kv` on the GPU, without a wait.

    Shapes as there; any strides, but the last dimension must be contiguous. Two tokens with the same slot
    race: no scheduler asks for that. Raises InvalidOption for what the kernels do not have.
    """
    check_store(k, v, k_cache, v_cache, slot_mapping)
    num_tokens, num_heads, head_dim = k.shape
    if num_tokens == 0:
        return
    tile = store_tile(num_heads, head_dim)
    with torch.cuda.device_of(k):  # Triton launches on the current device
        store_kv_kernel[num_tokens, triton.cdiv(num_heads, tile["HEADS"])](
            k, v, k_cache, v_cache, slot_mapping.contiguous(),
            *k.stride()[:2], *v.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3],
            NUM_HEADS=num_heads, HEAD_DIM=head_dim, BLOCK_SIZE=k_cache.shape[2], **tile,
        )  # fmt: skip


def store_tile(num_heads: int, head_dim: int) -> dict[str, int]:
    """The tile that one program moves, [HEADS, DIMS]: powers of two, as Triton's tiles are."""
    dims = triton.next_power_of_2(head_dim)
    return {"HEADS": min(triton.next_power_of_2(num_heads), max(1, TILE // dims)), "DIMS": dims}
