"""Traces: Azure's and Mooncake's files become requests, with nothing changed silently.

The files are made here, in the formats of the public ones.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm import cli
from minivllm.errors import InvalidOption, InvalidRequestFile
from minivllm.lab.replay import ReplayOptions, RequestFile, make_replay, read_request_file
from minivllm.lab.traces import BLOCK, TraceRow
from minivllm.lab.workload import make_workload, poisson_arrivals, read_workload, write_workload

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,480,10
2023-11-16 18:17:04.0319600,31,8
2023-11-16 23:59:59.9999999,110,27
2023-11-17 00:00:00.0000000,7,1
"""
CONVERSATION = [  # two turns of one conversation, another one, and a prompt that is one whole block
    {"timestamp": 3000, "input_length": 600, "output_length": 5, "hash_ids": [7, 8]},
    {"timestamp": 3250, "input_length": 700, "output_length": 6, "hash_ids": [9, 10]},
    {"timestamp": 4001, "input_length": 1030, "output_length": 7, "hash_ids": [7, 8, 11]},
    {"timestamp": 4001, "input_length": 512, "output_length": 8, "hash_ids": [7]},
]


def mooncake(rows: list[dict[str, Any]]) -> str:
    return "".join(f"{json.dumps(row)}\n" for row in rows)


def write(path, text: str | bytes):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def replay(path, **options: Any):
    vocab_size = options.pop("vocab_size", 49152)
    return make_replay(read_request_file(path), ReplayOptions(**options), vocab_size)


def common(one, other) -> int:
    """How many leading tokens two requests share."""
    pairs = zip(one.token_ids, other.token_ids, strict=False)
    return next(
        (i for i, (a, b) in enumerate(pairs) if a != b), min(len(one.token_ids), len(other.token_ids))
    )


def lengths(requests) -> list[tuple[int, int]]:
    return [(len(r.token_ids), r.max_tokens) for r in requests]


# --- the formats ---


def test_azure_rows_become_requests_with_their_lengths_and_times(tmp_path):
    found = replay(write(tmp_path / "a.csv", AZURE))
    assert lengths(found.requests) == [(480, 10), (31, 8), (110, 27), (7, 1)]
    assert [r.arrival for r in found.requests] == [0, 0.052, 20576.020039, 20576.02004]
    assert (found.num_in_file, found.prompts_cut, found.outputs_cut, found.lengths_raised) == (4, 0, 0, 0)
    for one, other in pairwise(found.requests):
        assert common(one, other) == 0


def test_mooncake_prompts_have_in_common_what_their_hash_ids_say(tmp_path):
    first, other, next_turn, block = replay(write(tmp_path / "m.jsonl", mooncake(CONVERSATION))).requests
    assert lengths([first, other, next_turn, block]) == [(600, 5), (700, 6), (1030, 7), (512, 8)]
    assert [r.arrival for r in (first, other, next_turn, block)] == [0, 0.25, 1.001, 1.001]
    assert common(first, next_turn) == 600
    assert common(first, block) == common(next_turn, block) == 512
    assert common(first, other) == common(next_turn, other) == 0


