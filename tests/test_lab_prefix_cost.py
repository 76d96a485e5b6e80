"""What a prefix cache costs is measured as time inside it: the parts are counted, no time is asserted."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from minivllm.lab.prefix_cost import Stopwatch, main


class Slow:
    def work(self, n: int) -> int:
        if n < 0:
            raise ValueError(n)
        return n + 1


def test_a_stopwatch_changes_nothing_but_counts():
    slow = Slow()
    watch = Stopwatch(slow, ("work",))
    assert watch.seconds == 0
    assert [slow.work(n) for n in (1, 5)] == [2, 6]
    after = watch.seconds
    assert after > 0
    with pytest.raises(ValueError, match="-3"):
        slow.work(-3)
    assert watch.seconds > after


def test_the_command_prints_a_share_for_each_index():
    sizes = ["--num-requests", "3", "--shared", "32", "--own", "5", "--max-tokens", "2"]
    result = CliRunner().invoke(main, ["--model", "random:tiny-llama", "--dtype", "float64", *sizes])
    assert result.exit_code == 0, result.output
    found = [json.loads(line) for line in result.output.splitlines()]
    assert [f["index"] for f in found] == ["hash", "radix"]
    for f in found:
        assert 0 < f["inside_seconds"] < f["step_seconds"]
        assert f["share"] == pytest.approx(f["inside_seconds"] / f["step_seconds"], abs=1e-6)
        assert f["token_hit_rate"] == 0, "all three were computed in one step: nothing was there yet"
