"""The check on a GPU, `minivllm.lab.gpu_check`: in miniature as a whole, and with parts that go wrong."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import interpreting
import pytest
import torch
from click.testing import CliRunner

from minivllm import kernels, lab
from minivllm.errors import MinivllmError
from minivllm.kernels import block_copy, reference
from minivllm.lab import here as notebook_here
from minivllm.lab.gpu_check import check, part_agreement, part_copy, part_decode, part_engine, part_kernels
from minivllm.lab.gpu_check import here as gpu_check_here
from minivllm.lab.gpu_check.__main__ import main
from minivllm.lab.gpu_check.check import PARTS, Part, as_text, run_check
from minivllm.lab.gpu_check.here import NEEDS, Here
from minivllm.lab.gpu_check.processes import Lost, in_processes
from minivllm.lab.gpu_check.show import table

COMMAND = "minivllm.lab.gpu_check"


@pytest.fixture
def _triton():
    pytest.importorskip("triton", reason="Triton is not installed: it is made for Linux")


def rows_of(found: dict, part: str, name: str | None = None) -> list[dict]:
    results = found["parts"][part]["results"]
    return results[name] if name else [row for rows in results.values() for row in rows]


# --- the whole command ---


@pytest.mark.usefixtures("_triton")
def test_the_whole_check_runs_in_miniature_in_the_interpreter(tmp_path):
    done = interpreting.run("-m", COMMAND, "--out", str(tmp_path), "--minutes", "30", TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (file,) = tmp_path.iterdir()
    assert file.name == "miniature.json"
    found = json.loads(file.read_text(), parse_constant=pytest.fail)
    assert found["miniature"] is True
    assert found["interpreter"] is True
    assert {"python", "torch", "triton", "transformers", "minivllm"} <= set(found["versions"])
    assert list(found["parts"]) == list(PARTS)
    for name, part in found["parts"].items():
        assert part["status"] == "done", name
        assert part["results"], name
        assert "left_out" not in part["results"], part["results"].get("left_out")
    check_that_nothing_looks_like_a_gpus(found)

    checks = rows_of(found, "kernels", "checks")
    names = set(kernels.MODULES) - {"reference", "c"}
    assert {row["kernels"] for row in checks} == names
    for call in ("store_kv", "one_query", "several_queries"):
        assert {row["kernels"] for row in checks if row["call"] == call} == names
    assert all(
        row["error"] <= {"float32": 5e-6, "float16": 1e-2, "bfloat16": 5e-2}[row["dtype"]] for row in checks
    )
    assert {row["dtype"] for row in checks if row["kernels"] == "triton"} == {"float32", "float16"}
    assert {row["kernels"] for row in rows_of(found, "agreement", "greedy")} == names
    assert {row["kernels"] for row in rows_of(found, "agreement", "forced")} == {"torch", "triton"}
    assert {row["kernels"] for row in rows_of(found, "decode", "steps")} == names
    assert {row["history"] for row in rows_of(found, "prefill", "prefill")} == {0, 11}
    assert {row["graphs"] for row in rows_of(found, "engine", "throughput")} == {False, True, None}
    assert [row["identical"] for row in rows_of(found, "engine", "graphs")] == [2, 1]
    for name in ("splits", "decode_tiles", "prefill_tiles"):
        assert [row["own_choice"] for row in rows_of(found, "tuning", name)] == [True, False]
    assert [row["num_splits"] for row in rows_of(found, "tuning", "splits")] == [1, 2]
    assert [row["num_stages"] for row in rows_of(found, "tuning", "decode_tiles")][1] == 2
    for line in ("kernels: done", "tuning: done", "In miniature"):
        assert line in done.stdout
    assert done.stderr.count("begins, allowance") == len(PARTS)


def check_that_nothing_looks_like_a_gpus(found: dict) -> None:
    for name, part in found["parts"].items():
        for list_name, rows in part["results"].items():
            assert list_name != "targets"
            for row in rows:
                forbidden = [key for key in row if key.startswith(("ms", "gb_s", "tok_s", "share", "tflop"))]
                assert not forbidden, (name, row)
                assert not str(row.get("what")).endswith(" ms"), row


BREAK = """
from minivllm.kernels import triton_paged
right = triton_paged.paged_attention
def wrong(q, *arguments, **options):
    out = right(q, *arguments, **options)
    if q.shape[-1] == 20:
        out[-1] = out[0]
    return out
