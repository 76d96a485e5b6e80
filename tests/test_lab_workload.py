"""Workloads: made from a seed, kept in a file, and refused with the place of what is wrong."""

from __future__ import annotations

import io
import json
import math
import os
import statistics
import subprocess
import sys
from itertools import pairwise

import pytest
from click.testing import CliRunner

from minivllm import cli
from minivllm.errors import InvalidOption, InvalidRequestFile
from minivllm.lab import workload
from minivllm.lab.workload import SIGMA, WorkloadRequest, make_workload, read_workload, write_workload


def run(*arguments: str):
    return CliRunner().invoke(cli.main, ["workload", *arguments])


def ids_of(request: WorkloadRequest) -> tuple[int, ...]:
    return request.prompt_token_ids or ()


def as_text(requests) -> str:
    file = io.StringIO()
    write_workload(file, requests)
    return file.getvalue()


def test_the_same_arguments_give_the_same_bytes_in_every_process():
    code = (
        "import sys; from minivllm.lab.workload import *\n"
        "write_workload(sys.stdout, make_workload(9, seed=3, rate=2.0))\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    texts = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True
        ).stdout.decode()
        for seed in ("1", "2")
    }
    assert texts == {as_text(make_workload(9, seed=3, rate=2.0))}
    assert texts != {as_text(make_workload(9, seed=4, rate=2.0))}


def test_samples_are_kept_in_a_file_and_plain_requests_stay_plain(tmp_path):
    requests = [
        WorkloadRequest((1, 2), None, 3),
        WorkloadRequest((4,), None, 5, n=6, temperature=0.5, seed=0),
    ]
    path = tmp_path / "requests.jsonl"
    write_workload(path, requests)
    assert read_workload(path) == requests
    plain, sampled = map(json.loads, path.read_text().splitlines())
    assert plain.keys() == {"prompt_token_ids", "max_tokens"}
    assert (sampled["n"], sampled["temperature"], sampled["seed"]) == (6, 0.5, 0)


def test_lengths_are_log_normal_with_the_means_asked_for():
    made = make_workload(4000, mean_in=30, mean_out=70, max_in=10**6, max_out=10**6)
    for mean, lengths in ((30, [len(ids_of(r)) for r in made]), (70, [r.max_tokens for r in made])):
        assert statistics.mean(lengths) == pytest.approx(mean, rel=0.06)
        assert statistics.stdev(map(math.log, lengths)) == pytest.approx(SIGMA, rel=0.06)


def test_lengths_are_clipped_and_ids_come_from_the_middle_of_the_vocabulary():
    made = make_workload(300, mean_in=20, mean_out=3, max_in=33, max_out=5, vocab_size=403)
    assert {len(ids_of(r)) for r in made} <= set(range(1, 34))
    assert max(len(ids_of(r)) for r in made) == 33
    assert {r.max_tokens for r in made} == {1, 2, 3, 4, 5}
    ids = {token for r in made for token in ids_of(r)}
    assert ids == set(range(100, 302))


def test_the_smallest_workload_can_be_made():
    (request,) = make_workload(1, mean_in=1, mean_out=1, max_in=1, max_out=1, vocab_size=2)
    assert request == WorkloadRequest((0,), None, 1)


def test_arrivals_are_poisson_and_change_nothing_else():
    made = make_workload(2000, rate=8.0, mean_in=2, mean_out=2)
    arrivals = [r.arrival for r in made]
    gaps = [later - earlier for earlier, later in pairwise(arrivals)]
    assert arrivals[0] == 0
    assert min(gaps) >= 0
    assert statistics.mean(gaps) == pytest.approx(1 / 8, rel=0.1)
    assert statistics.stdev(gaps) == pytest.approx(
        1 / 8, rel=0.1
    )  # exponential: spread and mean are the same
    at_once = make_workload(2000, mean_in=2, mean_out=2)
    assert at_once == make_workload(2000, rate=math.inf, mean_in=2, mean_out=2)
    assert {r.arrival for r in at_once} == {0.0}
    assert [ids_of(r) for r in made] == [ids_of(r) for r in at_once]
    assert [r.max_tokens for r in made] == [r.max_tokens for r in at_once]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0),
        ("n", True),
        ("seed", 1.5),
        ("mean_in", 0),
        ("mean_in", math.nan),
        ("mean_in", 769),
        ("mean_out", math.inf),
        ("max_in", 0),
        ("max_out", 2.0),
        ("rate", 0),
        ("rate", -1),
        ("rate", math.nan),
        ("vocab_size", 1),
    ],
)
def test_impossible_arguments_are_refused_by_name(name, value):
    with pytest.raises(InvalidOption, match=f"^{name}="):
        make_workload(**{"n": 2, name: value})


