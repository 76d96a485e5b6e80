"""The command line: what it prints, what it refuses, and what it loads."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

from minivllm.cli import main
from minivllm.model.loader import load_model


def run(*arguments: str, **options):
    return CliRunner().invoke(main, list(arguments), **options)


@pytest.mark.parametrize("command", [[], ["pull"], ["generate"], ["ladder"], ["doctor"]], ids=str)
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
    assert "naive memory" in done.stderr


def test_generate_gives_the_same_text_with_either_memory_and_with_one_seed():
    for options in ([], ["--temperature", "2", "--seed", "4"]):
        texts = {
            run("generate", "abc", "--model", "random:tiny-qwen3", "--cache", cache, *options).stdout
            for cache in ("recompute", "naive")
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
        (["pull", "no-such-model"], "no-such-model"),
        (["pull", "--from", "no-such-file"], "no-such-file"),
    ],
    ids=range(11),
)
def test_a_wrong_argument_is_an_error_of_one_line_not_a_traceback(arguments, named):
    done = run(*arguments)
    assert done.exit_code == 1
    assert done.stderr.startswith("Error: ")
    assert named in done.stderr
    assert "Traceback" not in done.output


def test_the_ladder_prints_both_rungs_and_the_same_tokens():
    done = run("ladder", "--model", "random:tiny-llama", "--max-tokens", "6")
    assert done.exit_code == 0, done.output
    rows = {line.split("│")[1].strip(): line for line in done.stdout.splitlines() if line.startswith("│")}
    assert "(reference)" in rows["recompute"]
    assert " yes " in rows["naive"]
    assert {"32", "64", "128", "256", "512"} <= rows.keys()
    assert max(len(line) for line in done.stdout.splitlines()) <= 80


def test_the_ladders_json_has_the_tokens_times_and_bytes():
    done = run("ladder", "--model", "random:tiny-qwen2", "--max-tokens", "5", "--json")
    found = json.loads(done.stdout)
    config = load_model("random:tiny-qwen2").config
    recompute, naive = found["rungs"]
    assert recompute["token_ids"] == naive["token_ids"]
    assert len(naive["token_ids"]) == found["max_tokens"] == 5
    assert (recompute["kv_bytes"], naive["same_tokens"]) == (0, "yes")
    # the last token is chosen from what stands before it, so its own key and value are never needed
    assert naive["kv_bytes"] == (found["prompt_tokens"] + 4) * config.kv_elements_per_token * 4
    assert found["dtype"] == "float32"
    assert set(naive["step_seconds"]) == {"32", "64", "128", "256", "512"}
    assert all(seconds > 0 for seconds in naive["step_seconds"].values())
    assert naive["ttft"] > 0 < naive["tpot"]


def test_one_rung_can_be_run_alone():
    found = json.loads(run("ladder", "--model", "random:tiny-llama", "--rungs", "naive", "--json").stdout)
    assert [rung["name"] for rung in found["rungs"]] == ["naive"]


def test_pull_says_where_the_model_is(smollm2_source):
    done = run("pull")
    assert done.exit_code == 0
    assert str(smollm2_source.path) in done.stdout
    assert "nothing to download" in run("pull", "random:tiny-llama").stdout


@pytest.mark.parametrize(
    "command", [["generate", "hi"], ["ladder", "--max-tokens", "2"]], ids=["generate", "ladder"]
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

    from minivllm.lab import ladder

    monkeypatch.setitem(
        ladder.RUNGS, "naive", ladder.Rung("naive", 1, ladder.RUNGS["naive"].manager, ForgetfulStore)
    )
    for options in ([], ["--json"]):
        done = run("ladder", "--model", "random:tiny-llama", "--max-tokens", "12", *options)
        assert done.exit_code == 1
        assert "different tokens" in done.stderr
