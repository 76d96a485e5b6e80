"""Chunked prefill, measured: the rows are those of a plain count, whatever the time was."""

from __future__ import annotations

import json
from itertools import count
from typing import Any

import pytest
from click.testing import CliRunner

from minivllm.errors import InvalidOption, InvalidPrompt
from minivllm.lab import chunked_load, chunked_prefill
from minivllm.lab.bench.result import RequestRecord
from minivllm.lab.chunked_load import Load, measure, ratios, summary
from minivllm.lab.chunked_prefill import main, verdict
from minivllm.lab.draw_curves import draw_chunked_prefill
from minivllm.lab.workload import WorkloadRequest
from minivllm.llm import LLM
from minivllm.outputs import RequestMetrics
from minivllm.step import ScheduledRequest, Step

MODEL = "random:tiny-llama"
SMALL = Load(num_decodes=3, decode_prompt_len=32, prompt_len=90, max_tokens=5, interval=0.05, seconds=0.3)


def ticking(seconds: float):
    """A clock that goes on by so much whenever it is looked at."""
    ticks = count()
    return lambda: seconds * next(ticks)


def test_a_load_is_decodes_from_the_start_and_prompts_by_the_clock():
    load = Load(2, decode_prompt_len=11, prompt_len=7, max_tokens=3, interval=0.5, seconds=2.0)
    requests = load.requests(97, 50)
    assert [r.arrival for r in requests] == [0, 0, 0.5, 1.0, 1.5], "nothing arrives when the time is up"
    assert [len(r.prompt_token_ids or ()) for r in requests] == [11] * 2 + [7] * 3
    assert [r.max_tokens for r in requests] == [50 - 11] * 2 + [3] * 3
    assert requests == load.requests(97, 50)
    assert len({r.prompt_token_ids for r in requests}) == 5
    assert len(Load(interval=0.1, seconds=0.3).requests(97, 5000)) == 8 + 2
    assert Load().interval == 2.0
    assert Load().prompt_len == 700


def test_time_begins_when_all_that_decode_have_a_token(monkeypatch):
    """Their prompts take many steps, in which no time passes; the first prompt comes an interval later."""
    load = Load(3, decode_prompt_len=100, prompt_len=30, max_tokens=2, interval=0.05, seconds=0.2)
    seen: list[Step] = []

    def keeping(requests, records, steps):
        seen.extend(steps)
        return summary(requests, records, steps)

    monkeypatch.setattr(chunked_load, "summary", keeping)
    with LLM(MODEL, dtype="float64", max_num_batched_tokens=16, max_num_seqs=8) as llm:
        row = measure(llm, load, ticking(0.002))
    filling = [step for step in seen if step.start == 0]
    assert sum(part.num_new_tokens for step in filling for part in step.scheduled) >= 3 * 100
    assert len(filling) >= 3 * 100 / 16
    assert all(step.end == 0 for step in filling[:-1])
    assert len({part.request_id for part in filling[-1].scheduled}) == 3
    begun = seen[len(filling) :]
    assert all(step.start > 0 for step in begun)
    assert {len(step.scheduled) for step in begun if step.end < load.interval} == {3}
    assert row["arrived"] == 3
    assert row["answered"] > 0


@pytest.mark.parametrize("more", [0, 40])
def test_those_that_decode_need_room_for_their_output(more):
    with LLM(MODEL, dtype="float64") as llm:
        longest = int(llm.args.max_model_len or 0)
        load = Load(decode_prompt_len=longest + more, prompt_len=30, interval=0.1, seconds=0.3)
        with pytest.raises(
            InvalidOption, match=f"decode_prompt_len={longest + more} .*{longest} tokens at most"
        ):
            measure(llm, load)
        assert not llm.has_unfinished_requests()
        with pytest.raises(InvalidPrompt):
            measure(llm, Load(decode_prompt_len=8, prompt_len=longest + 1, interval=0.1, seconds=0.3))