@st.composite
def _mooncake_rows(draw):
    """Prompts made of whole blocks and a rest, with ids from a small set, so that many share a beginning."""
    num_in = draw(st.lists(st.sampled_from([1, 511, 512, 513, 1024, 1500, 2049]), min_size=2, max_size=5))
    id_lists = [
        draw(st.lists(st.integers(0, 2), min_size=-(-n // 512), max_size=-(-n // 512))) for n in num_in
    ]
    return [TraceRow(0, n, 1, tuple(ids)) for n, ids in zip(num_in, id_lists, strict=True)]


@settings(max_examples=40, deadline=None)
@given(
    rows=_mooncake_rows(), scale=st.sampled_from([None, 0.25, 1 / 32, 0.1]), most=st.sampled_from([None, 40])
)
def test_prompts_share_their_leading_equal_blocks_also_scaled_and_cut(rows, scale, most):
    options = ReplayOptions(scale_lengths=scale, max_in=most)
    requests = make_replay(RequestFile("mooncake", rows=rows), options).requests
    block = round(BLOCK * (scale or 1))
    for a, one in zip(rows, requests, strict=True):
        for b, other in zip(rows, requests, strict=True):
            equal = next(
                (i for i, (x, y) in enumerate(zip(a.hash_ids, b.hash_ids, strict=False)) if x != y), 99
            )
            expected = min(equal * block, len(one.token_ids), len(other.token_ids))
            assert common(one, other) == expected


def test_a_scaled_trace_has_scaled_lengths_and_blocks(tmp_path):
    found = replay(write(tmp_path / "m.jsonl", mooncake(CONVERSATION)), scale_lengths=1 / 32)
    first, _, next_turn, block = found.requests  # blocks of 16 tokens; 88 / 32 is 2.75, 188 / 32 5.875
    assert [n for n, _ in lengths(found.requests)] == [16 + 3, 16 + 6, 2 * 16 + 0, 16]
    assert common(first, next_turn) == 19
    assert common(first, block) == 16
    assert [m for _, m in lengths(found.requests)] == [1, 1, 1, 1]
    assert found.lengths_raised == 4  # 5/32 to 8/32 are 0 when rounded
    assert lengths(replay(write(tmp_path / "a.csv", AZURE), scale_lengths=2.5).requests)[1] == (78, 20)
    whole = RequestFile("mooncake", rows=[TraceRow(0, 5120, 1, tuple(range(10)))])
    for scale, tokens in ((0.0029, 10), (0.003, 20)):  # a block has whole tokens, and a prompt whole blocks
        assert lengths(make_replay(whole, ReplayOptions(scale_lengths=scale)).requests) == [(tokens, 1)]


def test_an_unordered_file_is_sorted_and_equal_times_keep_their_order(tmp_path):
    header, *lines = AZURE.splitlines(keepends=True)
    turned = replay(write(tmp_path / "t.csv", header + "".join(reversed(lines))))
    assert turned == replay(write(tmp_path / "a.csv", AZURE))
    late = [{**CONVERSATION[i], "timestamp": at} for i, at in ((0, 9), (1, 5), (2, 9), (3, 5))]
    found = replay(write(tmp_path / "m.jsonl", mooncake(late)))
    assert [m for _, m in lengths(found.requests)] == [6, 8, 5, 7]
    assert [r.arrival for r in found.requests] == [0, 0, 0.004, 0.004]


def test_line_ends_a_byte_order_mark_more_columns_and_empty_lines_do_not_matter(tmp_path):
    plain = replay(write(tmp_path / "a.csv", AZURE))
    text = "\ufeff\n" + AZURE.replace("\n", "\r\n") + " \r\n\r\n"
    assert replay(write(tmp_path / "b.csv", text)) == plain
    columns = ["User,GeneratedTokens,TIMESTAMP,ContextTokens"]
    for line in AZURE.splitlines()[1:]:
        time, num_in, num_out = line.split(",")
        columns.append(f'"a, b",{num_out},{time}+00:00,{num_in}')
    assert replay(write(tmp_path / "c.txt", "\n".join(columns))) == plain
    zones = HEADER + "2023-11-17 01:00:00+02:00,3,4\n2023-11-16 18:00:00-05:00,5,6\n2023-11-16 23:00:01,7,8\n"
    assert [r.arrival for r in replay(write(tmp_path / "z.csv", zones)).requests] == [0, 0, 1]
    rows = [{**row, "user": 3} for row in CONVERSATION]
    text = "\ufeff\n" + mooncake(rows).replace("\n", "\r\n\n")
    assert replay(write(tmp_path / "n.txt", text)) == replay(write(tmp_path / "m", mooncake(CONVERSATION)))


@pytest.mark.parametrize(
    ("name", "text", "format"),
    [
        ("t.csv", AZURE, "azure"),
        ("t.jsonl", AZURE, "azure"),
        ("t", mooncake(CONVERSATION), "mooncake"),
        ("t.csv", mooncake(CONVERSATION), "mooncake"),
        ("t.csv", '{"prompt": "x", "max_tokens": 1}', "minivllm"),
        ("t.txt", '{"prompt": "\\"timestamp\\" TIMESTAMP", "max_tokens": 1}', "minivllm"),
    ],
    ids=range(6),
)
def test_the_format_is_found_by_looking(name, text, format, tmp_path):
    path = write(tmp_path / name, text)
    assert read_request_file(path) == read_request_file(path, format)
    assert read_request_file(path).format == format


# --- what is refused ---

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
GOOD = "2023-11-16 18:17:03.9799600,480,10\n"


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("2023-11-16 18:17:04", "1 fields; expected 3"),
        ("2023-11-16 18:17:04,1,2,3", "4 fields; expected 3"),
        ("18:17:04,1,2", 'TIMESTAMP is "18:17:04"; expected a date and time'),
        ("2023-02-30 18:17:04,1,2", "TIMESTAMP is"),
        (",1,2", 'TIMESTAMP is ""'),
        ("2023-11-16 18:17:04,1.5,2", 'ContextTokens is "1.5"; expected a whole number'),
        ("2023-11-16 18:17:04,-1,2", 'ContextTokens is "-1"'),
        ("2023-11-16 18:17:04,1,", 'GeneratedTokens is ""'),
        ("2023-11-16 18:17:04,1,²", "GeneratedTokens is"),
        ("2023-11-16 18:17:04,1,10000001", "GeneratedTokens is"),
        ("2023-11-16 18:17:04,1," + "9" * 5000, "GeneratedTokens is"),
        ('"2023-11-16 18:17:04,1,2', "not CSV"),
        ('"2023-11-16" 18:17:04,1,2', "not CSV"),
        (b"2023-11-16 18:17:04,1,\xff2", "not UTF-8"),
        (",,", 'TIMESTAMP is ""'),
    ],
    ids=range(15),
)
def test_a_bad_row_of_azure_is_named_with_its_file_its_line_and_what_was_expected(line, named, tmp_path):
    line = line if isinstance(line, bytes) else line.encode()
    path = write(tmp_path / "bad.csv", f"{HEADER}{GOOD}\n".encode() + line)
    with pytest.raises(InvalidRequestFile) as caught:
        read_request_file(path)
    message = str(caught.value)
    assert message.startswith(f"{path}, line 4: ")
    assert named in message
    assert "expected" in message or "save it as UTF-8" in message
    assert len(message) < 300 + len(str(path))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"timestamp": None}, "timestamp is null; expected milliseconds"),
        ({"timestamp": -1}, "timestamp is -1"),
        ({"timestamp": float("nan")}, "timestamp is NaN"),
        ({"timestamp": 10**400}, "timestamp is 1000"),
        ({"timestamp": "0"}, "timestamp is"),
        ({"timestamp": True}, "timestamp is true"),
        ({"input_length": None}, "input_length is null; expected a whole number"),
        ({"input_length": 600.0}, "input_length is 600.0"),
        ({"input_length": -1}, "input_length is -1"),
        ({"output_length": 10**8}, "output_length is 100000000"),
        ({"output_length": True}, "output_length is true"),
        ({"hash_ids": None}, "hash_ids is null; expected a list"),
        ({"hash_ids": [1, "2"]}, "hash_ids is"),
        ({"hash_ids": [1.0, 2]}, "hash_ids is"),
        ({"hash_ids": [1]}, "hash_ids is [1]; expected 2 ids, one for every 512 of 600 tokens"),
        ({"hash_ids": [1, 2, 3]}, "expected 2 ids"),
        ({"input_length": 0}, "expected 0 ids"),
    ],
    ids=range(17),
)
def test_a_bad_row_of_mooncake_is_named_with_its_file_its_line_and_what_was_expected(change, named, tmp_path):
    rows = [CONVERSATION[0], {**CONVERSATION[0], **change}]
    path = write(tmp_path / "bad.jsonl", mooncake(rows))
    with pytest.raises(InvalidRequestFile) as caught:
        read_request_file(path)
    message = str(caught.value)
    assert message.startswith(f"{path}, line 2: ")
    assert named in message
    assert "expected" in message
    assert len(message) < 300 + len(str(path))


