"""Above the chapters: what a notebook must know of the machine it runs on.

Which machine it is, the sizes that suit it, and the results that were measured on a GPU and are kept beside
the book, in `book/results/`.
"""

from __future__ import annotations

import json
import platform
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

import minivllm
from minivllm.errors import InvalidOption, InvalidResultFile
from minivllm.lab.bench.result import device_name
from minivllm.lab.workload import WorkloadRequest, make_workload
from minivllm.model.loader import resolve_device

RESULTS = Path("book", "results")
# KV bytes of a token: 2 (key and value) x layers x KV heads x head_dim x bytes of a number
SMOLLM2_FLOAT32 = 2 * 30 * 3 * 64 * 4  # 46,080
LLAMA_2_7B_FLOAT16 = 2 * 32 * 32 * 128 * 2  # 524,288


def about() -> str:
    """One line that every measurement here needs beside it: device, versions, date.

    On a CPU with the instructions that PyTorch uses of it. Nothing that tells which computer it is.
    """
    device = resolve_device("auto")
    name = device_name(device)
    capability = torch.backends.cpu.get_cpu_capability()  # "AVX2"; "DEFAULT" where there is nothing to tell
    if device.type == "cpu" and capability not in ("DEFAULT", "NO AVX"):
        name += f", {capability}"
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    return f"{name}, {versions}, minivllm {minivllm.__version__}, {time.strftime('%Y-%m-%d')}"


@dataclass(frozen=True)
class Scale:
    """Sizes for a notebook: seconds on a CPU, and a real load on a GPU.

    model, dtype, device: as `LLM` takes them. kv_cache_memory_bytes: one budget for every scheme of a
    comparison. max_model_len: what a contiguous memory reserves for each request. num_requests, and the
    mean and the most tokens in and out of one: what `requests` makes. vocab_size: the model's.
    """

    model: str
    dtype: str
    device: str
    num_requests: int
    kv_cache_memory_bytes: int
    max_model_len: int
    mean_in: int
    mean_out: int
    max_in: int
    max_out: int
    vocab_size: int

    def requests(self, seed: int = 0) -> list[WorkloadRequest]:
        """This scale's workload, from a seed: random token ids, log-normal lengths, all there at once."""
        return make_workload(
            self.num_requests,
            seed,
            mean_in=self.mean_in,
            mean_out=self.mean_out,
            max_in=self.max_in,
            max_out=self.max_out,
            vocab_size=self.vocab_size,
        )


def scale() -> Scale:
    """The sizes for this machine: SmolLM2-135M in float32 on a CPU; on CUDA the shape of Llama-2-7B.

    On a CPU the memory is 1,024 slots of 46,080 bytes, and max_model_len=256 lets a contiguous memory have
    four requests at once. On CUDA it is 8 GiB, which are 16,384 slots of 512 KiB: eight requests of 2,048.
    """
    if resolve_device("auto").type == "cuda":
        return Scale(
            model="random:llama-2-7b",
            dtype="float16",
            device="cuda",
            num_requests=64,
            kv_cache_memory_bytes=16_384 * LLAMA_2_7B_FLOAT16,
            max_model_len=2048,
            mean_in=160,
            mean_out=128,
            max_in=768,
            max_out=512,
            vocab_size=32_000,
        )
    return Scale(
        model="smollm2-135m",
        dtype="float32",
        device="cpu",
        num_requests=8,
        kv_cache_memory_bytes=1024 * SMOLLM2_FLOAT32,
        max_model_len=256,
        mean_in=24,
        mean_out=16,
        max_in=64,
        max_out=36,
        vocab_size=49_152,
    )


def gpu_results(name: str) -> dict[str, Any] | None:
    """What was measured on a GPU under this name: the object in `book/results/NAME.json`; None without one.

    The book is looked for beside the package, then in the current folder and those above it. Raises
    InvalidOption for what is no name, and InvalidResultFile for a file that cannot be read, is no JSON
    object, or does not say on which device and when it was measured.
    """
    if not isinstance(name, str) or re.fullmatch(r"[a-z0-9][a-z0-9_-]*", name) is None:
        raise InvalidOption(
            f"name={name!r} is not possible: it must be the name of a file in {RESULTS.as_posix()} "
            "without .json, of small letters, digits, - and _."
        )
    path = _results_folder() / f"{name}.json"
    shown = (RESULTS / path.name).as_posix()  # a notebook prints no path of this machine
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InvalidResultFile(f"{shown} cannot be read: {reason}. Restore it from the project.") from error
    if not isinstance(found, dict):
        raise InvalidResultFile(f"{shown} must hold one JSON object, and holds a {type(found).__name__}.")
    for key in ("device", "date"):
        if not isinstance(found.get(key), str) or not found[key].strip():
            raise InvalidResultFile(
                f"{shown} does not say its {key}, so its numbers say nothing. It must have the texts "
                '"device" and "date" at its top.'
            )
    return found


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number in JSON")


def _results_folder() -> Path:
    here = Path.cwd()
    for root in (Path(minivllm.__file__).resolve().parents[1], here, *here.parents):
        if (root / RESULTS).is_dir():
            return root / RESULTS
    return RESULTS
