"""Growth curves: what each point computes, which points are left out and why, what is written and drawn."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from minivllm.errors import InvalidOption
from minivllm.lab import growth_curves
from minivllm.lab.draw_curves import draw_growth
from minivllm.lab.draw_panels import Panel, draw_panels
from minivllm.lab.growth import as_text, main
from minivllm.lab.growth_points import ForwardWatch, blocks_needed, decode_point, fill_pool
from minivllm.llm import LLM
from minivllm.params import SamplingParams

MODEL = "random:tiny-llama"


def test_a_point_is_decode_steps_of_all_requests_at_this_context():
    """Four requests of 50 tokens in the end: the prompt, and four tokens of output."""
    size = blocks_needed(4, 50, 16)
    assert size == 16
    with LLM(MODEL, dtype="float32", num_blocks=size, watermark=0.0) as llm:
        llm.engine.store.kv.fill_(float("nan"))  # type: ignore[attr-defined]
        fill_pool(llm, size)
        steps: list[Any] = []
        llm.engine.on_step = steps.append
        row = decode_point(llm, 4, 50, num_steps=3)
        assert llm.engine.manager.snapshot().held == 0
        again = decode_point(llm, 2, 9, num_steps=3)  # the pool serves the next point as well
    assert set(row) == set(again) == {"step_ms", "host_ms", "tok_s"}
    assert 0 < row["host_ms"] < row["step_ms"]
    assert row["tok_s"] == pytest.approx(4e3 / row["step_ms"])
    assert len(steps) == 4 + 4
    for i, step in enumerate(steps[:4]):  # nothing but the last token of each prompt is computed
        assert [(p.num_computed_tokens, p.num_new_tokens) for p in step.scheduled] == [(45 + i, 1)] * 4


def test_the_watch_counts_the_forward_pass_and_gives_its_logits():
    with LLM(MODEL, dtype="float32") as llm:
        greedy = SamplingParams(temperature=0)
        plain = llm.generate([[5, 6, 7]], greedy, use_tqdm=False)[0].outputs[0].token_ids
        watch = ForwardWatch(llm)
        assert llm.engine.forward is watch
        assert watch.seconds == 0
        seen: list[float] = []
        llm.engine.on_step = lambda step: seen.append(watch.seconds)
        assert llm.generate([[5, 6, 7]], greedy, use_tqdm=False)[0].outputs[0].token_ids == plain
    assert seen == sorted(set(seen))
    assert seen[0] > 0


def test_the_pool_is_filled_to_where_it_was_asked():
    with LLM(MODEL, dtype="float32", num_blocks=9) as llm:
        pool = llm.engine.store.kv.fill_(float("nan"))  # type: ignore[attr-defined]
        fill_pool(llm, 5)
        assert pool[:5].isfinite().all()
        assert pool[5:].isnan().all()
        assert torch.equal(pool[4], pool[0])
        assert pool[0].std() > 0.5


POINTS = ("--running=2,1,3", "--contexts=16,40,2000", "--pools=1024,2048", "--context=24")


def run(folder, *arguments):
    options = ["--quick", "--dtype=float32", "--attention=torch"]
    return CliRunner().invoke(main, ["--out", str(folder), *options, *arguments])


def test_the_command_writes_each_point_and_says_which_were_left_out(tmp_path):
    result = run(tmp_path, *POINTS, "--num-steps", "2")
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "growth.json").read_text())
    assert (found["model"], found["dtype"], found["attention"]) == (MODEL, "float32", "torch")
    assert (found["pool_model"], found["num_steps"], found["block_size"]) == ("random:tiny-qwen2", 2, 16)
    assert [(r["running"], r["context"]) for r in found["by_running"]] == [(2, 24), (1, 24), (3, 24)]
    assert [(r["running"], r["context"]) for r in found["by_context"]] == [(8, 16), (8, 40), (8, 2000)]
    assert [r["num_blocks"] for r in found["by_pool"]] == [1024, 2048]
    assert found["by_context"][2]["skipped"] == "the model's longest context is 1024"
    timed = [*found["by_running"], *found["by_context"][:2], *found["by_pool"]]
    for row in timed:
        assert 0 < row["host_ms"] < row["step_ms"]
        assert row["tok_s"] == pytest.approx(1e3 * row["running"] / row["step_ms"], rel=1e-3)
    assert all(row["schedule_ms"] > 0 for row in found["by_pool"])
    assert (tmp_path / "growth.png").read_bytes().startswith(b"\x89PNG")
    assert "context 2000 left out: the model's longest context is 1024." in result.stdout


def test_what_has_no_room_in_memory_is_left_out(tmp_path):
    """tiny-llama has 672 bytes a token in float32: 10,752 a block. Three requests of 24 tokens take six."""
    few = ["--running=2,1,3", "--contexts=16,40", "--pools=1024", "--context=24", "--num-seqs=2"]
    result = run(tmp_path, *few, "--kv-cache-memory-bytes", str(5 * 10_752))
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "growth.json").read_text())
    assert ["skipped" in row for row in found["by_running"]] == [False, False, True]
    assert found["by_running"][2]["skipped"] == "needs 63 KiB of memory; 52.5 KiB may be taken"
    assert ["skipped" in row for row in found["by_context"]] == [False, True]
    (row,) = found["by_pool"]
    assert row["skipped"].startswith("needs 2 MiB of memory")
    assert row["schedule_ms"] > 0, "the books alone need no room"
    assert "step_ms" not in row


def test_a_pool_whose_books_alone_have_no_room_is_left_out(tmp_path):
    few = ["--running=1", "--contexts=16", f"--pools={10**20}", "--context=24", "--num-seqs=1"]
    result = run(tmp_path, *few)
    assert result.exit_code == 0, result.output
    (row,) = json.loads((tmp_path / "growth.json").read_text())["by_pool"]
    assert row["skipped"].startswith("its books need 18626451492310 GiB of memory")
    assert "schedule_ms" not in row
    assert "its books need" in result.output
    assert (tmp_path / "growth.png").exists()


@pytest.mark.parametrize("name", ["growth.json", "growth.png"])
def test_a_folder_in_the_place_of_a_file_is_refused_at_the_start(tmp_path, name):
    (tmp_path / name).mkdir()
    result = run(tmp_path, *POINTS)
    assert result.exit_code == 1
    assert f"--out {tmp_path} is not possible: growth.json and .png cannot be written there" in result.output
    assert "ms a step" not in result.output, "before anything is measured"


def test_a_point_that_would_begin_too_late_is_left_out(tmp_path):
    assert run(tmp_path, *POINTS, "--minutes", "0").exit_code == 0
    found = json.loads((tmp_path / "growth.json").read_text())
    rows = [*found["by_running"], *found["by_context"][:2], *found["by_pool"]]
    assert {row["skipped"] for row in rows} == {"0 minutes were over"}
    assert (tmp_path / "growth.png").exists()


def test_a_run_that_is_interrupted_keeps_the_points_it_has(tmp_path, monkeypatch):
    calls: list[int] = []

    def once(llm, n, context, num_steps):
        calls.append(n)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return decode_point(llm, n, context, num_steps)

    monkeypatch.setattr(growth_curves, "decode_point", once)
    assert run(tmp_path, *POINTS).exit_code != 0
    found = json.loads((tmp_path / "growth.json").read_text())
    assert [row["running"] for row in found["by_running"]] == [2]
    assert calls == [2, 1]
    draw_growth(found)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--running", "1,x"], "'1,x' is not possible: give whole numbers"),
        (["--contexts", "16,16"], "each once"),
        (["--pools", "1000,2048"], "1000 is not possible: it must be at least 1024"),
        (["--context", "6"], "6 is not possible: it must be at least 7"),
        (["--contexts", "64,8", "--num-steps", "7"], "8 is not possible: it must be at least 9"),
        (["--num-steps", "0"], "0 is not in the range x>=1"),
        (["--attention", "magic"], "attention='magic' is not possible"),
        (["--kv-cache-memory-bytes", "0"], "0 is not in the range"),
        (["--minutes", "nan"], "nan is not possible: it must be a finite number"),
    ],
    ids=lambda value: "".join(value[:2]).strip("-") if isinstance(value, list) else "",
)
def test_what_cannot_be_is_refused_by_name(tmp_path, arguments, message):
    result = run(tmp_path, *arguments)
    assert result.exit_code != 0
    assert message in result.output
    assert "Traceback" not in result.output


HAND_MADE = {
    "model": "m", "dtype": "bfloat16", "attention": "c", "device": "CPU y", "date": "2026-12-02",
    "pool_model": "random:tiny-qwen2",
    "by_running": [
        {"running": 1, "context": 128, "step_ms": 20.0, "host_ms": 1.0, "tok_s": 50.0},
        {"running": 64, "context": 128, "step_ms": 80.0, "host_ms": 4.0, "tok_s": 800.0},
        {"running": 512, "context": 128, "skipped": "needs 3 GiB of memory; 1 GiB may be taken"},
    ],
    "by_context": [
        {"running": 8, "context": 128, "step_ms": 30.0, "host_ms": 2.0, "tok_s": 266.7},
        {"running": 8, "context": 8192, "step_ms": 300.0, "host_ms": 2.5, "tok_s": 26.7},
    ],
    "by_pool": [
        {"num_blocks": 1024, "running": 64, "step_ms": 5.0, "host_ms": 3.0, "schedule_ms": 0.5},
        {"num_blocks": 2**20, "running": 64, "schedule_ms": 0.6, "skipped": "needs 2 GiB"},
    ],
}  # fmt: skip


def drawn(ax: Any) -> dict[str, dict[float, float]]:
    """The lines of a chart by name, x -> y."""
    return {line.get_gid(): dict(line.get_xydata().tolist()) for line in ax.lines}


def test_the_picture_has_three_panels_with_logarithmic_axes():
    figure = draw_growth(HAND_MADE)
    running, context, pool, rate = figure.axes  # the second axis of the first comes last, or as it was made
    if "output tokens/s" in drawn(context):
        context, pool, rate = pool, rate, context
    assert drawn(running) == {"step": {1: 20.0, 64: 80.0}, "of it on the host": {1: 1.0, 64: 4.0}}
    assert drawn(rate) == {"output tokens/s": {1: 50.0, 64: 800.0}}
    assert drawn(context)["step"] == {128: 30.0, 8192: 300.0}
    assert drawn(pool)["the scheduler alone"] == {1024: 0.5, 2**20: 0.6}
    assert drawn(pool)["step"] == {1024: 5.0}
    for ax in (running, context, pool):
        assert (ax.get_xscale(), ax.get_yscale(), ax.get_ylabel()) == ("log", "log", "milliseconds")
    assert rate.get_yscale() == "log"
    assert rate.get_ylabel() == "output tokens/s"
    assert "128 tokens each" in running.get_xlabel()
    assert "left out: 512" in running.get_xlabel()
    assert [t.get_text() for t in pool.get_xticklabels()] == ["1k", "1M"]
    assert figure.get_size_inches()[0] <= 4.8, "narrow, so that it can be read at 390 pixels"
    title = figure.get_suptitle().replace("\n", " ")
    assert all(text in title for text in ("bfloat16", "attention c", "CPU y", "2026-12-02"))


def test_a_picture_of_nothing_says_so():
    about = {k: v for k, v in HAND_MADE.items() if not k.startswith("by_")}
    figure = draw_growth(about)
    texts = [text.get_text() for ax in figure.axes for text in ax.texts]
    assert texts.count("not measured yet") == 3


def test_the_tables_show_each_curve_and_what_was_left_out():
    text = as_text(HAND_MADE)
    assert "running 512 left out: needs 3 GiB of memory; 1 GiB may be taken." in text
    assert "num_blocks 1048576 left out: needs 2 GiB." in text
    assert "8,192" in text
    assert as_text({k: v for k, v in HAND_MADE.items() if k != "by_pool"})


def test_more_lines_than_can_be_told_apart_are_refused():
    panel = Panel("t", "x", "y", {str(i): {1: 1.0} for i in range(7)})
    with pytest.raises(InvalidOption, match="7 lines"):
        draw_panels([panel], "title")
