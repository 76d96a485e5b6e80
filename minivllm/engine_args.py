"""Above the chapters: the options of an engine: which go together, and what they default to.

A default follows from the cache; so only an option that the caller set, and that this cache cannot have,
is refused. Names are vLLM's wherever vLLM has one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any

import psutil
import torch

from minivllm import kernels
from minivllm.errors import InvalidOption
from minivllm.memory.contiguous import RESERVATIONS
from minivllm.memory.paged import num_blocks_for
from minivllm.memory.prefix_cache import INDEXES
from minivllm.memory.size import bytes_per_token
from minivllm.model.decoder import Decoder
from minivllm.model.packed import products_for
from minivllm.scheduling.chunked import ChunkedScheduler
from minivllm.scheduling.continuous import ContinuousScheduler
from minivllm.scheduling.queue import POLICIES
from minivllm.scheduling.static import StaticScheduler

CACHES = ("recompute", "naive", "contiguous", "paged")
SCHEDULERS: dict[str, type[ContinuousScheduler]] = {
    "static": StaticScheduler,
    "continuous": ContinuousScheduler,
    "chunked": ChunkedScheduler,
}
PREEMPTIONS = ("recompute", "swap")
CHUNKED_ONLY = ("max_num_batched_tokens", "long_prefill_token_threshold", "prefer_prefill")
# option -> the caches that can have it; options that are not here go with every cache
ONLY_FOR = {
    "attention": ("paged",),
    "block_size": ("paged",),
    "num_blocks": ("paged",),
    "reservation": ("contiguous",),
    "sharing": ("paged",),
    "prefix_cache": ("paged",),
    "enable_prefix_caching": ("paged",),
    "swap_space": ("paged",),
    "watermark": ("naive", "paged"),
}
GIB = 2**30


@dataclass(frozen=True)
class EngineArgs:
    """The options of an engine; None means the default for this cache and device.

    cache: "recompute" | "naive" | "contiguous" | "paged".
    scheduler: "static" | "continuous" | "chunked"; paged memory has the last by default, others the second.
    attention: how paged attention is computed: "torch": in PyTorch, on any device; "reference": the slow and
        plain way of chapter 3, which all others are compared with; "triton": kernels for a GPU, in float32,
        float16 or bfloat16; "triton-naive" | "triton-tiled" | "triton-grouped": the steps on the way to it;
        "c": a kernel for a CPU, compiled at first use. By default "triton" on CUDA and "c" on a CPU where it
        can serve the model, else "torch".
    kv_cache_memory_bytes: the memory for keys and values, for every cache. By default min(4 GiB, a quarter
        of the free RAM) on a CPU, and on CUDA what gpu_memory_utilization leaves; never more than
        max_num_seqs sequences of max_model_len tokens can use.
    gpu_memory_utilization: share of a GPU's memory to use in all; CUDA only, 0.9.
    block_size: paged: tokens in a block; 16. num_blocks: paged: overrides the budget.
    reservation: contiguous: "max" (default) | "pow2" | "oracle"; the last two take max_tokens for the true
        output length, which holds where no stop ends a request early.
    sharing: paged: whether the sequences of one prompt share blocks; True. Without it each has its own, which
        shows what sharing saves.
    prefix_cache: paged: "hash" | "radix": find computed prefixes again; by default not.
        enable_prefix_caching: True means "hash".
    preemption: "recompute" | "swap" (paged): what becomes of a request that must make room. swap_space: bytes
        of CPU memory for the blocks of such requests; when it is full, they are computed again.
    scheduling_policy: "fcfs", first come first served, or "priority": the lower number first.
    watermark: naive, paged: share of the memory to leave free when a request is admitted, rounded up to
        whole blocks; 0.01.
    max_model_len: most tokens of prompt and output together; the model's own limit.
    max_num_seqs: most sequences that run at once.
    max_num_batched_tokens: chunked: most tokens in a step; 512 on a CPU and 2048 elsewhere, and at least
        max_num_seqs. long_prefill_token_threshold: chunked: most tokens of one request in a step.
        prefer_prefill: chunked: prompts before decodes; False.
    enforce_eager: run the model as chapter 0 writes it, operation by operation. Without it, on CUDA with
        kernels in Triton, decode steps are recorded as CUDA graphs at the start and replayed; on a CPU the
        weights are packed at the start, float32 and, where the processor multiplies it, bfloat16. Where
        neither can be had, and in other caches than paged, it is True.
    """

    cache: str = "paged"
    scheduler: str | None = None
    attention: str | None = None
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float | None = None
    block_size: int | None = None
    num_blocks: int | None = None
    reservation: str | None = None
    sharing: bool | None = None
    prefix_cache: str | None = None
    enable_prefix_caching: bool | None = None
    preemption: str | None = None
    swap_space: int | None = None
    scheduling_policy: str | None = None
    watermark: float | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int | None = None
    long_prefill_token_threshold: int | None = None
    prefer_prefill: bool | None = None
    enforce_eager: bool = False

    def __post_init__(self) -> None:
        self._check_choice("cache", CACHES)
        self._check_choice("scheduler", tuple(SCHEDULERS))
        self._check_choice("preemption", PREEMPTIONS)
        self._check_choice("scheduling_policy", tuple(POLICIES))
        self._check_choice("prefix_cache", tuple(INDEXES))
        self._check_choice("reservation", tuple(RESERVATIONS))
        for name, caches in ONLY_FOR.items():
            if getattr(self, name) is not None and self.cache not in caches:
                raise InvalidOption(
                    f"{name}={getattr(self, name)!r} is not possible with cache={self.cache!r}: "
                    f"only cache={' or '.join(map(repr, caches))} has it. Leave it out, or change the cache."
                )
        for name in ("block_size", "num_blocks", "kv_cache_memory_bytes", "max_num_seqs", *CHUNKED_ONLY[:2]):
            self._check_integer(name, 1)
        self._check_integer("swap_space", 0)
        for name in ("sharing", "enable_prefix_caching", "prefer_prefill", "enforce_eager"):
            self._check_choice(name, (True, False))
        self._check_company()
        self._check_integer("max_model_len", 2)
        self._check_share("watermark", "from 0 to below 1", lambda share: 0 <= share < 1)
        self._check_share("gpu_memory_utilization", "above 0, at most 1", lambda share: 0 < share <= 1)
        if self.attention is not None:
            kernels.get(self.attention)

    def _check_company(self) -> None:
        """Raises InvalidOption for options of paged memory and of schedulers that do not go together."""
        paged = self.cache == "paged"
        for name, value in (("scheduler", "chunked"), ("preemption", "swap")):
            if getattr(self, name) == value and not paged:
                raise InvalidOption(
                    f"{name}={value!r} is not possible with cache={self.cache!r}: only cache='paged' has it."
                )
        if (self.scheduler or ("chunked" if paged else "continuous")) != "chunked":
            for name in CHUNKED_ONLY:
                if getattr(self, name) is not None:
                    raise InvalidOption(
                        f"{name}={getattr(self, name)!r} is not possible with this scheduler: only "
                        "scheduler='chunked' has it. Leave it out, or change the scheduler."
                    )
        if self.enable_prefix_caching is False and self.prefix_cache is not None:
            raise InvalidOption(
                f"prefix_cache={self.prefix_cache!r} and enable_prefix_caching=False contradict each other."
            )
        index = self._index()
        if self.sharing is False and index is not None:
            raise InvalidOption(
                f"prefix_cache={index!r} is not possible with sharing=False: it shares blocks."
            )
        if self.preemption == "swap" and not self.swap_space:
            raise InvalidOption("preemption='swap' needs swap_space, the bytes of CPU memory to swap to.")
        if self.preemption == "swap" and self.sharing is False:
            raise InvalidOption("preemption='swap' is not possible with sharing=False: leave sharing out.")
        if self.swap_space and self.preemption != "swap":
            raise InvalidOption(
                f"swap_space={self.swap_space} is for preemption='swap': set that too, or leave it out."
            )

    def _index(self) -> str | None:
        return self.prefix_cache or ("hash" if self.enable_prefix_caching else None)

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
        config = model.config
        group = config.num_attention_heads // config.num_key_value_heads
        kind = model.dtype, model.device, config.head_dim, group
        if self.attention is not None:
            kernels.check_model(self.attention, *kind)
        attention = (self.attention or kernels.fastest(*kind)) if paged else None
        args = replace(
            self,
            scheduler=self.scheduler or ("chunked" if paged else "continuous"),
            attention=attention,
            preemption=self.preemption or "recompute",
            scheduling_policy=self.scheduling_policy or "fcfs",
            sharing=self.sharing is not False if paged else None,
            enforce_eager=self.enforce_eager or not paged or not _has_faster(model, attention),
            prefix_cache=self._index(),
            enable_prefix_caching=None,  # it has become an index
            max_model_len=self.max_model_len or limit,
            block_size=(self.block_size or 16) if paged else None,
            reservation=(self.reservation or "max") if self.cache == "contiguous" else None,
            watermark=_first(self.watermark, 0.01) if self.cache in ONLY_FOR["watermark"] else None,
        )
        if args.scheduler == "chunked":
            budget = max(512 if model.device.type == "cpu" else 2048, self.max_num_seqs)
            args = replace(
                args,
                max_num_batched_tokens=self.max_num_batched_tokens or budget,
                prefer_prefill=bool(self.prefer_prefill),
            )
        return args._resolve_memory(model)

    def _resolve_memory(self, model: Decoder) -> EngineArgs:
        slot = bytes_per_token(model)
        unit = slot * (self.block_size or 1)
        if self.preemption == "swap" and int(self.swap_space or 0) < unit:
            raise InvalidOption(
                f"swap_space={self.swap_space} is not possible: a block takes {unit} bytes. Give more."
            )
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

    def _check_choice(self, name: str, choices: tuple[str | bool, ...]) -> None:
        value = getattr(self, name)
        right = any(value == choice and type(value) is type(choice) for choice in choices)
        if not right and not (value is None and name not in ("cache", "enforce_eager")):
            listed = ", ".join(map(str, choices))
            raise InvalidOption(f"{name}={value!r} is not possible: it must be one of {listed}.")

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


def _has_faster(model: Decoder, attention: str | None) -> bool:
    """Whether anything can run in the model's place: on a CPU packed weights, on CUDA recorded steps, which
    attention in PyTorch keeps out: it waits for the device."""
    if model.device.type == "cpu":
        return products_for(model.dtype, model.device) is not None
    return model.device.type == "cuda" and str(attention).startswith("triton")


def _default_budget(device: torch.device, gpu_memory_utilization: float | None) -> int:
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what an earlier engine had, PyTorch may still keep for itself
        free, total = torch.cuda.mem_get_info(device)
        return max(0, int(total * _first(gpu_memory_utilization, 0.9)) - (total - free))
    return min(4 * GIB, psutil.virtual_memory().available // 4)


def _first(value: float | None, default: float) -> float:
    return default if value is None else value