@pytest.mark.parametrize(
    ("text", "format", "named"),
    [
        ("", "azure", "holds no request; expected a line for each"),
        ("", "mooncake", "holds no request"),
        (HEADER, "auto", "holds no request"),
        ("num_prefill_tokens,num_decode_tokens\n3,4", "azure", "line 1: no column TIMESTAMP, ContextTokens"),
        ("TIMESTAMP,ContextTokens\n", "auto", "line 1: no column GeneratedTokens; expected the columns"),
        (AZURE, "mooncake", "line 1: not JSON"),
        (mooncake(CONVERSATION), "azure", "line 1: no column"),
        (AZURE, "minivllm", "line 1: not JSON"),
        (HEADER + GOOD + GOOD.replace("2023", "2093"), "auto", "more than 30 years apart"),
        ('{"timestamp": 0, "input_len', "auto", "line 1: not JSON"),
        ('{"timestamp": 0, "timestamp": 1}', "auto", "twice"),
    ],
    ids=range(11),
)
def test_a_file_that_is_no_trace_of_its_format_is_refused(text, format, named, tmp_path):
    path = write(tmp_path / "t", text)
    with pytest.raises(InvalidRequestFile, match=named) as caught:
        read_request_file(path, format)
    assert str(path) in str(caught.value)
    with pytest.raises(InvalidRequestFile, match="cannot be read: No such file"):
        read_request_file(tmp_path / "none", format)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0),
        ("n", True),
        ("n", 5),
        ("speedup", 0),
        ("speedup", float("nan")),
        ("speedup", float("inf")),
        ("speedup", 1e-9),
        ("rate", 0.0),
        ("rate", -1),
        ("rate", 1e-12),
        ("seed", 0.5),
        ("scale_lengths", 0),
        ("scale_lengths", float("inf")),
        ("scale_lengths", 1e9),
        ("max_in", 0),
        ("max_out", 2.0),
        ("vocab_size", 1),
    ],
    ids=str,
)
def test_an_impossible_option_is_refused_by_name(name, value, tmp_path):
    path = write(tmp_path / "m.jsonl", mooncake(CONVERSATION))
    with pytest.raises(InvalidOption, match=f"^{name}="):
        replay(path, **{name: value})


