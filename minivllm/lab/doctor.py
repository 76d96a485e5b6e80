"""Above the chapters: does this installation work? Each check blames the environment, never the reader."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from minivllm.errors import MinivllmError

PACKAGES = ("torch", "triton", "transformers", "safetensors", "gguf", "huggingface_hub", "numpy")


@dataclass(frozen=True)
class Finding:
    """One line of the report: what was looked at and what was found.

    status: "ok", "note" for something to know, or "fault".
    """

    what: str
    found: str
    status: str = "ok"


def examine() -> Iterator[Finding]:
    """All findings, each as soon as it is made."""
    yield Finding("Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    yield from (_package(name) for name in PACKAGES)
    for check in (_device, _kernels, _model_file, _interpreter):
        yield check()


def _package(name: str) -> Finding:
    try:
        return Finding(name, version(name))
    except PackageNotFoundError:
        if name == "triton" and sys.platform != "linux":
            return Finding(name, "not made for this system; only chapters 8 and 9 need it", "note")
        return Finding(
            name, "not installed; run `make env`, or `pip install -e .` in the project's folder", "fault"
        )


def _device() -> Finding:
    try:
        import torch
    except (ImportError, OSError) as error:
        return Finding("device", f"PyTorch cannot be loaded: {error}", "fault")
    if not torch.cuda.is_available():
        return Finding("device", f"CPU, {torch.get_num_threads()} threads; no CUDA device", "ok")
    properties = torch.cuda.get_device_properties(0)
    return Finding("device", f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB")


def _kernels() -> Finding:
    """Those for a CPU, compiled if they are not yet; the engine runs without them, more slowly."""
    what = "C kernels"
    try:
        import torch  # noqa: F401
    except (ImportError, OSError):
        return Finding(what, "not tried, without PyTorch", "note")
    from minivllm.kernels.c_linear import Panels
    from minivllm.model import loader

    try:
        native = Panels().multiplies_bfloat16 or loader.has_matrix_tiles()
    except MinivllmError as error:
        return Finding(what, str(error), "note")
    return Finding(what, f"compiled; bfloat16 {'by instructions of its own' if native else 'as float32'}")


def _model_file() -> Finding:
    from minivllm.model import hub

    try:
        found = hub.find_default()
    except (MinivllmError, OSError) as error:
        return Finding("model file", str(error), "fault")
    if found is None:
        return Finding(
            "model file", f"{hub.DEFAULT_MODEL} is not here yet; `minivllm pull` brings it", "note"
        )
    return Finding("model file", f"{found}, sha256 right")


def _interpreter() -> Finding:
    """Run a known kernel in Triton's interpreter, in a process of its own: the switch must be on before
    Triton is loaded, and this library never turns it on for itself."""
    what = "Triton interpreter"
    if sys.platform != "linux":
        return Finding(what, "Triton is made for Linux; only chapters 8 and 9 need it", "note")
    command = [sys.executable, "-m", "minivllm.lab.doctor_kernel", "cpu"]
    try:
        done = subprocess.run(
            command,
            env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONSAFEPATH": "1"},  # no module of this folder
            capture_output=True,
            text=True,
            timeout=60,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding(what, f"could not be run: {error}", "fault")
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return Finding(what, f"a known kernel cannot run here: {last}", "fault")
    off = float(done.stdout.split()[-1])
    if not off < 1e-6:
        return Finding(what, f"a known kernel gives a wrong answer here (off by {off:.1e})", "fault")
    return Finding(what, f"a known kernel gives the right answer (off by {off:.1e})")
