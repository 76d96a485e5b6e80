"""What the host does in a step: the parts are counted and add up, no time is asserted."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner

from minivllm import LLM
from minivllm.lab import host_cost
from minivllm.lab.host_cost import cases, host_share, main
from minivllm.lab.host_step import HostStep, add_requests, host_step, still_engine
from minivllm.model.paged_batches import PagedBatches


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_a_step_without_a_model_is_a_whole_step_of_the_real_engine(prefix_cache):
    llm = still_engine(5, 100, 3, prefix_cache)
    scheduler = llm.engine.scheduler
    assert isinstance(llm.engine.pack, PagedBatches)
    before = [request.num_tokens for request in scheduler.running]
    found = host_step(llm, 17)
    assert [request.num_tokens for request in scheduler.running] == [n + 17 for n in before]
    assert len(scheduler.waiting) == 3
    llm.engine.manager.check_integrity()
    outputs = llm.step()
    assert [o.outputs[0].text for o in outputs] == ["a" * 19] * 5
    parts = vars(found)
    assert all(value > 0 for value in parts.values())
    assert parts.pop("step_us") > max(parts.values())


def test_not_all_sequences_begin_a_block_in_the_same_step():
    llm = still_engine(32, 1000)
    lengths = {request.num_tokens % 16 for request in llm.engine.scheduler.running}
    assert len(lengths) == 16


def test_each_curve_changes_one_number():
    for column, name in enumerate(("running", "pool", "waiting")):
        rows = cases([name])
        assert len({row[column] for row in rows}) == len(rows) > 3
        assert all(len({row[other] for row in rows}) == 1 for other in {0, 1, 2} - {column})
    assert cases(["running", "waiting"]) == cases(["running"]) + cases(["waiting"])


def test_the_command_prints_a_line_for_each_case(monkeypatch):
    monkeypatch.setattr(host_cost, "RUNNING", (1, 3))
    result = CliRunner().invoke(main, ["--by", "running", "--steps", "3"])
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in result.output.splitlines()]
    assert [(line["running"], line["waiting"]) for line in lines] == [(1, 0), (3, 0)]
    for line in lines:
        assert line.keys() >= {"num_blocks", "us_per_request", *HostStep.__dataclass_fields__}
        assert line["us_per_request"] == pytest.approx(line["step_us"] / line["running"], abs=0.01)


def test_the_share_of_a_real_models_steps_is_below_one():
    result = CliRunner().invoke(main, ["--model", "random:tiny-llama", "--running", "3", "--steps", "4"])
    assert result.exit_code == 0, result.output
    line = json.loads(result.output)
    assert line["running"] == 3
    assert 0 < line["host_us"] < line["step_us"]
    assert line["share"] == pytest.approx(line["host_us"] / line["step_us"], abs=1e-3)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--model", "nosuch"], "No model is called 'nosuch'"),
        (["--model", "random:tiny-llama", "--device", "foo"], "foo"),
        (["--model", "random:tiny-llama", "--temperature", "nan"], "it must be a finite number"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_what_cannot_be_measured_is_refused_in_a_line(options, said):
    result = CliRunner().invoke(main, options)
    assert result.exit_code in (1, 2)
    assert said in result.output
    assert not isinstance(result.exception, ValueError)
    assert result.output.splitlines()[-1].startswith("Error: ")


def test_only_decode_steps_are_counted_and_the_model_is_not_among_the_hosts_work():
    llm = LLM("random:tiny-llama", max_num_seqs=4, num_blocks=64, max_num_batched_tokens=5, dtype="float32")
    forward = llm.engine.forward or llm.engine.model
    sizes: list[int] = []

    def counted(batch: Any, store: Any) -> Any:
        sizes.append(batch.num_tokens)
        return forward(batch, store)

    llm.engine.forward = counted
    found = host_share(llm, 4, 6, temperature=1)
    assert sizes[-6:] == [4] * 6
    assert sizes[0] == 5
    assert found["host_us"] > 0


def test_requests_differ(monkeypatch):
    llm = LLM("random:tiny-llama", num_blocks=64, dtype="float32")
    add_requests(llm, 20, prompt_len=1)
    waiting = list(llm.engine.scheduler.waiting)
    assert {len(request.prompt_token_ids) for request in waiting} == set(range(1, 17))
