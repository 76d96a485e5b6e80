"""Above the chapters: what a benchmark may be asked for, which engine can have it, and where it stands.

Nothing heavy is loaded here: an engine's module is imported when it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from minivllm.errors import InvalidOption, InvalidPrompt, RequestTooLong
from minivllm.lab.workload import WorkloadRequest

if TYPE_CHECKING:
    import torch

    from minivllm.lab.bench.result import BenchResult
    from minivllm.model.config import ModelConfig
    from minivllm.model.hub import ModelSource

DEFAULT_MAX_NUM_SEQS = 64  # minivllm's own default, so that every engine may run as many requests at once


class Report(Protocol):
    """Called while an engine runs."""

    def __call__(self, done: int, total: int, /) -> None:
        """Output tokens so far, and in all."""


@dataclass(frozen=True)
class BenchOptions:
    """What every engine is told. None: not set, so the engine's own default holds.

    max_num_seqs: most requests at once; for static batches, the size of a batch. The names are those of
    `LLM`; `check_options` says which engine has which.
    """

    model: str = "smollm2-135m"
    dtype: str = "auto"
    device: str = "auto"
    cache: str | None = None
    scheduler: str | None = None
    attention: str | None = None
    kv_cache_memory_bytes: int | None = None
    block_size: int | None = None
    num_blocks: int | None = None
    reservation: str | None = None
    max_num_seqs: int | None = None
    max_model_len: int | None = None

    def __post_init__(self) -> None:
        for name in ("kv_cache_memory_bytes", "block_size", "num_blocks", "max_num_seqs", "max_model_len"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise InvalidOption(f"{name}={value!r} is not possible: it must be a whole number from 1 on.")

    @property
    def batch_size(self) -> int:
        """max_num_seqs, or what holds when it is not set."""
        return self.max_num_seqs or DEFAULT_MAX_NUM_SEQS

    @property
    def chosen(self) -> dict[str, Any]:
        """The engine options that were set, by name."""
        names = [field.name for field in fields(self)][3:]
        return {name: value for name in names if (value := getattr(self, name)) is not None}


class Engine(NamedTuple):
    """One engine: the module with its `run`, and the options that it can have."""

    module: str
    options: tuple[str, ...]


_MEMORY = ("kv_cache_memory_bytes", "block_size", "num_blocks")
ENGINES = {
    "minivllm": Engine("minivllm_engine", tuple(field.name for field in fields(BenchOptions))[3:]),
    "transformers": Engine("transformers_static", ("max_num_seqs",)),
    "transformers-continuous": Engine("transformers_continuous", (*_MEMORY, "max_num_seqs")),
    "vllm": Engine("vllm_engine", (*_MEMORY, "max_num_seqs", "max_model_len")),
}


def run_bench(
    engine: str, requests: Sequence[WorkloadRequest], options: BenchOptions, report: Report
) -> BenchResult:
    """Run a workload through an engine of this name. Raises InvalidOption for what the engine cannot have."""
    check_options(engine, options)
    return import_module(f"minivllm.lab.bench.{ENGINES[engine].module}").run(requests, options, report)


def check_options(engine: str, options: BenchOptions) -> None:
    """Raises InvalidOption for an engine that is none, and for a set option that it cannot have."""
    if engine not in ENGINES:
        raise InvalidOption(f"engine={engine!r} is not possible: it must be one of {', '.join(ENGINES)}.")
    for name, value in options.chosen.items():
        if name not in ENGINES[engine].options:
            raise InvalidOption(
                f"{name}={value!r} is not possible with the engine {engine!r}, which knows "
                f"{', '.join(ENGINES[engine].options)}. Leave {name} out, or take the engine 'minivllm'."
            )


def refuse_arrivals(engine: str, requests: Sequence[WorkloadRequest]) -> None:
    """Raises InvalidOption if a request arrives later than at the start: this engine takes all at once."""
    late = sum(r.arrival > 0 for r in requests)
    if late:
        raise InvalidOption(
            f"The engine {engine!r} takes all requests at once, and {late} of {len(requests)} arrive later. "
            "--all-at-once ignores arrivals (for every engine); the engine 'minivllm' can keep to them."
        )


def resolve_options(options: BenchOptions) -> tuple[ModelSource, ModelConfig, torch.dtype, torch.device]:
    """Where the model is, its shape, and what "auto" means for it: the same for every engine."""
    from minivllm.model.hub import resolve
    from minivllm.model.loader import check_dtype, resolve_device, resolve_dtype

    device = resolve_device(options.device)
    check_dtype(options.dtype)
    source = resolve(options.model)
    config = config_of(source)
    return source, config, resolve_dtype(options.dtype, config, device), device


def config_of(source: ModelSource) -> ModelConfig:
    """The shape of a model whose weights are not loaded."""
    from pathlib import Path

    from minivllm.model.gguf_file import GGUFFile
    from minivllm.model.gguf_weights import gguf_config
    from minivllm.model.loader import folder_config
    from minivllm.model.presets import PRESETS

    if source.kind == "random":
        return PRESETS[str(source.preset)]
    path = Path(str(source.path))
    return gguf_config(GGUFFile(path)) if source.kind == "gguf" else folder_config(path)


def encode_prompts(
    requests: Sequence[WorkloadRequest], source: ModelSource, config: ModelConfig, longest: int | None = None
) -> list[list[int]]:
    """The token ids of every prompt. Raises InvalidPrompt for an id outside the vocabulary, RequestTooLong
    for a request longer than `longest`, or else than the model was made for."""
    from minivllm.model.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(source) if any(r.prompt is not None for r in requests) else None
    room = min(longest or config.max_position_embeddings, config.max_position_embeddings)
    prompts = []
    for number, request in enumerate(requests, 1):
        if request.prompt is not None and tokenizer is not None:
            ids = tokenizer.encode(request.prompt)
        else:
            ids = list(request.prompt_token_ids or ())
        if not ids or max(ids) >= config.vocab_size:
            wrong = f"has the token id {max(ids)}" if ids else "has no token"
            raise InvalidPrompt(
                f"Request {number} {wrong}; expected ids from 0 to {config.vocab_size - 1}, which is this "
                "model's vocabulary. `minivllm workload --vocab-size` sets it."
            )
        if len(ids) + request.max_tokens > room:
            raise RequestTooLong(
                f"Request {number} needs {len(ids)} + {request.max_tokens} tokens; this model has room for "
                f"{room}. `minivllm workload --max-in --max-out` makes shorter ones."
            )
        prompts.append(ids)
    return prompts