def test_options_that_contradict_each_other_or_the_file_are_refused(tmp_path):
    with pytest.raises(InvalidOption, match=r"^speedup=2 is not possible beside rate=3"):
        ReplayOptions(speedup=2, rate=3)
    with pytest.raises(InvalidOption, match=r"format='vidur'.*auto, minivllm, azure, mooncake"):
        read_request_file(write(tmp_path / "a.csv", AZURE), "vidur")
    write_workload(tmp_path / "w.jsonl", make_workload(2))
    changes: dict[str, Any] = {"scale_lengths": 0.5, "max_in": 9, "max_out": 9}
    for name, value in changes.items():
        with pytest.raises(InvalidOption, match=f"^{name}={value} is not possible with requests that have"):
            replay(tmp_path / "w.jsonl", **{name: value})


# --- which, how long, when ---


def test_the_first_n_are_those_that_come_first_with_the_same_tokens(tmp_path):
    for path in (write(tmp_path / "a.csv", AZURE), write(tmp_path / "m", mooncake(CONVERSATION))):
        whole = replay(path)
        assert replay(path, n=4) == whole
        some = replay(path, n=3)
        assert (some.requests, some.num_in_file) == (whole.requests[:3], 4)


def test_cut_prompts_keep_their_beginning_and_everything_changed_is_counted(tmp_path):
    path = write(tmp_path / "a.csv", HEADER + "".join(f"2023-11-16 18:17:04,{n},{m}\n" for n, m in LENGTHS))
    whole, cut = replay(path), replay(path, max_in=31, max_out=8)
    assert lengths(cut.requests) == [(31, 8), (31, 8), (1, 8), (30, 1), (1, 1)]
    for one, other in zip(whole.requests, cut.requests, strict=True):
        assert one.token_ids[:31] == other.token_ids
    assert (cut.prompts_cut, cut.outputs_cut, cut.lengths_raised) == (1, 2, 4)
    assert (whole.prompts_cut, whole.outputs_cut, whole.lengths_raised) == (0, 0, 4)
    few = replay(path, n=2, max_in=30, max_out=8)
    assert (few.prompts_cut, few.outputs_cut, few.lengths_raised) == (2, 1, 0)  # of those taken


