"""`LLM(attention="triton")`: the torch path's tokens, in the interpreter; refused where it cannot be had."""

from __future__ import annotations

import interpreting
import pytest


def test_the_engine_gives_the_torch_paths_tokens_in_the_interpreter():
    pytest.importorskip("triton", reason="Triton is not installed: it is made for Linux")
    interpreting.run_interpreted("interpreted_llm.py")


def test_without_a_gpu_and_without_the_interpreter_it_is_refused_before_a_model_is_loaded():
    code = (
        "from minivllm import LLM, errors\n"
        "try:\n    LLM('no-such-model', attention='triton')\n"
        "except errors.InvalidOption as error:\n    print(error)"
    )
    done = interpreting.run("-c", code)
    assert "attention='triton' is not possible" in done.stdout, done.stderr
