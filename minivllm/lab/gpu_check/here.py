"""Above the chapters: where a check runs, and the few calls that differ between a GPU and a CPU.

All that touches CUDA directly stands here: the timer, the wait, the memory.
"""

from __future__ import annotations

import gc
import math
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import psutil
import torch
from torch import Tensor

import minivllm
from minivllm.errors import InvalidOption
from minivllm.kernels import MODULES
from minivllm.lab.bench.result import device_name

Row: TypeAlias = dict[str, Any]
Item: TypeAlias = tuple[str, Row]  # what a part yields: the name of a list of results, and one more for it
T = TypeVar("T")

FLUSH = 2**31  # bytes that are read before each timed run
MOST_WORKERS = 8
KERNELS = [name for name in MODULES if name not in ("reference", "c")]  # the latter is for a CPU
NEEDS = "needs a GPU or the interpreter"


@dataclass(frozen=True)
class Here:
    """device: "cuda" or "cpu". triton: whether Triton's kernels can run. workers: how many processes may
    compile kernels at once. ends: when the part should be done, by time.monotonic()."""

    device: str
    triton: bool
    workers: int
    ends: float = math.inf

    @property
    def gpu(self) -> bool:
        """Whether results count; else everything is a miniature."""
        return self.device == "cuda"

    @property
    def interpreted(self) -> bool:
        """Whether the kernels run in Triton's interpreter, which is not right in bfloat16."""
        return self.triton and not self.gpu

    def left(self) -> float:
        """Seconds until the part should be done."""
        return self.ends - time.monotonic()

    def pick(self, full: T, small: T) -> T:
        """Sizes for a GPU, or for a miniature."""
        return full if self.gpu else small

    def names(self) -> list[str]:
        """The names of KERNELS that can run here."""
        return [name for name in KERNELS if self.triton or not name.startswith("triton")]

    def dtypes(self, name: str) -> list[str]:
        """The dtypes in which the kernels of this name are checked. The interpreter is slow, so there the
        steps on the way to the last kernel are checked in one."""
        if not self.interpreted or name == "torch":
            return ["float32", "float16", "bfloat16"]
        return ["float32", "float16"] if name == "triton" else ["float32"]

    def left_out(self) -> list[Item]:
        """A row that says which kernels cannot run here; none where all can."""
        missing = [name for name in KERNELS if name not in self.names()]
        return [("left_out", {"what": ", ".join(missing), "why": NEEDS})] if missing else []

    def timing(self, seconds: float, **rates: float | None) -> Row:
        """{"ms": ...} and rates made from it; of a miniature only a time that nobody can take for a GPU's."""
        if not self.gpu:
            return {"miniature_ms": 1e3 * seconds}
        return {"ms": 1e3 * seconds, **rates}

    def target(self, what: str, value: float | None, at_least: float) -> list[Item]:
        """A row that says whether a target was met; none in a miniature."""
        if not self.gpu or value is None:
            return []
        return [("targets", {"target": what, "value": value, "at_least": at_least, "met": value >= at_least})]


def wait(here: Here) -> None:
    """Until the device has done all that it was given."""
    if here.gpu:
        torch.cuda.synchronize()


def release(here: Here) -> None:
    """Give the memory of tensors that are gone back to the device."""
    if here.gpu:
        gc.collect()
        torch.cuda.empty_cache()


def free_bytes(here: Here) -> int:
    """Memory that a tensor could have."""
    return torch.cuda.mem_get_info()[0] if here.gpu else psutil.virtual_memory().available


def host_tensor(shape: Sequence[int], dtype: torch.dtype, here: Here) -> Tensor:
    """A tensor in CPU memory, pinned where there is a GPU to reach it."""
    return torch.empty(tuple(shape), dtype=dtype, device="cpu", pin_memory=here.gpu)


@torch.inference_mode()
def seconds_of(work: Callable[[], object], here: Here, seconds: float = 0.3) -> float:
    """Seconds that the work takes on the device: the median of 5 to 50 runs, as many as fit in `seconds`.

    On a GPU by CUDA events. Before each run 2 GiB are read: so no cache holds what the run needs, nothing is
    left to be written back, and the host, which queues the run meanwhile, is ahead when it begins. In a
    miniature one run.
    """
    once = _host_seconds(work, here)  # compiles, and allocates
    if not here.gpu:
        return once
    repeats = max(5, min(50, int(seconds / _host_seconds(work, here))))
    flush = torch.zeros(FLUSH // 4, dtype=torch.float32, device=here.device)
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, end in events:
        flush.sum()
        start.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events) / 1e3


def _host_seconds(work: Callable[[], object], here: Here) -> float:
    wait(here)
    begin = time.perf_counter()
    work()
    wait(here)
    return time.perf_counter() - begin


def copy_time(here: Here) -> tuple[float, int]:
    """Seconds of a copy on the device, and its bytes: those read and those written."""
    num_bytes = here.pick(2**32, 2**20)
    source = torch.ones(num_bytes // 4, dtype=torch.float32, device=here.device)
    target = torch.zeros_like(source)
    return seconds_of(lambda: target.copy_(source), here), 2 * num_bytes


def look_around() -> tuple[Here, Row]:
    """Where this is, and what every measurement must say of itself. In a fork: it touches CUDA."""
    gpu = torch.cuda.is_available()
    try:
        import_module("minivllm.kernels.triton_limits").check_machine()
        triton = True
    except (ImportError, InvalidOption):
        triton = False
    here = Here("cuda" if gpu else "cpu", triton, max(1, min(MOST_WORKERS, (os.cpu_count() or 1) // 2)))
    about: Row = {
        "device": device_name(torch.device(here.device)),
        "date": time.strftime("%Y-%m-%d"),
        "miniature": not gpu,
    }
    if gpu:
        properties = torch.cuda.get_device_properties(0)
        about |= {
            "compute_capability": f"{properties.major}.{properties.minor}",
            "memory_bytes": properties.total_memory,
            "driver": _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        }
    elif triton:
        about["interpreter"] = True
    about["versions"] = {
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "triton", "transformers")},
        "minivllm": minivllm.__version__,
        "cuda": torch.version.cuda,
    }
    about["commit"] = _said("git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
    return here, about


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _said(*command: str) -> str | None:
    """The first line that a command prints in the project's folder; None where there is no such command."""
    try:
        folder = Path(minivllm.__file__).parents[1]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, cwd=folder)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip().split("\n")[0] or None if done.returncode == 0 else None