triton_paged.paged_attention = wrong
from minivllm.lab.gpu_check.__main__ import main
main()
"""


@pytest.mark.usefixtures("_triton")
def test_a_kernel_that_is_wrong_fails_its_part_and_the_others_are_done(tmp_path):
    arguments = ["--out", str(tmp_path), "--parts", "kernels,copy,notebooks", "--minutes", "30"]
    done = interpreting.run("-c", BREAK, *arguments, TRITON_INTERPRET="1")
    assert done.returncode == 1, done.stderr[-3000:]
    found = json.loads((tmp_path / "miniature.json").read_text())
    assert {name: part["status"] for name, part in found["parts"].items()} == {
        "kernels": "failed",
        "copy": "done",
        "notebooks": "done",
    }
    assert "results are wrong, the first: checks" in found["parts"]["kernels"]["error"]
    wrong = [row for row in rows_of(found, "kernels", "checks") if not row["ok"]]
    assert wrong
    assert {(row["kernels"], row["head_dim"]) for row in wrong} == {("triton", 20)}


def test_without_a_gpu_and_the_interpreter_the_reference_alone_is_checked(tmp_path):
    """And the command itself never asks for a GPU, so that those that it forks can have one."""
    code = (
        "import os, sys, torch\n"
        "log, real = sys.argv.pop(1), torch.cuda.is_available\n"
        "def is_available():\n    open(log, 'a').write(f'{os.getpid()} ')\n    return real()\n"
        "torch.cuda.is_available = torch.cuda.init = torch.cuda.device_count = is_available\n"
        "open(log, 'w').write(f'{os.getpid()}: ')\n"
        "from minivllm.lab.gpu_check.__main__ import main\nmain()"
    )
    log = tmp_path / "pids"
    arguments = [str(log), "--out", str(tmp_path / "new"), "--parts", "kernels,decode,prefill,copy"]
    done = interpreting.run("-c", code, *arguments)
    assert done.returncode == 0, done.stderr[-3000:]
    own, asked = log.read_text().split(": ")
    assert asked.split()
    assert own not in asked.split()
    found = json.loads((tmp_path / "new" / "miniature.json").read_text())
    missing = ", ".join(name for name in kernels.MODULES if name.startswith("triton"))
    for name in found["parts"]:
        assert rows_of(found, name, "left_out") == [{"what": missing, "why": NEEDS}]
        assert {row["kernels"] for row in rows_of(found, name) if "kernels" in row} <= {"torch"}
        assert len(rows_of(found, name)) > 1
    check_that_nothing_looks_like_a_gpus(found)


# --- parts that go wrong ---


def part(run, seconds: float = 60.0) -> Part:
    """A part with one process that runs this."""
    found = Part(seconds, triton=False)
    object.__setattr__(found, "module", lambda name: SimpleNamespace(shares=lambda here: [here], run=run))
    return found


def fine(here):
    yield "speed", {"ms": 1.5, "gb_s": 4.0e12 / 3}
    yield from here.target("half of it", 0.25, 0.5)


def wrong(here):
    yield "checks", {"error": 0.25, "ok": True}
    yield "checks", {"error": float("nan"), "ok": False}


def raises(here):
    yield "speed", {"ms": 2.5}
    raise ValueError("not\n this")


def dies(here):
    yield "speed", {"ms": 3.5}
    os.kill(os.getpid(), signal.SIGKILL)


def hangs(here):
    yield "speed", {"ms": 4.5}
    time.sleep(600)


def notebook(here):
    yield "ch01_step_time", {"what": "a step, ms", "value": 7.25}
    yield "ch01_step_time", {"what": "model", "value": "M"}


GPU = {
    "device": "NVIDIA X",
    "date": "2026-12-01",
    "miniature": False,
    "versions": {"torch": "9"},
    "commit": "abc",
}


@pytest.fixture
def pretended(monkeypatch):
    """A machine that says it has a GPU, and parts that use none."""
    monkeypatch.setattr(check, "look_around", lambda: (Here("cuda", True, 1), GPU))
    parts = {"fine": part(fine), "wrong": part(wrong), "raises": part(raises), "dies": part(dies)}
    parts |= {"hangs": part(hangs, 0.5), "notebooks": part(notebook)}
    monkeypatch.setattr(check, "PARTS", parts)
    return parts


def test_each_way_of_going_wrong_is_recorded_and_takes_nothing_else_with_it(pretended, tmp_path):
    written = []

    def log(line: str) -> None:
        file = tmp_path / "gpu_check.json"
        written.append(list(json.loads(file.read_text())["parts"]) if file.exists() else [])

    found = run_check(list(pretended), tmp_path, 8.0, log)
    assert json.loads((tmp_path / "gpu_check.json").read_text())["parts"].keys() == pretended.keys()
    assert [len(parts) for parts in written] == [0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    errors = {name: part.get("error") for name, part in found["parts"].items()}
    assert errors["fine"] is None
    assert errors["wrong"].startswith("1 of 2 results are wrong, the first: checks {'error': nan")
    assert errors["raises"] == "ValueError: not this"
    assert errors["dies"] == "its process died (exit code -9)"
    assert errors["hangs"].startswith("stopped after")
    assert errors["notebooks"] is None
    statuses = {name: part["status"] for name, part in found["parts"].items()}
    assert {name for name, status in statuses.items() if status == "done"} == {"fine", "notebooks"}
    for name, ms in (("raises", 2.5), ("dies", 3.5), ("hangs", 4.5)):
        assert rows_of(found, name) == [{"ms": ms}], "what came before is kept"
    assert rows_of(found, "fine", "targets") == [
        {"target": "half of it", "value": 0.25, "at_least": 0.5, "met": False}
    ]


@pytest.mark.parametrize(
    "names, code", [(["fine", "notebooks"], 0), (["fine", "wrong"], 1), (["dies"], 1)], ids=str
)
def test_the_exit_code_is_1_where_a_part_failed_and_a_missed_target_is_no_failure(
    names, code, pretended, tmp_path
):
    done = CliRunner().invoke(main, ["--out", str(tmp_path), "--parts", ",".join(names)])
    assert done.exit_code == code, done.output


def test_the_last_lines_say_how_each_part_ended_and_which_targets_were_met(pretended, tmp_path):
    done = CliRunner().invoke(main, ["--out", str(tmp_path), "--parts", "fine,raises"])
    last = done.stdout.strip().splitlines()[-4:]
    assert last[0] == "In short: fine done, raises failed"
    assert last[3].split() == ["half", "of", "it", "0.250", "0.500", "no"]


def test_a_gpus_results_are_found_by_the_notebooks(pretended, tmp_path, monkeypatch):
    folder = tmp_path / "book" / "results"
    assert CliRunner().invoke(main, ["--out", str(folder), "--parts", "notebooks"]).exit_code == 0
    monkeypatch.setattr(notebook_here.minivllm, "__file__", str(tmp_path / "minivllm" / "__init__.py"))
    found = lab.gpu_results("ch01_step_time")
    assert found == {
        "device": "NVIDIA X",
        "date": "2026-12-01",
        "commit": "abc",
        "a step, ms": 7.25,
        "model": "M",
    }
    whole = lab.gpu_results("gpu_check")
    assert whole is not None
    assert whole["parts"]["notebooks"]["status"] == "done"
    shown = CliRunner().invoke(main, ["--show"]).output
    assert shown.endswith("In short: notebooks done\n")
    assert "NVIDIA X, 2026-12-01" in shown
    assert "a step, ms" in shown
    assert "kernels: not measured yet" in shown


def test_a_part_that_would_begin_too_late_is_skipped(pretended, tmp_path):
    done = CliRunner().invoke(main, ["--out", str(tmp_path), "--parts", "fine", "--minutes", "0"])
    assert done.exit_code == 0
    assert json.loads((tmp_path / "gpu_check.json").read_text())["parts"]["fine"]["status"] == "skipped"


def test_what_was_not_measured_is_said_so(tmp_path, monkeypatch):
    monkeypatch.setattr(notebook_here, "_results_folder", lambda: tmp_path)
    assert "not measured yet" in CliRunner().invoke(main, ["--show"]).output
    assert "not measured yet" in table(None)


def test_a_machine_that_cannot_be_asked_is_an_error_with_its_reason(monkeypatch, tmp_path):
    def broken():
        raise OSError("no driver")

    monkeypatch.setattr(check, "look_around", broken)
    with pytest.raises(MinivllmError, match="no driver"):
        run_check([], tmp_path, 8.0, print)


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--parts", "kernels"], "--out DIR"),
        (["--out", "x", "--parts", "warp"], "'warp' is no part.*kernels, agreement"),
    ],
    ids=["no folder", "no part"],
)
def test_what_the_command_cannot_do_is_refused(arguments, said):
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 2
    assert said.split(".*")[0] in done.output.replace("\n", " ")


def test_help_names_every_part():
    text = CliRunner().invoke(main, ["--help"]).output
    for name in PARTS:
        assert name in text


# --- what a GPU's run would write ---


class Pretended(Here):
    """A CPU that counts as a GPU, with the sizes of a miniature."""

    @property
    def gpu(self) -> bool:
        return True

    def pick(self, full, small):
        return small


class Event:
    """Of a stream on which everything is done at once."""

    def __init__(self, enable_timing: bool):
        assert enable_timing

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end.at - self.at)


@pytest.fixture
def pretended_gpu(monkeypatch):
    """No kernel, no CUDA: the reference under every name, and sizes that a CPU can have."""
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**18, 2**19))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(gpu_check_here, "FLUSH", 2**10)
    monkeypatch.setattr(part_copy, "host_tensor", lambda shape, dtype, here: torch.empty(shape, dtype=dtype))
    monkeypatch.setattr(kernels, "get", lambda name: reference)
    monkeypatch.setattr(kernels, "get_copy", lambda name: block_copy)
    monkeypatch.setattr(kernels, "check_model", lambda *anything: None)
    monkeypatch.setattr(part_kernels, "HEAD_DIMS", (16, 20))
    monkeypatch.setattr(part_decode, "HEADS", part_decode.SMALL)
    monkeypatch.setattr(part_decode, "LAYERS", 4)
    monkeypatch.setattr(part_decode, "BATCHES", (1, 8))
    monkeypatch.setattr(part_decode, "CONTEXTS", (5, 300))
    monkeypatch.setattr(part_decode, "TARGETS", {(8, 33): 0.85, (1, 300): 0.80})
    monkeypatch.setattr(part_decode, "SWEPT", (2, 40))
    monkeypatch.setattr(part_decode, "STEPS", (2, 40))
    monkeypatch.setattr(part_agreement, "find_default", lambda: None)
    monkeypatch.setattr(part_engine, "TARGET_BATCH", 2)
    return Pretended("cpu", True, 2)


@pytest.mark.usefixtures("_triton")
def test_on_a_gpu_every_part_gives_times_rates_and_targets(pretended_gpu):
    found: dict[str, dict[str, list[dict]]] = {}
    for name, part in PARTS.items():
        module, results = part.module(name), found.setdefault(name, {})
        for share in module.shares(pretended_gpu):
            for list_name, row in module.run(share):
                assert row.get("ok", True), (name, row)
                assert "miniature" not in json.dumps(row), row
                results.setdefault(list_name, []).append(row)
    for (part_name, list_name), rates in {
        ("copy", "swap_in"): ["gb_s"],
        ("decode", "copy"): ["gb_s"],
        ("decode", "decode"): ["gb_s", "share_of_copy"],
        ("prefill", "prefill"): ["tflop_s", "share_of_flash"],
        ("engine", "throughput"): ["tok_s"],
    }.items():
        for row in found[part_name][list_name]:
            assert row["ms"] > 0
            assert all(row[rate] > 0 for rate in rates)
    for row in found["decode"]["decode"]:
        assert row["gb_s"] == pytest.approx(row["kv_bytes"] / row["ms"] / 1e6)
    (copy,) = found["decode"]["copy"]
    assert copy["gb_s"] == pytest.approx(copy["bytes"] / copy["ms"] / 1e6)
    targets = [row["at_least"] for results in found.values() for row in results.get("targets", [])]
    assert targets == [0.85, 0.80, 0.7, 1.5]
    (left_out,) = found["decode"]["left_out"]
    assert left_out["what"] == "decode, triton, batch 8, context 300", "there is no memory for it"
    assert {row["pool_layers"] for row in found["decode"]["decode"]} == {2, 4}
    done = {"status": "done", "seconds": 1.0}
    parts = {name: {**done, "results": results} for name, results in found.items()}
    assert "not measured yet" not in table({**GPU, "parts": parts})


# --- processes, JSON, tables ---


def numbers(share):
    for i in range(share):
        yield share, i
    if share == 3:
        raise RuntimeError("three")


def test_several_processes_send_all_they_have_and_a_fault_is_one_shares_own():
    found = list(in_processes(numbers, [2, 3, 0]))
    assert sorted(item for item in found if not isinstance(item, Lost)) == [
        (2, 0),
        (2, 1),
        (3, 0),
        (3, 1),
        (3, 2),
    ]
    assert [item for item in found if isinstance(item, Lost)] == [Lost(1, "RuntimeError: three")]


def test_processes_that_nobody_waits_for_are_ended():
    def name_and_wait(share):
        yield os.getpid()
        time.sleep(600)

    going = in_processes(name_and_wait, [None])
    pid = next(going)
    going.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_the_file_has_a_row_on_each_line_five_digits_and_no_constant_that_json_lacks():
    found = {
        "device": "X",
        "parts": {"a": {"results": {"rows": [{"ms": 1 / 3}, {"ms": float("inf"), "ok": False}]}}},
    }
    text = as_text(found)
    assert '        {"ms": 0.33333},\n          {"ms": null, "ok": false}' in text
    assert json.loads(text)["parts"]["a"]["results"]["rows"][1] == {"ms": None, "ok": False}


def test_many_rows_are_shown_by_the_one_nearest_to_its_bound():
    rows = [
        {
            "call": "one_query",
            "kernels": "triton",
            "dtype": dtype,
            "head_dim": i,
            "error": 0.01 * i,
            "bound": 1.0,
            "ok": True,
        }
        for dtype in ("float32", "float16")
        for i in range(30)
    ]
    rows[7]["ok"] = False
    found = {
        **GPU,
        "parts": {"kernels": {"status": "failed", "seconds": 1.0, "error": "E", "results": {"checks": rows}}},
    }
    text = table(found).split("kernels, checks\n")[1].split("\n\n")[0].splitlines()
    assert len(text) == 4
    assert text[2].split()[:6] == ["30", "1", "one_query", "triton", "float32", "7"]
    assert text[3].split()[:6] == ["30", "0", "one_query", "triton", "float16", "29"]


def test_the_results_that_the_book_keeps_can_be_shown():
    folder = Path(__file__).parents[1] / "book" / "results"
    if (folder / "gpu_check.json").exists():
        found = lab.gpu_results("gpu_check")
        assert found is not None
        assert found["miniature"] is False
        assert found["device"] in table(found)
