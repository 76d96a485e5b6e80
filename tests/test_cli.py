"""The command line: what it prints, what it refuses, and what it loads."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

from minivllm.cli import main
from minivllm.lab.ladder import RUNGS
from minivllm.model.loader import load_model


def run(*arguments: str, **options):
    return CliRunner().invoke(main, list(arguments), **options)


@pytest.mark.parametrize(
    "command",
    [[], ["pull"], ["generate"], ["chat"], ["ladder"], ["workload"], ["bench"], ["doctor"], ["course"]],
    ids=str,
)
def test_every_command_has_help(command):
    done = run(*command, "--help")
    assert done.exit_code == 0
    assert "Usage:" in done.stdout


def test_help_loads_nothing_heavy():
    code = (
        "import sys\nfrom minivllm.cli import main\n"
        "try: main(['--help'])\nfinally: print(*sorted(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "ladder" in done.stdout
    assert not {"torch", "transformers", "numpy", "rich", "triton"} & set(done.stdout.split("\n")[-2].split())


def test_an_unknown_command_is_refused():
    done = run("genrate")
    assert done.exit_code == 2
    assert "genrate" in done.stderr


def test_generate_continues_a_prompt_and_says_how_fast():
    done = run("generate", "hello", "--model", "random:tiny-llama", "--max-tokens", "5")
    assert done.exit_code == 0
    assert done.stdout.startswith("hello")
    assert "5 prompt tokens" in done.stderr
    assert "paged memory" in done.stderr


def test_generate_gives_the_same_text_with_every_memory_and_with_one_seed():
    for options in ([], ["--temperature", "2", "--seed", "4"]):
        texts = {
            run("generate", "abc", "--model", "random:tiny-qwen3", "--cache", cache, *options).stdout
            for cache in ("recompute", "naive", "contiguous", "paged")
        }
        assert len(texts) == 1


def test_generate_reads_a_prompt_from_standard_input():
    piped = run("generate", "-", "--model", "random:tiny-llama", input="abc").stdout
    assert piped == run("generate", "abc", "--model", "random:tiny-llama").stdout


def test_the_real_model_answers_in_its_chat_format(smollm2):
    done = run("generate", "What is the capital of France?", "--chat", "--max-tokens", "12")
    assert done.exit_code == 0
    assert "Paris" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["generate", "", "--model", "random:tiny-llama"], "prompt is empty"),
        (["generate", "x", "--model", "no-such-model"], "no-such-model"),
        (["generate", "x", "--model", "random:tiny-llama", "--max-tokens", "0"], "max_tokens=0"),
        (["generate", "x", "--model", "random:tiny-llama", "--temperature", "-1"], "temperature=-1"),
        (["generate", "x", "--model", "random:tiny-llama", "--top-p", "0"], "top_p=0"),
        (["generate", "x", "--model", "random:tiny-llama", "--device", "tpu"], "device='tpu'"),
        (["generate", "x" * 2000, "--model", "random:tiny-llama"], "2000 tokens"),
        (["ladder", "--rungs", "recompute,nave"], "'nave'"),
        (["ladder", "--rungs", ""], "''"),
        (["ladder", "--plot", "/dev/null/x"], "--plot"),
        (["chat", "--max-tokens", "0"], "max_tokens=0"),
        (["pull", "no-such-model"], "no-such-model"),
        (["pull", "--from", "no-such-file"], "no-such-file"),
    ],
    ids=range(13),
)
def test_a_wrong_argument_is_an_error_of_one_line_not_a_traceback(arguments, named):
    done = run(*arguments)
    assert done.exit_code == 1
    assert done.stderr.startswith("Error: ")
    assert named in done.stderr
    assert "Traceback" not in done.output


@pytest.mark.parametrize(
    ("option", "value", "named"),
    [
        ("--requests", "no-such-file", "no-such-file"),
        ("--requests", "0", "at least 1"),
        ("--kv-cache-memory-bytes", "9", "one token takes 672 bytes"),
        ("--kv-cache-memory-bytes", "20000", "may need"),
    ],
)
def test_what_the_ladder_cannot_do_is_one_line_too(option, value, named):
    done = run("ladder", "--model", "random:tiny-llama", option, value)
    assert done.exit_code in (1, 2)
    assert named in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.output


def rows_of(output: str) -> dict[str, list[str]]:
    """The lines of all tables by their first word, without it."""
    rows: dict[str, list[str]] = {}
    for line in output.splitlines():
        first, *rest = line.split() or [""]
        rows[first] = rows.get(first, []) + rest
    return rows


def test_the_ladder_prints_every_rung_and_the_same_tokens():
    done = run("ladder", "--model", "random:tiny-llama")
    assert done.exit_code == 0, done.output
    rows = rows_of(done.stdout)
    *here, triton, graphs = RUNGS
    assert f"Not run, since they need a GPU: {triton}, {graphs}." in done.stdout
    for rung in here:
        assert rows[rung][0] == ("-" if rung == "recompute" else "yes")
    assert len(rows["chunked"]) == 10 + 5 + 9, "three tables"
    assert rows["contiguous-max"][6:9] == ["1.0", "/", "1"]
    assert max(len(line) for line in done.stdout.splitlines()) <= 80


def test_the_ladders_json_has_the_tokens_times_and_bytes():
    done = run("ladder", "--model", "random:tiny-qwen2", "--requests", "6", "--json")
    found = json.loads(done.stdout)
    config = load_model("random:tiny-qwen2").config
    assert [rung["name"] for rung in found["rungs"]] == list(RUNGS)[:-2]
    assert found["requests"] == 6
    assert found["dtype"] == "float32"
    recompute, naive, *others = found["rungs"]
    assert recompute["kv_held_bytes"] == 0
    assert recompute["utilisation"] is None
    assert naive["kv_held_bytes"] == naive["kv_used_bytes"] > 0
    for rung in (naive, *others):
        assert rung["token_ids"] == recompute["token_ids"]
        assert rung["same_tokens"] == "yes"
        assert rung["output_tokens"] == sum(map(len, rung["token_ids"])) == found["output_tokens"]
        assert rung["kv_held_bytes"] <= found["kv_cache_memory_bytes"]
        assert 0 < rung["utilisation"] <= 1
        assert rung["in_flight_mean"] <= rung["in_flight_most"] <= found["sequences"] == 12
        assert rung["computed_tokens"] >= rung["computed_tokens_step_most"] > 0
        for name in ("ttft_ms", "tpot_ms", "itl_ms"):
            assert 0 < rung[name]["p50"] <= rung[name]["p99"]
    rates = {rung["name"]: rung["prefix_hit_rate"] for rung in found["rungs"]}
    assert [name for name, rate in rates.items() if rate is not None] == ["prefix", "continuous", "chunked"]
    copied = {rung["name"]: rung["copied_blocks"] for rung in found["rungs"]}
    assert copied["paged"] == 0 < copied["sharing"]
    assert found["kv_cache_memory_bytes"] % (config.kv_elements_per_token * 4) == 0


def test_rungs_can_be_chosen_and_requests_can_come_from_a_file(tmp_path):
    file = tmp_path / "requests.jsonl"
    file.write_text('{"prompt": "hello", "max_tokens": 3}\n{"prompt_token_ids": [1, 2], "max_tokens": 5}\n')
    arguments = ["ladder", "--model", "random:tiny-llama", "--requests", str(file), "--json"]
    found = json.loads(run(*arguments, "--rungs", "paged,contiguous").stdout)
    names = [rung["name"] for rung in found["rungs"]]
    assert names == ["contiguous-max", "contiguous-pow2", "contiguous-oracle", "paged"]
    assert [len(tokens) for tokens in found["rungs"][0]["token_ids"]] == [3, 5]
    file.write_text('{"prompt": "hello", "max_tokens": 3, "arrival": 2.0}\n')
    done = run(*arguments)
    assert done.exit_code == 1
    assert "all requests at once. Make the file without --rate" in done.stderr.replace("\n", " ")


def test_the_ladder_draws_its_pictures(tmp_path):
    done = run(
        "ladder", "--model", "random:tiny-llama", "--requests", "4", "--plot", str(tmp_path / "new" / "x")
    )
    assert done.exit_code == 0, done.output
    drawn = {path.name for path in (tmp_path / "new" / "x").iterdir()}
    assert {"film-sharing.png", "timeline-chunked.png"} <= drawn
    assert {"memory.png", "timeline-recompute.png", "film-paged.png", "utilisation-naive.png"} <= drawn
    assert "film-recompute.png" not in drawn
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in (tmp_path / "new" / "x").iterdir())


def test_a_chat_remembers_forgets_and_ends():
    lines = "hi\n/what\nagain\n\n/reset\nhi\n/quit\nnever read\n"
    done = run("chat", "--model", "random:tiny-llama", "--max-tokens", "4", input=lines)
    assert done.exit_code == 0, done.output
    assert done.stderr.count("prompt tokens") == 3
    assert "There is no /what" in done.stderr
    counts = [int(line.split()[0][1:]) for line in done.stderr.splitlines() if "prompt tokens" in line]
    assert counts[1] > counts[0] == counts[2]


@pytest.mark.parametrize("command", [["chat"], ["generate", "-"]], ids=["chat", "generate"])
def test_standard_input_that_is_no_text_or_not_there_is_no_traceback(command):
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8", "OMP_NUM_THREADS": "1"}
    line = [
        sys.executable,
        "-c",
        "from minivllm.cli import main; main()",
        *command,
        "--model",
        "random:tiny-llama",
    ]
    done = subprocess.run(line, input=b"\xff\nhi\n", capture_output=True, env=environment)
    assert b"no whole text" in done.stderr
    assert b"Traceback" not in done.stderr
    closed = subprocess.run(["sh", "-c", '"$@" <&-', "sh", *line], capture_output=True, env=environment)
    assert b"Traceback" not in closed.stderr


def test_an_answer_that_is_cut_off_is_said_to_be():
    done = run("generate", "abc", "--model", "random:tiny-llama", "--max-tokens", "3", "--ignore-eos")
    assert "3 prompt tokens, 3 generated" in done.stderr
    assert "cut off" in done.stderr


def test_a_chat_that_grows_too_long_says_so_and_goes_on():
    lines = "hi\n" + "x" * 1200 + "\nhi\n"
    done = run(
        "chat", "--model", "random:tiny-llama", "--max-tokens", "4", "--system", "Be brief.", input=lines
    )
    assert done.exit_code == 0
    assert done.stderr.count("prompt tokens") == 2
    assert "1024" in done.stderr
    assert "/reset" in done.stderr.splitlines()[-3]


def test_pull_says_where_the_model_is(smollm2_source):
    done = run("pull")
    assert done.exit_code == 0
    assert str(smollm2_source.path) in done.stdout
    assert "nothing to download" in run("pull", "random:tiny-llama").stdout


@pytest.mark.parametrize(
    "command", [["generate", "hi"], ["ladder", "--requests", "2"]], ids=["generate", "ladder"]
)
def test_a_terminal_that_cannot_show_every_character_is_no_error(command):
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1", "OMP_NUM_THREADS": "1"}
    code = "from minivllm.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *command, "--model", "random:tiny-llama"],
        capture_output=True,
        env=environment,
    )
    assert (done.returncode, b"Traceback" in done.stderr) == (0, False)


def test_a_full_disk_is_an_error_of_one_line():
    code = "from minivllm.cli import main; main()"
    command = [sys.executable, "-c", code, "generate", "hi", "--model", "random:tiny-llama"]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode != 0
    assert b"No space left" in done.stderr


def test_tokens_that_differ_end_the_ladder_with_an_error_also_as_json(monkeypatch):
    from test_lab import ForgetfulStore

    from minivllm import engine_parts

    monkeypatch.setattr(engine_parts, "NaiveStore", ForgetfulStore)
    for options in ([], ["--json"]):
        done = run("ladder", "--model", "random:tiny-llama", "--rungs", "recompute,naive", *options)
        assert done.exit_code == 1
        assert "different tokens" in done.stderr