def test_what_is_written_is_read_again(tmp_path):
    requests = [
        WorkloadRequest((5, 0, 77), None, 3),
        WorkloadRequest(None, 'zwei\nZeilen "ü" \u2028 \x85', 1, 0.25),
        *make_workload(5, rate=3.0),
    ]
    write_workload(tmp_path / "w.jsonl", requests)
    assert read_workload(tmp_path / "w.jsonl") == requests
    first, second = (tmp_path / "w.jsonl").read_text().splitlines()[:2]
    assert first == '{"prompt_token_ids":[5,0,77],"max_tokens":3}'
    assert json.loads(second)["arrival"] == 0.25


def test_empty_lines_and_either_line_end_are_passed_over(tmp_path):
    path = tmp_path / "w.jsonl"
    path.write_bytes(
        b'\r\n{"prompt": "a", "max_tokens": 2, "arrival": 1}\r\n\n  \n{"prompt": "b", "max_tokens": 1}'
    )
    assert read_workload(path) == [WorkloadRequest(None, "a", 2, 1.0), WorkloadRequest(None, "b", 1)]


GOOD = b'{"prompt_token_ids": [1], "max_tokens": 1}'


@pytest.mark.parametrize(
    ("line", "named"),
    [
        (b"{", "not JSON"),
        (b'{"prompt": "a", "max_tokens": 1} {}', "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"prompt": "\xff", "max_tokens": 1}', "not UTF-8"),
        (b"[1, 2]", "list"),
        (b"3", "int"),
        (b'{"max_tokens": 1}', "neither"),
        (b'{"prompt": null, "max_tokens": 1}', "neither"),
        (b'{"prompt": "a", "prompt_token_ids": [1], "max_tokens": 1}', "both"),
        (b'{"prompt": "", "max_tokens": 1}', "prompt is"),
        (b'{"prompt": 3, "max_tokens": 1}', "prompt is 3"),
        (b'{"prompt": "\\ud800", "max_tokens": 1}', "surrogate"),
        (b'{"prompt_token_ids": [], "max_tokens": 1}', "prompt_token_ids is []"),
        (b'{"prompt_token_ids": "12", "max_tokens": 1}', "prompt_token_ids is"),
        (b'{"prompt_token_ids": [1, 2.0], "max_tokens": 1}', "prompt_token_ids[1] is 2.0"),
        (b'{"prompt_token_ids": [true], "max_tokens": 1}', "prompt_token_ids[0] is true"),
        (b'{"prompt_token_ids": [-1], "max_tokens": 1}', "prompt_token_ids[0] is -1"),
        (b'{"prompt_token_ids": [1]}', "max_tokens is null"),
        (b'{"prompt_token_ids": [1], "max_tokens": 0}', "max_tokens is 0"),
        (b'{"prompt_token_ids": [1], "max_tokens": true}', "max_tokens is true"),
        (b'{"prompt_token_ids": [1], "max_tokens": "4"}', "max_tokens is"),
        (b'{"prompt_token_ids": [1], "max_tokens": 1, "arrival": -0.5}', "arrival is -0.5"),
        (b'{"prompt": "a", "max_tokens": 1, "n": 0}', "n is 0"),
        (b'{"prompt": "a", "max_tokens": 1, "n": true}', "n is true"),
        (b'{"prompt": "a", "max_tokens": 1, "temperature": -1, "seed": 1}', "temperature is -1"),
        (b'{"prompt": "a", "max_tokens": 1, "temperature": NaN, "seed": 1}', "temperature is NaN"),
        (b'{"prompt": "a", "max_tokens": 1, "temperature": 1, "seed": 1.5}', "seed is 1.5"),
        (b'{"prompt": "a", "max_tokens": 1, "temperature": 1}', "expected a seed as well"),
        (b'{"prompt": "a", "max_tokens": 1, "seed": 1}', "expected a temperature above 0 as well"),
        (b'{"prompt_token_ids": [1], "max_tokens": 1, "arrival": NaN}', "arrival is NaN"),
        (b'{"prompt_token_ids": [1], "max_tokens": 1, "arrival": Infinity}', "arrival is Infinity"),
        (b'{"prompt_token_ids": [1], "max_tokens": 1, "arrival": "now"}', "arrival is"),
        (b'{"prompt_token_ids": [1], "max_tokens": 1, "top_p": 1}', "'top_p'"),
        (b'{"prompt_token_ids": [1], "max_tokens": 1, "max_tokens": 2}', "twice"),
    ],
    ids=range(34),
)
def test_a_bad_line_is_named_with_its_file_its_number_and_what_was_expected(line, named, tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(GOOD + b"\n\n" + line + b"\n" + GOOD)
    with pytest.raises(InvalidRequestFile) as caught:
        read_workload(path)
    message = str(caught.value)
    assert message.startswith(f"{path}, line 3: ")
    assert named in message
    assert "expected" in message or "save it as UTF-8" in message or "the keys are" in message
    assert len(message) < 500 + len(str(path))


def test_a_file_without_requests_or_no_file_at_all_is_refused(tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n\n")
    for path, named in (
        (empty, "holds no request"),
        (tmp_path, "directory"),
        (tmp_path / "none", "No such file"),
    ):
        with pytest.raises(InvalidRequestFile, match=named) as caught:
            read_workload(path)
        assert str(path) in str(caught.value)


def test_a_request_has_exactly_one_prompt():
    for ids, text in (((1,), "a"), (None, None)):
        with pytest.raises(InvalidOption):
            WorkloadRequest(ids, text, 1)


def test_a_file_is_replaced_whole_or_left_as_it_was(tmp_path, monkeypatch):
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    target.chmod(0o640)
    link.symlink_to(target)

    def no_room(*paths):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(workload.os, "replace", no_room)
        with pytest.raises(OSError, match="No space"):
            write_workload(link, make_workload(2))
    assert target.read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "target"]

    write_workload(link, make_workload(2))
    assert link.is_symlink()
    assert read_workload(target) == make_workload(2)
    write_workload(tmp_path / "new", make_workload(2))
    umask = os.umask(0)
    os.umask(umask)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o666 & ~umask


def test_the_command_writes_the_file_and_says_how_much_is_in_it(tmp_path):
    options = ("--n", "5", "--seed", "2", "--mean-in", "9", "--max-in", "20", "--rate", "3")
    done = run(*options, "--out", str(tmp_path / "w.jsonl"))
    assert (done.exit_code, done.stdout) == (0, "")
    requests = read_workload(tmp_path / "w.jsonl")
    assert requests == make_workload(5, seed=2, mean_in=9, max_in=20, rate=3)
    num_in, num_out = sum(len(ids_of(r)) for r in requests), sum(r.max_tokens for r in requests)
    assert done.stderr == f"5 requests, {num_in:,} prompt tokens, {num_out:,} output tokens\n"
    on_screen = run(*options)
    assert on_screen.stdout == (tmp_path / "w.jsonl").read_text()
    assert on_screen.stderr == done.stderr


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--out", "no-such-folder/w.jsonl"], "no-such-folder/w.jsonl cannot be written: No such file"),
        (["--out", "."], "cannot be written"),
        (["--out", ""], "cannot be written"),
        (["--out", "/dev/full"], "/dev/full cannot be written: No space left"),
        (["--n", "0"], "n=0"),
        (["--rate", "0"], "rate=0.0"),
        (["--mean-in", "nan"], "mean_in=nan"),
        (["--max-out", "100"], "mean_out=128 "),
    ],
    ids=range(8),
)
def test_what_cannot_be_done_is_an_error_of_one_line(arguments, named):
    done = run(*arguments)
    assert done.exit_code == 1
    assert done.stderr.startswith("Error: ")
    assert named in done.stderr
    assert done.stderr.count("\n") == 1
