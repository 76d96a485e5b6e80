"""Above the chapters: an engine built of the parts that its options name.

`engine_args.py` says what the options are; here each becomes a manager, a store, a scheduler.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import psutil
import torch
from torch import Tensor

from minivllm.engine import Engine
from minivllm.engine_args import CHUNKED_ONLY, SCHEDULERS, EngineArgs
from minivllm.errors import InvalidOption, OutOfMemory
from minivllm.kernels.c_rows import MAX_ROW, RowKernels
from minivllm.memory.contiguous import ContiguousManager
from minivllm.memory.contiguous_store import ContiguousBatch, ContiguousStore
from minivllm.memory.manager import KVManager, RecomputeManager
from minivllm.memory.naive import NaiveManager
from minivllm.memory.naive_store import NaiveStore
from minivllm.memory.paged import PagedManager, num_blocks_for
from minivllm.memory.paged_store import PagedBatch, PagedStore
from minivllm.memory.prefix_cache import PrefixCachingManager
from minivllm.memory.sharing import SharingManager
from minivllm.memory.sharing_store import SharingStore
from minivllm.memory.size import bytes_per_token
from minivllm.memory.store import KVStore, RecomputeStore
from minivllm.memory.swap import SwapSpace
from minivllm.memory.swap_store import SwapStore
from minivllm.model.batch import Batch
from minivllm.model.decoder import Decoder
from minivllm.model.graphs import DecodeGraphs
from minivllm.model.packed import PackedDecoder, products_for
from minivllm.model.paged_batches import PagedBatches
from minivllm.step import Step


def build_engine(
    model: Decoder,
    args: EngineArgs,
    on_step: Callable[[Step], None] | None = None,
    *,
    keep_weights: bool = True,
) -> Engine:
    """An engine of the parts that the options name. keep_weights: where they are packed, whether the model
    stays as it is, beside the packed copy. Raises InvalidOption."""
    args = args.resolve(model)
    if args.cache != "recompute":
        _check_room(model.device, int(args.kv_cache_memory_bytes or 0), "kv_cache_memory_bytes or num_blocks")
    if args.swap_space:
        _check_room(torch.device("cpu"), int(args.swap_space), "swap_space")
    manager = build_manager(model, args)
    unit = args.block_size or 1
    num_cpu_blocks = int(args.swap_space or 0) // (unit * bytes_per_token(model))
    store, place = _tensors(model, args, manager, num_cpu_blocks)
    chunked = {name: getattr(args, name) for name in CHUNKED_ONLY} if args.scheduler == "chunked" else {}
    scheduler = SCHEDULERS[str(args.scheduler)](
        manager,
        args.max_num_seqs,
        watermark=math.ceil((args.watermark or 0) * (manager.snapshot().num_slots // unit)) * unit,
        policy=str(args.scheduling_policy),
        swap_space=SwapSpace(num_cpu_blocks) if num_cpu_blocks else None,
        **chunked,
    )
    # Paging alone, as chapter 3 has it, is packed and placed as chapters 0 and 3 say.
    pack = PagedBatches(manager, model.device) if isinstance(manager, SharingManager) else None
    forward = _forward(model, store, args, keep_weights)
    return Engine(model, manager, store, scheduler, place, pack=pack, forward=forward, on_step=on_step)


def build_manager(model: Decoder, args: EngineArgs) -> KVManager:
    """The books of the memory that the options name. Raises InvalidOption."""
    args = args.resolve(model)
    slot = bytes_per_token(model)
    num_slots = int(args.kv_cache_memory_bytes or 0) // slot
    if args.cache == "recompute":
        return RecomputeManager(num_slots, slot)
    if args.cache == "naive":
        return NaiveManager(num_slots, slot)
    if args.cache == "contiguous":
        return ContiguousManager(num_slots, slot, int(args.max_model_len or 0), str(args.reservation))
    size = int(args.num_blocks or 0), int(args.block_size or 0), slot
    if args.prefix_cache is not None:
        return PrefixCachingManager(*size, args.prefix_cache)
    return SharingManager(*size) if args.sharing else PagedManager(*size)


def _tensors(
    model: Decoder, args: EngineArgs, manager: KVManager, num_cpu_blocks: int
) -> tuple[KVStore, Callable[[Batch], Batch]]:
    """The tensors that belong to the books, and how a batch gets its places in them."""
    config, dtype, device = model.config, model.dtype, model.device
    if isinstance(manager, ContiguousManager):
        store = ContiguousStore(config, manager.num_slots, dtype, device)
        return store, lambda batch: ContiguousBatch.place(batch, manager)
    if isinstance(manager, PagedManager):
        num_blocks, attention = manager.pool.num_blocks, str(args.attention)
        size = config, num_blocks, manager.block_size
        pool: PagedStore
        if num_cpu_blocks:
            pool = SwapStore(*size, dtype, device, attention, num_cpu_blocks)
        else:
            pool = (SharingStore if args.sharing else PagedStore)(*size, dtype, device, attention)
        return pool, lambda batch: PagedBatch.place(batch, manager)
    return RecomputeStore() if args.cache == "recompute" else NaiveStore(), lambda batch: batch


def _forward(
    model: Decoder, store: KVStore, args: EngineArgs, keep_weights: bool
) -> Callable[[Batch, KVStore], Tensor] | None:
    """What computes in the model's place, where it is wanted and can be had: `resolve` knows."""
    if args.enforce_eager:
        return None
    if model.device.type == "cpu":
        products = products_for(model.dtype, model.device)
        return PackedDecoder(model, _rows(model), products, keep_weights)
    assert isinstance(store, PagedStore)
    try:
        max_blocks = num_blocks_for(int(args.max_model_len or 0), int(args.block_size or 0))
        return DecodeGraphs(model, store, args.max_num_seqs, max_blocks)
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(
            f"{model.device} has no memory left to record decode steps of {args.max_num_seqs} sequences "
            "as CUDA graphs. Lower gpu_memory_utilization or max_num_seqs, or set enforce_eager=True."
        ) from error


def _rows(model: Decoder) -> RowKernels | None:
    """Norm and rotary embedding in C, where they can be had."""
    if max(model.config.hidden_size, model.config.head_dim) > MAX_ROW:
        return None
    try:
        return RowKernels()
    except InvalidOption:
        return None


def _check_room(device: torch.device, num_bytes: int, option: str) -> None:
    """Raises InvalidOption for a pool that the device could never hold; some systems would promise it."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()  # what an earlier engine had, PyTorch may still keep for itself
    room = torch.cuda.mem_get_info(device)[0] if on_gpu else psutil.virtual_memory().total
    if num_bytes > room:
        raise InvalidOption(
            f"{device} has no room for {num_bytes:,} bytes of keys and values: there are {room:,}. "
            f"Lower {option}."
        )
