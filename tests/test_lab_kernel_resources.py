"""What a Triton kernel takes is told without a GPU, in a process of its own without the interpreter."""

from __future__ import annotations

import json

import interpreting
import pytest

from minivllm.lab.ahead_of_time import Compiled
from minivllm.lab.kernel_resources import as_text, programs_each

COMMAND = ("-m", "minivllm.lab.kernel_resources")


def kernel(threads: int, registers: int, shared: int = 0, tensor_columns: int = 0) -> Compiled:
    return Compiled("some_kernel", threads, registers, 0, shared, tensor_columns, "", "", "")


@pytest.mark.parametrize(
    "found, capability, programs, limit",
    [
        (kernel(128, 32), 80, 16, "threads"),
        (kernel(32, 16), 90, 32, "programs"),
        (kernel(1024, 32), 90, 2, "threads"),
        (kernel(128, 33), 90, 12, "registers"),  # as if they were 40: of each partition's 16,384, 12 warps
        (kernel(128, 168), 90, 3, "registers"),
        (kernel(128, 255), 80, 2, "registers"),
        (kernel(256, 128), 80, 2, "registers"),
        (kernel(256, 129), 80, 1, "registers"),
        (kernel(128, 32, shared=40 * 1024), 80, 4, "shared memory"),  # 4 * 41 is all of 164 KiB
        (kernel(128, 32, shared=40 * 1024 + 1), 80, 3, "shared memory"),
        (kernel(128, 32, shared=227 * 1024), 90, 1, "shared memory"),
        (kernel(128, 32, shared=40 * 1024, tensor_columns=256), 100, 2, "tensor memory"),
    ],
    ids=lambda value: "" if isinstance(value, Compiled) else str(value),
)
def test_what_runs_out_first_says_how_many_programs_fit(found, capability, programs, limit):
    assert programs_each(found, capability) == (programs, limit)


def test_the_command_prints_the_same_rows_as_data_and_as_a_table():
    pytest.importorskip("triton", reason="Triton is not installed: it is made for Linux")
    options = ("--kernel", "store_kv", "--dtype", "float32", "--capability", "90", "--capability", "80")
    done = interpreting.run(*COMMAND, *options, "--head-dim", "80", "--json")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["capability"] for row in rows] == [80, 90]
    for row in rows:
        assert (row["function"], row["dtype"], row["head_dim"]) == ("store_kv", "float32", 80)
        assert (row["spilled"], row["shared"], row["threads"]) == (0, 0, 128)
        assert 0 < row["registers"] < 64
        assert row["programs"] == 16
    again = interpreting.run(*COMMAND, *reversed_options(options), "--head-dim", "80")
    assert again.stdout == as_text(rows) + "\n"
    above, _, head, *_ = again.stdout.splitlines()
    assert "head_dim 80" in above
    assert " ".join(head.split()) == "function capability threads registers spilled shared programs limit"


def reversed_options(options: tuple[str, ...]) -> list[str]:
    pairs = list(zip(options[::2], options[1::2], strict=True))
    return [word for pair in reversed(pairs) for word in pair]


def test_without_triton_it_is_refused():
    code = (
        "import runpy, sys; sys.modules['triton'] = None; sys.argv = ['kernel_resources']\n"
        "runpy.run_module('minivllm.lab.kernel_resources', run_name='__main__')"
    )
    done = interpreting.run("-c", code)
    assert done.returncode == 1
    assert "Triton cannot be imported" in done.stderr
    assert "Traceback" not in done.stderr


def test_in_the_interpreter_it_is_refused():
    pytest.importorskip("triton", reason="Triton is not installed: it is made for Linux")
    done = interpreting.run(*COMMAND, TRITON_INTERPRET="1")
    assert done.returncode == 1
    assert "Triton's interpreter is on" in done.stderr
    assert "TRITON_INTERPRET" in done.stderr
    assert "Traceback" not in done.stderr