LENGTHS = [(32, 9), (31, 8), (0, 9), (30, 0), (0, 0)]


def test_a_prompt_of_mooncake_that_is_empty_gets_a_token_of_its_own(tmp_path):
    empty = {"timestamp": 0, "input_length": 0, "output_length": 0, "hash_ids": []}
    found = replay(write(tmp_path / "m", mooncake([empty, empty])))
    assert lengths(found.requests) == [(1, 1), (1, 1)]
    assert found.lengths_raised == 4
    assert found.requests[0].token_ids != found.requests[1].token_ids


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 10**12), st.integers(0, 99), st.integers(0, 99)), min_size=1),
    scale=st.sampled_from([0.1, 0.5, 1, 3]),
    limits=st.tuples(st.none() | st.integers(1, 50), st.none() | st.integers(1, 50)),
)
def test_lengths_times_and_counts_are_those_of_a_plain_model(rows, scale, limits):
    file = RequestFile("azure", rows=[TraceRow(*row) for row in sorted(rows)])
    found = make_replay(file, ReplayOptions(scale_lengths=scale, max_in=limits[0], max_out=limits[1]))
    cut, raised = [0, 0], 0
    for (at, *wanted), request in zip(sorted(rows), found.requests, strict=True):
        assert request.arrival == pytest.approx((at - min(rows)[0]) / 1e6, abs=1e-6)
        got = (len(request.token_ids), request.max_tokens)
        for i, (length, limit) in enumerate(zip(wanted, limits, strict=True)):
            length = round(length * scale)
            raised += length == 0
            cut[i] += max(length, 1) > (limit or 10**9)
            assert got[i] == min(max(length, 1), limit or 10**9)
    assert [found.prompts_cut, found.outputs_cut, found.lengths_raised] == [*cut, raised]


def test_a_speedup_divides_arrivals_and_a_rate_replaces_them_and_neither_changes_the_rest(tmp_path):
    write_workload(tmp_path / "w", make_workload(5, rate=2.0))
    for path in (write(tmp_path / "a", AZURE), write(tmp_path / "m", mooncake(CONVERSATION)), tmp_path / "w"):
        plain, n = replay(path).requests, replay(path).num_in_file
        fast, poisson = replay(path, speedup=4).requests, replay(path, rate=2.0, seed=0).requests
        assert [r.arrival for r in fast] == pytest.approx([r.arrival / 4 for r in plain], abs=1e-6)
        assert [r.arrival for r in poisson] == poisson_arrivals(n, 2.0, seed=0)
        assert {r.arrival for r in replay(path, rate=float("inf")).requests} == {0}
        for changed in (fast, poisson):
            assert [r.prompt_token_ids for r in changed] == [r.prompt_token_ids for r in plain]
            assert lengths(changed) == lengths(plain)


def test_requests_with_prompts_are_taken_as_they_are(tmp_path):
    requests = make_workload(4, rate=3.0)
    requests = [requests[2], requests[0], requests[3], requests[1]]  # a file need not be in order
    write_workload(tmp_path / "w", requests)
    assert replay(tmp_path / "w").requests == requests
    assert replay(tmp_path / "w", n=2, seed=5).requests == requests[:2]


