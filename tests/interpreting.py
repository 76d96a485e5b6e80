"""Runs a file of tests in a process of its own, in which Triton's interpreter is on, or off for sure: it is
turned on before Triton is imported, and stays on until the process ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """python COMMAND without a GPU, and with the interpreter only where the environment says so."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_") and k != "TRITON_INTERPRET"}
    path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    added = {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, cwd=TESTS.parent, env=kept | added
    )


def run_tests(name: str, *options: str, **environment: str) -> None:
    """Run tests/NAME in a process of its own; fails with its output if one of its tests does."""
    file = str(TESTS / name)
    done = run("-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", *options, file, **environment)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def run_interpreted(name: str) -> None:
    """Run tests/NAME with the interpreter."""
    run_tests(name, TRITON_INTERPRET="1")
