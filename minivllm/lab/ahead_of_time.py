"""Above the chapters: compiles what a kernel's launch would compile, for a GPU that need not be there.

Triton compiles a kernel at its first launch. It asks its driver which GPU is there, works out from the
arguments what to compile (their types, which pointers and strides are multiples of 16, the constants), and
hands the result to the GPU. Here the arguments are tensors on PyTorch's `meta` device, which have shapes and
no numbers; a stand-in for the driver names a GPU; and the launch ends where it would need one:

    found = compile_launches(lambda: paged_attention(q, k_cache, v_cache, ...), capability=90)
    found[0].registers, found[0].spilled, found[0].ptx

So what is looked at is what a GPU would be given, with nothing said twice. Triton is imported only when it is
needed. It must be there, with its interpreter off.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from importlib import import_module
from io import StringIO
from types import SimpleNamespace
from typing import Any

from minivllm.errors import InvalidOption


@dataclass(frozen=True)
class Compiled:
    """A kernel as it was compiled: what one of its programs takes, and the code in three languages.

    registers: of a thread. spilled: bytes that a thread writes to and reads from memory because it has too
    few registers. shared: bytes of shared memory. tensor_columns: columns of tensor memory (from capability
    10.0 on). ttir, ttgir: Triton's own languages, without and with the layout of tiles over threads. ptx:
    NVIDIA's, before its assembler.
    """

    kernel: str
    threads: int
    registers: int
    spilled: int
    shared: int
    tensor_columns: int
    ttir: str = field(repr=False)
    ttgir: str = field(repr=False)
    ptx: str = field(repr=False)


def compile_launches(launch: Callable[[], object], capability: int) -> list[Compiled]:
    """The kernels that `launch` launches, in order, compiled for a compute capability such as 90, for 9.0.

    launch: what launches kernels on tensors of the meta device; no kernel runs. Nothing is kept between
    calls, and nothing is read from or written to Triton's cache. Raises InvalidOption as `check_compiler`.
    """
    check_compiler()
    with _stand_in(capability):
        return [_compile(kernel, how, capability) for kernel, how in _launches(launch)]


def check_compiler() -> None:
    """Raises InvalidOption where Triton is missing, or its interpreter is on: then there is no compiler."""
    try:
        import_module("triton")
    except ImportError as error:
        raise InvalidOption(
            f"Kernels cannot be compiled: Triton cannot be imported ({error}). It is made for Linux."
        ) from error
    if import_module("minivllm.kernels.triton_limits").INTERPRETED:
        raise InvalidOption(
            "Kernels cannot be compiled: Triton's interpreter is on in this process. "
            "Take TRITON_INTERPRET out of the environment, and start Python again."
        )


@contextmanager
def _stand_in(capability: int) -> Iterator[None]:
    """A driver that knows which GPU is there, and nothing else; a cache of compiled kernels that is empty."""
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    stand_in = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", capability, 32),
        get_current_device=lambda: capability,  # Triton keeps kernels apart by this number
        get_current_stream=lambda device: 0,
    )
    before = driver._active
    with tempfile.TemporaryDirectory() as folder, knobs.cache.scope(), knobs.nvidia.scope():
        knobs.cache.dir = folder
        knobs.nvidia.dump_ptxas_log = True
        driver.set_active(stand_in)
        try:
            yield
        finally:
            driver._active = before


def _launches(launch: Callable[[], object]) -> list[tuple[Any, str]]:
    """Each kernel that is launched, and how it is to be compiled. Each launch ends when that is known."""
    from triton import knobs

    seen: list[tuple[Any, str]] = []

    def end_launch(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        seen.append((fn.jit_function, compile["specialization_data"]))
        return True

    with knobs.runtime.scope():
        knobs.runtime.jit_cache_hook = end_launch
        launch()
    return seen


def _compile(kernel: Any, how: str, capability: int) -> Compiled:
    """The kernel, and what `ptxas -v` says of it: Triton has registers and spills only from a device."""
    log = StringIO()
    with redirect_stdout(log):
        binary = kernel.preload(how)
    kernel.device_caches.pop(capability)
    registers = re.search(r"Used (\d+) registers", log.getvalue())
    spilled = re.findall(r"(\d+) bytes spill (?:stores|loads)", log.getvalue())
    assert registers is not None, log.getvalue()
    assert len(spilled) == 2, log.getvalue()
    return Compiled(
        kernel=kernel.fn.__name__,
        threads=32 * binary.metadata.num_warps,
        registers=int(registers[1]),
        spilled=sum(map(int, spilled)),
        shared=binary.metadata.shared,
        tensor_columns=binary.metadata.tmem_size or 0,
        ttir=binary.asm["ttir"],
        ttgir=binary.asm["ttgir"],
        ptx=binary.asm["ptx"],
    )
