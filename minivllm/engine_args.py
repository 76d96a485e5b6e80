"""Above the chapters: the options of an engine: which go together, what they default to, what they build.

A default follows from the cache; so only an option that the caller set, and that this cache cannot have,
is refused. Names are vLLM's wherever vLLM has one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any

import psutil
import torch

from minivllm import kernels
from minivllm.engine import Engine, Step
from minivllm.errors import InvalidOption
from minivllm.memory.contiguous import RESERVATIONS, ContiguousManager
from minivllm.memory.contiguous_store import ContiguousBatch, ContiguousStore
from minivllm.memory.manager import KVManager, RecomputeManager
from minivllm.memory.naive import NaiveManager
from minivllm.memory.naive_store import NaiveStore
from minivllm.memory.paged import PagedManager, num_blocks_for
from minivllm.memory.paged_store import PagedBatch, PagedStore
from minivllm.memory.size import bytes_per_token
from minivllm.memory.store import KVStore, RecomputeStore
from minivllm.model.batch import Batch
from minivllm.model.decoder import Decoder
from minivllm.scheduling.continuous import ContinuousScheduler
from minivllm.scheduling.static import StaticScheduler

CACHES = ("recompute", "naive", "contiguous", "paged")
SCHEDULERS = {"static": StaticScheduler, "continuous": ContinuousScheduler}
# option -> the caches that can have it; options that are not here go with every cache
ONLY_FOR = {
    "attention": ("paged",),
    "block_size": ("paged",),
    "num_blocks": ("paged",),
    "reservation": ("contiguous",),
    "watermark": ("naive", "paged"),
}
GIB = 2**30


@dataclass(frozen=True)
class EngineArgs:
    """The options of an engine; None means the default for this cache and device.

    cache: "recompute" | "naive" | "contiguous" | "paged".
    scheduler: "static" | "continuous" (default).
    attention: how paged attention is computed: "torch".
    kv_cache_memory_bytes: the memory for keys and values, for every cache. By default min(4 GiB, a quarter
        of the free RAM) on a CPU, and on CUDA what gpu_memory_utilization leaves; never more than
        max_num_seqs sequences of max_model_len tokens can use.
    gpu_memory_utilization: share of a GPU's memory to use in all; CUDA only, 0.9.
    block_size: paged: tokens in a block; 16. num_blocks: paged: overrides the budget.
    reservation: contiguous: "max" (default) | "pow2" | "oracle"; the last two take max_tokens for the true
        output length, which holds where no stop ends a request early.
    preemption: "recompute". scheduling_policy: "fcfs", first come first served.
    watermark: naive, paged: share of the memory to leave free when a request is admitted, rounded up to
        whole blocks; 0.01.
    max_model_len: most tokens of prompt and output together; the model's own limit.
    max_num_seqs: most requests that run at once.
    """

    cache: str = "paged"
    scheduler: str | None = None
    attention: str | None = None
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float | None = None
    block_size: int | None = None
    num_blocks: int | None = None
    reservation: str | None = None
    preemption: str | None = None
    scheduling_policy: str | None = None
    watermark: float | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 64

    def __post_init__(self) -> None:
        self._check_choice("cache", CACHES)
        self._check_choice("scheduler", tuple(SCHEDULERS))
        self._check_choice("preemption", ("recompute",))
        self._check_choice("scheduling_policy", ("fcfs",))
        self._check_choice("reservation", tuple(RESERVATIONS))
        for name, caches in ONLY_FOR.items():
            if getattr(self, name) is not None and self.cache not in caches:
                raise InvalidOption(
                    f"{name}={getattr(self, name)!r} is not possible with cache={self.cache!r}: "
                    f"only cache={' or '.join(map(repr, caches))} has it. Leave it out, or change the cache."
                )
        for name in ("block_size", "num_blocks", "kv_cache_memory_bytes", "max_num_seqs"):
            self._check_integer(name, 1)
        self._check_integer("max_model_len", 2)
        self._check_share("watermark", "from 0 to below 1", lambda share: 0 <= share < 1)
        self._check_share("gpu_memory_utilization", "above 0, at most 1", lambda share: 0 < share <= 1)
        if self.attention is not None:
            kernels.get(self.attention)

    def resolve(self, model: Decoder) -> EngineArgs:
        """The same options with every default filled in for this model. Raises InvalidOption."""
        limit = model.config.max_position_embeddings
        if self.max_model_len is not None and self.max_model_len > limit:
            raise InvalidOption(
                f"max_model_len={self.max_model_len} is not possible: the model's longest context is {limit}."
            )
        if self.gpu_memory_utilization is not None and (self.kv_cache_memory_bytes or self.num_blocks):
            raise InvalidOption(
                "gpu_memory_utilization is not possible beside kv_cache_memory_bytes or num_blocks: "
                "these set the memory already. Leave one of them out."
            )
        if self.gpu_memory_utilization is not None and model.device.type != "cuda":
            raise InvalidOption(
                f"gpu_memory_utilization is not possible on {model.device}: it is for CUDA devices. "
                "Set kv_cache_memory_bytes instead."
            )
        paged = self.cache == "paged"
        args = replace(
            self,
            scheduler=self.scheduler or "continuous",
            attention=(self.attention or "torch") if paged else None,
            preemption="recompute",
            scheduling_policy="fcfs",
            max_model_len=self.max_model_len or limit,
            block_size=(self.block_size or 16) if paged else None,
            reservation=(self.reservation or "max") if self.cache == "contiguous" else None,
            watermark=_first(self.watermark, 0.01) if self.cache in ONLY_FOR["watermark"] else None,
        )
        return args._resolve_memory(model)

    def _resolve_memory(self, model: Decoder) -> EngineArgs:
        slot = bytes_per_token(model)
        unit = slot * (self.block_size or 1)
        if self.num_blocks is not None:
            return replace(self, kv_cache_memory_bytes=self.num_blocks * unit)
        budget = self.kv_cache_memory_bytes
        if budget is None:
            most = self.max_num_seqs * num_blocks_for(self.max_model_len or 1, self.block_size or 1) * unit
            budget = min(_default_budget(model.device, self.gpu_memory_utilization), most)
        if budget < unit:
            what = "a block" if self.cache == "paged" else "one token"
            raise InvalidOption(
                f"kv_cache_memory_bytes={budget} is not possible: {what} takes {unit} bytes of this model "
                f"in {str(model.dtype).removeprefix('torch.')}. Give more."
            )
        num_blocks = budget // unit if self.cache == "paged" else None
        share = None  # it has become a number of bytes
        return replace(
            self, kv_cache_memory_bytes=budget, num_blocks=num_blocks, gpu_memory_utilization=share
        )

    def _check_choice(self, name: str, choices: tuple[str, ...]) -> None:
        value = getattr(self, name)
        if value not in choices and not (value is None and name != "cache"):
            raise InvalidOption(f"{name}={value!r} is not possible: it must be one of {', '.join(choices)}.")

    def _check_integer(self, name: str, least: int) -> None:
        value = getattr(self, name)
        right = isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least
        if not right and not (value is None and name != "max_num_seqs"):
            raise InvalidOption(
                f"{name}={value!r} is not possible: it must be a whole number from {least} on."
            )

    def _check_share(self, name: str, expected: str, in_range: Callable[[Any], bool]) -> None:
        value = getattr(self, name)
        number = isinstance(value, Real) and not isinstance(value, bool)
        if value is not None and not (number and in_range(value)):
            raise InvalidOption(f"{name}={value!r} is not possible: it must be a number {expected}.")


def build_engine(model: Decoder, args: EngineArgs, on_step: Callable[[Step], None] | None = None) -> Engine:
    """An engine of the parts that the options name. Raises InvalidOption."""
    args = args.resolve(model)
    if args.cache != "recompute":
        _check_room(model.device, int(args.kv_cache_memory_bytes or 0))
    manager = build_manager(model, args)
    store, place = _tensors(model, args, manager)
    unit = args.block_size or 1
    spare = math.ceil((args.watermark or 0) * (manager.snapshot().num_slots // unit)) * unit
    scheduler = SCHEDULERS[str(args.scheduler)](manager, args.max_num_seqs, watermark=spare)
    return Engine(model, manager, store, scheduler, place, on_step=on_step)


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
    return PagedManager(int(args.num_blocks or 0), int(args.block_size or 0), slot)


def _tensors(
    model: Decoder, args: EngineArgs, manager: KVManager
) -> tuple[KVStore, Callable[[Batch], Batch]]:
    """The tensors that belong to the books, and how a batch gets its places in them."""
    config, dtype, device = model.config, model.dtype, model.device
    if isinstance(manager, ContiguousManager):
        store = ContiguousStore(config, manager.num_slots, dtype, device)
        return store, lambda batch: ContiguousBatch.place(batch, manager)
    if isinstance(manager, PagedManager):
        num_blocks, attention = manager.pool.num_blocks, str(args.attention)
        pool = PagedStore(config, num_blocks, manager.block_size, dtype, device, attention)
        return pool, lambda batch: PagedBatch.place(batch, manager)
    return RecomputeStore() if args.cache == "recompute" else NaiveStore(), lambda batch: batch


def _check_room(device: torch.device, num_bytes: int) -> None:
    """Raises InvalidOption for a pool that the device could never hold; some systems would promise it."""
    on_gpu = device.type == "cuda"
    room = torch.cuda.mem_get_info(device)[0] if on_gpu else psutil.virtual_memory().total
    if num_bytes > room:
        raise InvalidOption(
            f"{device} has no room for {num_bytes:,} bytes of keys and values: there are {room:,}. "
            "Lower kv_cache_memory_bytes or num_blocks."
        )


def _default_budget(device: torch.device, gpu_memory_utilization: float | None) -> int:
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return max(0, int(total * _first(gpu_memory_utilization, 0.9)) - (total - free))
    return min(4 * GIB, psutil.virtual_memory().available // 4)


def _first(value: float | None, default: float) -> float:
    return default if value is None else value