@pytest.mark.parametrize("budget", [None, 40, 64], ids=["whole", "budget40", "budget64"])
def test_on_a_clock_that_only_counts_the_row_is_what_the_scheduler_promises(budget):
    options = (
        {"scheduler": "continuous"}
        if budget is None
        else {"scheduler": "chunked", "max_num_batched_tokens": budget}
    )
    with LLM(MODEL, dtype="float64", **options) as llm:
        row = measure(llm, SMALL, ticking(0.002))
        assert not llm.has_unfinished_requests()
    assert row["arrived"] == 5
    assert row["answered"] == 5
    assert row["queue"] == [0] * 5
    assert not row["queue_grew"]
    assert row["preemptions"] == 0
    assert row["input_tokens"] == 5 * 90
    # each prompt has its 5 tokens, and the three who decode one in each step
    assert row["output_tokens"] == 5 * 5 + 3 * row["steps"]
    assert row["largest_step"] == (90 + 3 if budget is None else budget)
    assert row["tok_s"] == pytest.approx((row["input_tokens"] + row["output_tokens"]) / row["seconds"])
    assert row["itl_ms"]["max"] >= row["itl_ms"]["p99"] >= row["itl_ms"]["p50"] > 0


def test_prompts_that_come_faster_than_they_are_computed_pile_up():
    load = Load(2, decode_prompt_len=32, prompt_len=90, max_tokens=5, interval=0.004, seconds=0.04)
    with LLM(MODEL, dtype="float64", max_num_batched_tokens=12, max_num_seqs=8) as llm:
        row = measure(llm, load, ticking(0.002))
    assert row["queue_grew"]
    assert row["queue"] == list(range(9))
    assert row["answered"] == 0
    assert row["ttft_ms"]["p50"] is None


def test_a_row_of_a_run_made_by_hand():
    """Two decode, a prompt of 6 arrives at 1.0; the first of those who decode has all its tokens at 4.0."""
    prompts, most, arrivals = ((1,), (2, 3), (4,) * 6, (5,)), (4, 9, 2, 2), (0, 0, 1.0, 2.2)
    requests = [WorkloadRequest(p, None, n, at) for p, n, at in zip(prompts, most, arrivals, strict=True)]
    times: list[list[float]] = [[0.5, 1.5, 2.0, 4.0], [0.5, 1.5, 2.0, 4.0, 5.0], [4.0, 5.0], []]
    records = [
        RequestRecord(len(p), RequestMetrics(at, token_times=t))
        for p, at, t in zip(prompts, arrivals, times, strict=True)
    ]

    def step(index, start, end, *parts):
        return Step(index, start, end, tuple(ScheduledRequest(*part) for part in parts))

    steps = [
        step(0, 0.0, 0.5, (10, 0, 1), (11, 0, 2)),
        step(1, 0.5, 1.5, (10, 1, 1), (11, 2, 1)),
        step(2, 1.5, 2.0, (10, 2, 1), (11, 3, 1), (12, 0, 4, 0)),
        step(3, 2.1, 4.0, (10, 3, 1), (11, 4, 1), (12, 4, 2)),
        step(4, 4.0, 5.0, (11, 5, 1), (12, 6, 1), (13, 0, 1)),
    ]
    row = summary(requests, records, steps)
    assert (row["steps"], row["seconds"], row["largest_step"]) == (2, 2.5, 6)
    assert (row["input_tokens"], row["output_tokens"], row["prompt_steps"]) == (6, 2 + 3, 2)
    assert row["tok_s"] == pytest.approx(11 / 2.5)
    # gaps that end after the arrival, until 4.0: 1, 0.5, 2 of each
    assert row["itl_ms"] == {"mean": pytest.approx(1166.667), "p50": 1000, "p99": 2000, "max": 2000}
    assert row["ttft_ms"]["max"] == 3000
    assert (row["arrived"], row["answered"], row["queue"], row["queue_grew"]) == (2, 1, [0, 1], True)


