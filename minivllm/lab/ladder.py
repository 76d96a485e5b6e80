"""Above the chapters: one workload, run up the rungs of the book, each rung one idea more.

Every rung must give the tokens of the first, which recomputes everything and so cannot be stale. What
may change is memory and time.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field

import torch

from minivllm.decoding.generate import generate
from minivllm.errors import InvalidOption, RequestTooLong
from minivllm.lab.same_tokens import compare_tokens
from minivllm.memory.manager import KVManager, RecomputeManager
from minivllm.memory.naive import NaiveManager
from minivllm.memory.naive_store import NaiveStore
from minivllm.memory.store import KVStore, RecomputeStore
from minivllm.model.batch import Batch
from minivllm.model.decoder import Decoder
from minivllm.params import SamplingParams

PROMPT = (
    "A language model writes one token at a time. For each new token it looks back at every token before it, "
    "and to look back it needs a key and a value for each of them. The simplest way to have them is to"
)
LENGTHS = (32, 64, 128, 256, 512)


@dataclass(frozen=True)
class Rung:
    """One kind of memory: its books and its tensors."""

    name: str
    chapter: int
    manager: Callable[[int, int], KVManager]
    store: Callable[[], KVStore]


RUNGS = {
    rung.name: rung
    for rung in (
        Rung("recompute", 0, RecomputeManager, RecomputeStore),
        Rung("naive", 1, NaiveManager, NaiveStore),
    )
}


@dataclass
class RungResult:
    """What one rung did. Times in seconds; step_seconds maps a length to the time of one token there."""

    name: str
    chapter: int
    token_ids: list[int] = field(default_factory=list)
    same_tokens: str = ""
    kv_bytes: int = 0
    ttft: float = 0.0
    tpot: float = 0.0
    tok_s: float = 0.0
    step_seconds: dict[int, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, object]:
        """A plain dictionary of all fields."""
        return asdict(self)


def check_rungs(names: Sequence[str]) -> list[Rung]:
    """The rungs of these names in the book's order. Raises InvalidOption for a name that is none."""
    for name in names:
        if name not in RUNGS:
            raise InvalidOption(f"There is no rung {name!r}; the rungs are {', '.join(RUNGS)}.")
    return [rung for rung in RUNGS.values() if rung.name in names]


def run_ladder(
    model: Decoder,
    prompt: Sequence[int],
    *,
    rungs: Sequence[str] = tuple(RUNGS),
    max_tokens: int = 32,
    lengths: Sequence[int] = LENGTHS,
    max_model_len: int = 2048,
    report: Callable[[str], None] = lambda doing: None,
) -> Iterator[RungResult]:
    """Yield each rung's result as soon as it is there; the first is what the others are compared with."""
    if model.dtype not in (torch.float32, torch.float64):
        raise InvalidOption(f"dtype {model.dtype} rounds too much to compare tokens; use float32 or float64.")
    longest = min(max_model_len, model.config.max_position_embeddings)
    if len(prompt) + max_tokens > longest:
        raise RequestTooLong(
            f"The prompt's {len(prompt)} tokens and max_tokens={max_tokens} are more than the {longest} that "
            "a sequence may have here. Lower max_tokens."
        )
    first: list[int] | None = None
    _warm_up(model, prompt)
    for rung in check_rungs(rungs):
        report(f"{rung.name}: {max_tokens} tokens")
        result = _run_workload(model, rung, prompt, max_tokens, max_model_len)
        if first is None:
            first = result.token_ids
            result.same_tokens = "(reference)"
        else:
            result.same_tokens = compare_tokens(model, prompt, first, result.token_ids).verdict
        for length in lengths:
            report(f"{rung.name}: one token at length {length}")
            result.step_seconds[length] = _time_step(model, rung, prompt, length)
        yield result


def _run_workload(
    model: Decoder, rung: Rung, prompt: Sequence[int], max_tokens: int, max_model_len: int
) -> RungResult:
    """Generate greedily, and keep the manager's books beside the store's tensors, step by step.

    KV held is what the books say; tests hold them to the bytes of the tensors.
    """
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    bytes_per_token = model.config.kv_elements_per_token * model.dtype.itemsize
    manager, store = rung.manager(max_model_len, bytes_per_token), rung.store()
    result, times = RungResult(rung.name, rung.chapter), [time.perf_counter()]
    manager.allocate(0, len(prompt))
    for token in generate(model, store, prompt, params):
        times.append(time.perf_counter())
        result.token_ids.append(token)
        result.kv_bytes = manager.snapshot().held_bytes
        manager.allocate(0, len(prompt) + len(result.token_ids))
    result.ttft = times[1] - times[0]
    result.tpot = (times[-1] - times[1]) / max(len(times) - 2, 1)
    result.tok_s = len(result.token_ids) / (times[-1] - times[0])
    return result


@torch.inference_mode()
def _warm_up(model: Decoder, prompt: Sequence[int]) -> None:
    """One step that is not counted: the first is slow, whatever it computes."""
    model(Batch.pack([(0, prompt, 0)], model.device), RecomputeStore())


@torch.inference_mode()
def _time_step(model: Decoder, rung: Rung, prompt: Sequence[int], length: int, repeats: int = 3) -> float:
    """Seconds to go on from `length` tokens by one: the median of a few steps at length, length + 1, ...

    A memory that keeps KV has all but the last token already. Which tokens they are does not matter.
    """
    tokens = [prompt[i % len(prompt)] for i in range(length + repeats - 1)]
    store, num_computed = rung.store(), 0
    if store.keeps_kv and length > 1:
        num_computed = length - 1
        model(Batch.pack([(0, tokens[:num_computed], 0)], model.device), store)
    seconds = []
    for end in range(length, length + repeats):
        start = time.perf_counter()
        logits = model(Batch.pack([(0, tokens[num_computed:end], num_computed)], model.device), store)
        logits.argmax().item()  # waits for the device
        seconds.append(time.perf_counter() - start)
        num_computed = end if store.keeps_kv else 0
    return statistics.median(seconds)


def about(model: Decoder, name: str) -> dict[str, str]:
    """What a measurement must say of itself: model, dtype, device, versions, date."""
    where = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else _cpu_name()
    return {
        "model": name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": where,
        "versions": f"torch {torch.__version__}, Python {platform.python_version()}",
        "date": time.strftime("%Y-%m-%d"),
    }


def _cpu_name() -> str:
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            name = next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return f"CPU {name}, {torch.get_num_threads()} threads"