def test_tokens_follow_from_the_seed_in_every_process_and_stay_in_the_middle_of_the_vocabulary(tmp_path):
    for path in (write(tmp_path / "a", AZURE), write(tmp_path / "m", mooncake(CONVERSATION))):
        code = (
            "import sys\n"
            "from minivllm.lab.replay import *\n"
            "from minivllm.lab.workload import write_workload\n"
            f"made = make_replay(read_request_file({str(path)!r}), ReplayOptions(seed=3), 403)\n"
            "write_workload(sys.stdout, made.requests)\nassert not {'torch', 'numpy'} & set(sys.modules)"
        )
        texts = {
            subprocess.run(
                [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": s}, capture_output=True
            ).stdout
            for s in ("1", "2")
        }
        made = replay(path, seed=3, vocab_size=403).requests
        write_workload(tmp_path / "w", made)
        assert texts == {(tmp_path / "w").read_bytes()}
        other = replay(path, seed=4, vocab_size=403).requests
        assert all(common(a, b) < 4 for a, b in zip(made, other, strict=True))
        assert set().union(*(r.token_ids for r in made)) <= set(range(100, 302))


# --- the commands ---


def run(*arguments: str):
    return CliRunner().invoke(cli.main, list(arguments))


def test_workload_turns_a_trace_into_a_file_that_replays_the_same(tmp_path):
    path, out = write(tmp_path / "m.jsonl", mooncake(CONVERSATION)), tmp_path / "w.jsonl"
    options = ("--n", "3", "--speedup", "2", "--max-in", "700", "--max-out", "5", "--vocab-size", "97")
    done = run("workload", "--trace", str(path), *options, "--out", str(out))
    assert done.exit_code == 0, done.output
    made = replay(path, n=3, speedup=2, max_in=700, max_out=5, vocab_size=97)
    assert read_workload(out) == made.requests
    assert done.stderr.splitlines() == [
        f"{path} (mooncake): 3 of 4 requests, 1 prompts cut to 700 tokens, 2 outputs cut to 5 tokens",
        "3 requests, 2,000 prompt tokens, 15 output tokens",
    ]


def test_bench_replays_a_trace_with_tokens_of_its_models_vocabulary_and_says_what_it_changed(tmp_path):
    path = write(tmp_path / "a.csv", AZURE)
    options = ("--n", "2", "--max-in", "20", "--max-out", "3", "--scale-lengths", "0.1", "--speedup", "10")
    done = run("bench", "--requests", str(path), *options, "--model", "random:tiny-llama")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["requests"], found["prompt_tokens"], found["output_tokens"]) == (2, 20 + 3, 1 + 1)
    assert found["offered_req_s"] == pytest.approx(2 / 0.0052, rel=1e-3)
    assert f"{path} (azure): 2 of 4 requests, 1 prompts cut to 20 tokens" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["workload", "--trace", "no-such-file"], "no-such-file cannot be read"),
        (["workload", "--trace", "TRACE", "--mean-in", "9"], "--mean-in does not go with --trace"),
        (["workload", "--trace", "TRACE", "--n", "9"], "n=9 is not possible: it must be at most 4"),
        (["workload", "--trace", "TRACE", "--format", "mooncake"], "line 1: not JSON"),
        (["workload", "--trace", "TRACE", "--rate", "1", "--speedup", "2"], "speedup=2.0"),
        (["workload", "--speedup", "2"], "need --trace"),
        (["workload", "--format", "azure"], "need --trace"),
        (["bench", "--requests", "TRACE", "--scale-lengths", "0"], "scale_lengths=0.0"),
        (["bench", "--requests", "TRACE", "--all-at-once", "--rate", "2"], "--all-at-once does not go with"),
        (["bench", "--requests", "TRACE", "--model", "random:tiny-llama", "--n", "9"], "n=9"),
    ],
    ids=range(10),
)
def test_what_cannot_be_done_is_an_error_of_one_line(arguments, named, tmp_path):
    path = str(write(tmp_path / "a.csv", AZURE))
    done = run(*(path if argument == "TRACE" else argument for argument in arguments))
    assert done.exit_code == 1
    assert done.stderr.splitlines()[-1].startswith("Error: ")
    assert named in done.stderr
    assert "Traceback" not in done.output