def test_a_run_in_which_nothing_happened_has_nothing_to_say():
    requests = [WorkloadRequest((1,), None, 4), WorkloadRequest((2,), None, 4, 1.0)]
    records = [RequestRecord(1, RequestMetrics(r.arrival)) for r in requests]
    row = summary(requests, records, [])
    assert (row["steps"], row["seconds"], row["tok_s"], row["arrived"]) == (0, None, None, 0)
    assert row["itl_ms"]["p99"] is None
    assert ratios(row, row) == {"itl_p99_ratio": None, "itl_max_ratio": None, "throughput_ratio": None}


def test_the_ratios_say_how_much_shorter_and_which_share():
    counts = {"steps": 200, "prompt_steps": 2}
    whole: dict = {
        "max_num_batched_tokens": None,
        "itl_ms": {"p99": 600.0, "max": 700.0},
        "tok_s": 500.0,
        **counts,
    }
    row = {"max_num_batched_tokens": 128, "itl_ms": {"p99": 150.0, "max": 140.0}, "tok_s": 450.0}
    found = ratios(row, whole)
    assert found == {"itl_p99_ratio": 4.0, "itl_max_ratio": 5.0, "throughput_ratio": 0.9}
    text = verdict([whole | ratios(whole, whole), row | found])
    assert "ITL p99 4.00 times lower (wanted of a real model: 3 times lower)" in text
    assert text.endswith("throughput 0.900 of theirs (wanted: 0.9).")
    blind = whole | {"itl_ms": {"p99": 25.8, "max": 700.0}}  # interpolated: at 1 % it sees next to nothing
    text = verdict([blind | ratios(blind, blind), row | ratios(row, blind)])
    assert "1.0% of the steps held a prompt, too few for the p99" in text
    assert "ITL p99 5.81 times higher" in text
    assert "longest gap is 5.00 times shorter" in text
    assert text.endswith("at a lower --interval or a higher --decode-prompt-len.")
    assert verdict([whole | ratios(whole, whole)]) == "Budget 128: not measured."


def run(folder, *arguments):
    small = ["--dtype=float32", "--decodes=2", "--prompt-len=60", "--interval=0.05", "--attention=torch"]
    return CliRunner().invoke(main, ["--out", str(folder), "--quick", "--seconds", "0.3", *small, *arguments])


def test_the_command_writes_rows_and_a_picture(tmp_path):
    result = run(tmp_path / "new", "--budgets", "128, 16")
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "new" / "chunked_prefill.json").read_text())
    assert (found["model"], found["dtype"], found["attention"]) == (MODEL, "float32", "torch")
    assert found["device"].startswith("CPU")
    assert found["load"] == {
        "num_decodes": 2, "decode_prompt_len": 32, "prompt_len": 60,
        "max_tokens": 16, "interval": 0.05, "seconds": 0.3,
    }  # fmt: skip
    assert [row["max_num_batched_tokens"] for row in found["rows"]] == [None, 128, 16]
    assert [row["scheduler"] for row in found["rows"]] == ["continuous", "chunked", "chunked"]
    for row in found["rows"]:
        assert row["answered"] <= row["arrived"] <= 5
        assert row["input_tokens"] <= 60 * 5
        assert row["output_tokens"] >= row["answered"]
    assert found["rows"][2]["largest_step"] <= 16
    assert found["rows"][1]["largest_step"] <= 128
    assert (tmp_path / "new" / "chunked_prefill.png").read_bytes().startswith(b"\x89PNG")
    assert "whole prompts" in result.stdout
    assert result.stdout.splitlines()[-1] == verdict(found["rows"])


