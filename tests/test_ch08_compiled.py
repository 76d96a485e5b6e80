"""Chapter 8: the Triton kernels compiled for GPUs that are not here: they fit, spill nothing, and are made of
the instructions that they should be. In a process of their own, without the interpreter."""

from __future__ import annotations

import interpreting
import pytest


@pytest.fixture
def compiler():
    return pytest.importorskip("triton", reason="Triton is not installed: it is made for Linux")


def test_the_kernels_compile_for_gpus_and_spill_no_register(compiler):
    interpreting.run_tests("compiled_ch08.py")


@pytest.mark.full
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_every_kind_of_kernel_compiles_and_spills_no_register(compiler, capability):
    interpreting.run_tests("compiled_ch08.py", "-m", "full", "-k", f"sm{capability}")
