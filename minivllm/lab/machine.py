"""Above the chapters: how fast this machine computes and how fast it reads memory, measured in seconds.

The largest rates that PyTorch gets here, not what a sheet promises: a product of square matrices, and the
sum and the copy of arrays that no cache holds. Each is run for a while, and the best run counts; whatever
else the machine does only makes a run slower.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import torch

from minivllm.errors import InvalidOption
from minivllm.lab.bench.result import device_name
from minivllm.lab.roofline import Machine
from minivllm.model.loader import resolve_device

DTYPES = ("float32", "float64", "bfloat16", "float16")
MATMUL_SIZES = {"cpu": (1024, 2048), "cuda": (4096, 8192)}
NUM_BYTES = {"cpu": 2**28, "cuda": 2**30}  # of one array, unless the cache is not far smaller
LAST_LEVEL_CACHE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")  # Linux: "32768K"
LEAST_RUNS = 3


@torch.inference_mode()
def measure_machine(dtype: str = "auto", *, device: str = "auto", seconds: float = 4.0) -> Machine:
    """This device's best rates, in about so many seconds.

    dtype: of the matrices; "auto": float32 on a CPU, bfloat16 on CUDA. A copy counts the bytes read and the
    bytes written. Raises InvalidOption.
    """
    on = resolve_device(device)
    if dtype == "auto":
        dtype = "bfloat16" if on.type == "cuda" else "float32"
    if dtype not in DTYPES:
        raise InvalidOption(
            f"dtype={dtype!r} is not possible: it must be auto or one of {', '.join(DTYPES)}."
        )
    if not 0 < seconds < math.inf:
        raise InvalidOption(f"seconds={seconds!r} is not possible: it must be a number above 0.")
    sizes = MATMUL_SIZES["cuda" if on.type == "cuda" else "cpu"]
    flops = [_matmul_rate(n, getattr(torch, dtype), on, seconds / 2 / len(sizes)) for n in sizes]
    num_bytes = _bytes_beyond_caches(on)
    return Machine(device_name(on), dtype, max(flops), _memory_rate(num_bytes, on, seconds / 2))


def _matmul_rate(n: int, dtype: torch.dtype, device: torch.device, seconds: float) -> float:
    """FLOP/s of a product of two n x n matrices: n^3 multiplications and as many additions."""
    a, b = (torch.rand(n, n, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * n**3 / _best(lambda: torch.mm(a, b, out=out), device, seconds)


def _memory_rate(num_bytes: int, device: torch.device, seconds: float) -> float:
    """Bytes/s: the better of reading an array and of copying one onto another."""
    source = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    target = torch.zeros_like(source)  # written once, so that its pages are there
    read = _best(lambda: source.sum(), device, seconds / 2)
    copied = _best(lambda: target.copy_(source), device, seconds / 2)
    return max(num_bytes / read, 2 * num_bytes / copied)


def _bytes_beyond_caches(device: torch.device) -> int:
    """Bytes of an array that the caches hold next to nothing of, within an eighth of the free memory."""
    if device.type == "cuda":
        return min(NUM_BYTES["cuda"], torch.cuda.mem_get_info(device)[0] // 8)
    return min(max(NUM_BYTES["cpu"], 4 * _cache_bytes()), psutil.virtual_memory().available // 8)


def _cache_bytes(file: Path = LAST_LEVEL_CACHE) -> int:
    try:
        text = file.read_text().strip()
        return int(text.removesuffix("K")) * 1024 if text.endswith("K") else int(text)
    except (OSError, ValueError):
        return 0


def _best(work: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Seconds of the fastest run, of as many as fit into the time, and of three at least; one warms up."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda device: None
    best, runs = math.inf, 0
    work()
    wait(device)
    begin = time.perf_counter()
    while runs < LEAST_RUNS or time.perf_counter() - begin < seconds:
        start = time.perf_counter()
        work()
        wait(device)
        best, runs = min(best, time.perf_counter() - start), runs + 1
    return best