def test_a_run_that_is_interrupted_keeps_the_points_it_has(tmp_path, monkeypatch):
    rows = iter([measure])

    def twice(llm, load):
        return next(rows)(llm, load)  # StopIteration the second time

    monkeypatch.setattr(chunked_prefill, "measure", twice)
    assert run(tmp_path).exit_code == 1
    found = json.loads((tmp_path / "chunked_prefill.json").read_text())
    assert [row["max_num_batched_tokens"] for row in found["rows"]] == [None]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--budgets", "64,64"], "'64,64' is not possible: give whole numbers"),
        (["--budgets", "64,"], "give whole numbers from 1 on"),
        (["--budgets", "0"], "give whole numbers from 1 on"),
        (["--seconds", "0"], "0.0 is not in the range x>0"),
        (["--interval", "0.3"], "Nothing arrives"),
        (["--interval", "nan"], "nan is not possible: it must be a finite number"),
        (["--seconds", "nan"], "nan is not possible: it must be a finite number"),
        (["--seconds", "inf"], "inf is not possible: it must be a finite number"),
        (["--interval", "1e-9"], "More than 100,000 prompts would arrive"),
        (["--decodes", "0"], "0 is not in the range x>=1"),
        (["--decode-prompt-len", "0"], "0 is not in the range x>=1"),
        (["--decode-prompt-len", "9000"], "decode_prompt_len=9000 is not possible"),
        (["--attention", "magic"], "attention='magic' is not possible"),
        (["--dtype", "int8"], "is not one of"),
        (["--prompt-len", "2000"], "The prompt has 2000 tokens"),
        (["--model", "random:huge"], "huge"),
    ],
    ids=lambda value: value[0].strip("-") + "=" + value[1] if isinstance(value, list) else "",
)
def test_what_cannot_be_is_refused_by_name(tmp_path, arguments, message):
    result = run(tmp_path, *arguments)
    assert result.exit_code != 0
    assert message in result.output
    assert "Traceback" not in result.output


def a_row(budget, p99, rate, grew=False):
    itl = {"p50": 40.0, "p99": p99}
    return {"max_num_batched_tokens": budget, "itl_ms": itl, "tok_s": rate, "queue_grew": grew}


def hand_made(*rows):
    about = {"model": "m", "dtype": "float32", "attention": "torch", "device": "CPU x", "date": "2026-12-01"}
    return {**about, "load": {"num_decodes": 8, "prompt_len": 700, "interval": 2.0}, "rows": list(rows)}


def drawn(ax: Any) -> dict[str, dict[float, float]]:
    """The lines of a chart by name, x -> y."""
    return {line.get_gid(): dict(line.get_xydata().tolist()) for line in ax.lines}


def test_the_picture_has_both_curves_and_the_lines_of_whole_prompts():
    rows = [a_row(None, 900.0, 500.0), a_row(64, 90.0, 410.0), a_row(2048, 800.0, 490.0, grew=True)]
    figure = draw_chunked_prefill(hand_made(*rows))
    above, below = figure.axes
    assert drawn(above)["p99"] == {64: 90.0, 2048: 800.0}
    assert drawn(above)["p50"] == {64: 40.0, 2048: 40.0}
    assert set(drawn(above)["level whole prompts, p99"].values()) == {900.0}
    assert drawn(below)["tokens/s"] == {64: 410.0, 2048: 490.0}
    assert set(drawn(below)["level whole prompts"].values()) == {500.0}
    assert [tick.get_text() for tick in below.get_xticklabels()] == ["64", "2k"]
    assert "piled up" in below.get_xlabel()
    title = figure.get_suptitle()
    assert all(text in title.replace("\n", " ") for text in ("float32", "CPU x", "2026-12-01"))


@pytest.mark.parametrize(
    "rows", [[], [a_row(None, None, None)], [a_row(64, 9.0, 1.0)]], ids=["none", "whole", "one"]
)
def test_a_run_that_was_interrupted_can_be_drawn(rows, tmp_path):
    figure = draw_chunked_prefill(hand_made(*rows))
    figure.savefig(tmp_path / "picture.png")
    texts = [text.get_text() for ax in figure.axes for text in ax.texts]
    assert ("not measured yet" in texts) == (not rows or rows[0]["max_num_batched_tokens"] is None)
