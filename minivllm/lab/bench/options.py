"""Above the chapters: what a benchmark may be asked for, which engine can have it, and where it stands.

Nothing heavy is loaded here: an engine's module is imported when it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import Field, dataclass, field, fields
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


def _option(kind: type, help: str, least: int = 1) -> Any:
    """An engine option that is not set. kind: its type, int, float, str or bool; an int is at least `least`.
    The command line makes an option of it, with this help."""
    return field(default=None, metadata={"kind": kind, "help": help, "least": least})


@dataclass(frozen=True)
class BenchOptions:
    """What every engine is told. None: not set, so the engine's own default holds.

    max_num_seqs: most requests at once; for static batches, the size of a batch. The names are those of
    `LLM`, and one line here adds one; `check_options` says which engine has which.
    """

    model: str = "smollm2-135m"
    dtype: str = "auto"
    device: str = "auto"
    cache: str | None = _option(str, "KV memory: recompute, naive, contiguous or paged.")
    scheduler: str | None = _option(str, "static, continuous or chunked.")
    attention: str | None = _option(str, "How to attend: reference, torch, c, triton, triton-naive, ...")
    kv_cache_memory_bytes: int | None = _option(int, "Memory for keys and values.")
    block_size: int | None = _option(int, "Tokens in a block.")
    num_blocks: int | None = _option(int, "Blocks, instead of a number of bytes.")
    reservation: str | None = _option(str, "Contiguous memory: max, pow2 or oracle.")
    sharing: bool | None = _option(bool, "Paged: whether samples and beams share blocks.")
    prefix_cache: str | None = _option(str, "Find computed prefixes again: hash or radix.")
    enable_prefix_caching: bool | None = _option(bool, "The same as prefix-cache hash.")
    preemption: str | None = _option(str, "When memory is full: recompute or swap.")
    swap_space: int | None = _option(int, "Bytes of CPU memory to swap to.", 0)
    watermark: float | None = _option(float, "Share of the memory to leave free at admission; 0.01.")
    max_num_batched_tokens: int | None = _option(int, "Scheduler chunked: most tokens in a step.")
    long_prefill_token_threshold: int | None = _option(int, "Chunked: most tokens of one request in a step.")
    prefer_prefill: bool | None = _option(bool, "Chunked: prompts before decodes.")
    enforce_eager: bool | None = _option(bool, "The plain decoder: no CUDA graphs, nothing packed.")
    max_num_seqs: int | None = _option(int, "Most sequences at once; 64.")
    max_model_len: int | None = _option(int, "Most tokens of prompt and output together.")

    def __post_init__(self) -> None:
        for option in engine_options():
            value, least = getattr(self, option.name), option.metadata["least"]
            whole = isinstance(value, int) and not isinstance(value, bool) and value >= least
            if option.metadata["kind"] is int and value is not None and not whole:
                raise InvalidOption(
                    f"{option.name}={value!r} is not possible: it must be a whole number from {least} on."
                )

    @property
    def batch_size(self) -> int:
        """max_num_seqs, or what holds when it is not set."""
        return self.max_num_seqs or DEFAULT_MAX_NUM_SEQS

    @property
    def chosen(self) -> dict[str, Any]:
        """The engine options that were set, by name."""
        names = [option.name for option in engine_options()]
        return {name: value for name in names if (value := getattr(self, name)) is not None}


def engine_options() -> list[Field[Any]]:
    """The fields of BenchOptions that are options of an engine; their metadata: kind, help and least."""
    return [option for option in fields(BenchOptions) if option.metadata]


class Engine(NamedTuple):
    """One engine: the module with its `run`, and the options that it can have."""

    module: str
    options: tuple[str, ...]


_MEMORY = ("kv_cache_memory_bytes", "block_size", "num_blocks")
ENGINES = {
    "minivllm": Engine("minivllm_engine", tuple(option.name for option in engine_options())),
    "transformers": Engine("transformers_static", ("max_num_seqs",)),
    "transformers-continuous": Engine("transformers_continuous", (*_MEMORY, "max_num_seqs")),
    "vllm": Engine("vllm_engine", (*_MEMORY, "max_num_seqs", "max_model_len")),
}


def run_bench(
    engine: str, requests: Sequence[WorkloadRequest], options: BenchOptions, report: Report
) -> BenchResult:
    """Run a workload through an engine of this name. Raises InvalidOption for what the engine cannot have."""
    check_options(engine, options)
    refuse_samples(requests)
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


def refuse_samples(requests: Sequence[WorkloadRequest]) -> None:
    """Raises InvalidOption for a request that asks for samples: engines are compared on greedy answers."""
    plain = {"n": 1, "temperature": 0}
    for number, r in enumerate(requests, 1):
        for name, value in ((name, getattr(r, name)) for name in plain if getattr(r, name) != plain[name]):
            raise InvalidOption(
                f"Request {number} of the workload has {name}={value}. bench runs one greedy answer for each "
                "request, so that engines can be compared; `minivllm ladder` runs samples."
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
                f"{room}. `minivllm workload --max-in --max-out` makes shorter ones, also of a trace."
            )
        prompts.append(ids)
    return prompts
