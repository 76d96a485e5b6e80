"""The command that measures the fast path on a CPU: in miniature, and what it refuses."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from minivllm import kernels
from minivllm.errors import InvalidOption
from minivllm.kernels.c_linear import Panels
from minivllm.kernels.c_rows import RowKernels
from minivllm.lab import cpu_path
from minivllm.model.packed import OneDNN, PackedDecoder, PlainRows


def has_c() -> bool:
    try:
        kernels.get("c")
    except InvalidOption:
        return False
    return True


@pytest.mark.skipif(not has_c(), reason="there is no C compiler")
def test_in_miniature_every_setup_has_a_row_at_every_number_of_requests(tmp_path):
    result = CliRunner().invoke(cpu_path.main, ["--out", str(tmp_path), "--quick", "--running", "1,3"])
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "cpu_path.json").read_text())
    assert (found["model"], found["context"]) == ("random:tiny-llama", 32)
    rows = [(row["running"], row["setup"]) for row in found["setups"]]
    assert rows == [(n, name) for n in (1, 3) for name in cpu_path.SETUPS]
    assert [row["gain"] for row in found["setups"] if row["setup"] == rows[0][1]] == [1, 1]
    assert all(row["step_ms"] > 0 for row in found["setups"])
    assert all(name in result.output for name in cpu_path.SETUPS)
    assert [row["rows"] for row in found["products"]] == [1, 7]
    assert all(row["onednn_ms"] > 0 < row["c_ms"] for row in found["products"])


@pytest.mark.skipif(not has_c(), reason="there is no C compiler")
def test_each_setup_is_what_its_name_says():
    engines = cpu_path._engines("random:tiny-llama", "float32", [2], 32)
    args = [(llm.args.attention, llm.args.enforce_eager) for llm in engines.values()]
    assert args == [("reference", True), ("torch", True), ("torch", False), ("torch", False), ("c", False)]
    decoders = [llm.engine.forward for llm in engines.values()]
    assert decoders[:2] == [None, None]
    packed = [decoder for decoder in decoders if isinstance(decoder, PackedDecoder)]
    kinds = [(type(d.layers[0].qkv.products), type(d.rows)) for d in packed]
    assert kinds == [(OneDNN, PlainRows), (Panels, RowKernels), (Panels, RowKernels)]


@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_a_dtype_whose_weights_are_not_packed_is_refused(dtype, tmp_path):
    result = CliRunner().invoke(cpu_path.main, ["--out", str(tmp_path), "--quick", "--dtype", dtype])
    assert result.exit_code == 1
    assert result.output.startswith(f"Error: dtype={dtype} is not possible: weights are packed as float32 or")


@pytest.mark.parametrize(
    "options",
    [["--device", "cuda"], ["--running", "0"], ["--running", "a"], ["--rows", "0"], ["--context", "6"]],
    ids=str,
)
def test_what_cannot_be_measured_is_refused(options, tmp_path):
    result = CliRunner().invoke(cpu_path.main, ["--out", str(tmp_path), *options])
    assert result.exit_code == 2
    assert options[0] in result.output
