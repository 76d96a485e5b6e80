"""Pictures that compare: the plain data of throughput, and what stands on the figures."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from io import BytesIO
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from minivllm import lab
from minivllm.lab.draw_results import NOT_MEASURED, _text
from minivllm.lab.throughput import tokens_over_time, window_for
from minivllm.step import ScheduledRequest, Step


def a_run(*steps: tuple[float, float, int]) -> list[Step]:
    """Steps of (start, end, requests in it)."""
    return [
        Step(i, start, end, tuple(ScheduledRequest(k, 0, 3) for k in range(n)))
        for i, (start, end, n) in enumerate(steps)
    ]


RUN = a_run((50, 52, 4), (53, 54, 3), (54, 54.5, 1))  # 8 tokens in 4.5 s
RUNS = st.lists(
    st.tuples(st.floats(0, 2), st.floats(0.001, 3), st.integers(0, 9)), min_size=1, max_size=20
).map(lambda parts: a_run(*_in_order(parts)))


def _in_order(parts: list[tuple[float, float, int]]) -> list[tuple[float, float, int]]:
    at, found = 70.0, []
    for gap, length, n in parts:
        found.append((at + gap, at + gap + length, n))
        at += gap + length
    return found


def png(figure: Figure) -> bytes:
    """Every pixel is drawn; a warning, as of a layout that fails or a missing letter, is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure.savefig(file := BytesIO(), format="png")
    assert len(file.getvalue()) < 100_000
    assert figure.get_size_inches()[0] * figure.dpi == 700
    return file.getvalue()


def drawn(figure: Figure, gid: str) -> Any:
    (found,) = [a for ax in figure.axes for a in (*ax.lines, *ax.patches) if a.get_gid() == gid]
    return found


def patches(figure: Figure) -> list[Any]:
    return list(figure.axes[0].patches)


def values_of(figure: Figure) -> list[str]:
    return [t.get_text() for t in figure.axes[0].texts if t.get_gid() == "value" and t.get_text()]


# --- throughput: data ---


def test_tokens_come_evenly_within_a_step_and_none_between_steps():
    found = tokens_over_time(RUN)
    assert found.times == (0, 2, 3, 4, 4, 4.5)
    assert found.counts == (0, 4, 4, 7, 7, 8)
    assert (found.tokens, found.seconds, found.mean_rate) == (8, 4.5, 8 / 4.5)
    at = {-1: 0, 0: 0, 1: 2, 2: 4, 2.5: 4, 3.5: 5.5, 4: 7, 4.25: 7.5, 4.5: 8, 9: 8}
    assert {time: found.count_at(time) for time in at} == at


def test_a_chunk_gives_no_token_and_a_group_that_parts_gives_several():
    steps = [
        Step(0, 0.0, 1.0, (ScheduledRequest(0, 0, 9, 0),)),
        Step(1, 1.0, 2.0, (ScheduledRequest(0, 9, 3, 4), ScheduledRequest(1, 0, 2, 1))),
    ]
    assert tokens_over_time(steps).counts == (0, 0, 0, 5)


def test_the_last_window_is_cut_at_the_end_of_the_run():
    found = tokens_over_time(RUN)
    assert found.rates(1) == ([0, 1, 2, 3, 4, 4.5], [2, 2, 0, 3, 2])
    edges, rates = found.rates(1.5)
    assert edges == [0, 1.5, 3, 4.5], "none left over"
    assert rates == pytest.approx([2, 1 / 1.5, 4 / 1.5])
    assert found.rates(100) == ([0, 4.5], [8 / 4.5])


@given(steps=RUNS, window=st.floats(0.05, 8))
def test_the_rates_of_all_windows_add_up_to_all_tokens(steps, window):
    found = tokens_over_time(steps)
    edges, rates = found.rates(window)
    lengths = [b - a for a, b in pairwise(edges)]
    assert sum(r * x for r, x in zip(rates, lengths, strict=True)) == pytest.approx(found.tokens, abs=1e-6)
    assert edges[0] == 0
    assert edges[-1] == pytest.approx(found.seconds, rel=1e-6)
    assert all(0 < length <= window * (1 + 1e-6) for length in lengths)
    assert found.tokens == sum(len(step.scheduled) for step in steps)


@pytest.mark.parametrize(
    ("seconds", "window"),
    [(30, 1), (30.1, 2), (45, 2), (60, 2), (150, 5), (151, 10), (3, 0.1), (0.0031, 0.0002)],
)
def test_windows_are_round_and_about_thirty(seconds, window):
    assert window_for(seconds) == pytest.approx(window)


# --- throughput: picture ---


def test_throughput_shows_tokens_so_far_and_rates_and_names_both_in_numbers():
    runs = {"paged": RUN, "naive, $8": a_run((0, 9, 8))}
    figure = lab.draw_throughput(runs)
    line, stairs = drawn(figure, "tokens paged"), drawn(figure, "rate paged")
    assert list(line.get_xdata()) == [0, 2, 3, 4, 4, 4.5]
    assert list(line.get_ydata()) == [0, 4, 4, 7, 7, 8]
    assert [list(a) for a in stairs.get_data()[:2]] == [
        pytest.approx(x) for x in reversed(tokens_over_time(RUN).rates(0.5))
    ]
    assert list(drawn(figure, "end naive, $8").get_xdata()) == [9]
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["paged: 8 tokens, 1.78 tokens/s", "naive, $8: 8 tokens, 0.889 tokens/s"]
    assert [ax.get_ylabel() for ax in figure.axes] == [
        "output tokens so far",
        "output tokens/s\nin windows of 0.5 s",
    ]
    assert figure.axes[1].get_xlabel() == "time since the run's first step (s)"
    assert png(figure) == png(lab.draw_throughput(runs)), "the same data, the same picture"


def test_short_runs_are_drawn_in_milliseconds():
    figure = lab.draw_throughput({"a": a_run((0, 0.4, 3), (0.4, 0.6, 5))})
    assert list(drawn(figure, "tokens a").get_xdata()) == pytest.approx([0, 400, 400, 600])
    assert figure.axes[1].get_ylabel() == "output tokens/s\nin windows of 20 ms"
    png(figure)


def test_runs_differ_in_more_than_colour_and_many_long_names_have_room():
    runs = {f"the run number {i} with a name of several words": RUN for i in range(7)}
    figure = lab.draw_throughput(runs)
    lines = [drawn(figure, f"tokens {name}") for name in runs]
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == 7
    assert lines[0].get_linestyle() != lines[1].get_linestyle()
    png(figure)
    box = figure.legends[0].get_window_extent()
    assert 0 <= box.x0 < box.x1 <= 700


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ({}, "at least one run"),
        ({"a": RUN, "b": []}, "The run 'b': There are no steps"),
        ({"c": a_run((5, 5, 3))}, "The run 'c': The steps took no time"),
    ],
    ids=["none", "empty", "no-time"],
)
def test_throughput_of_nothing_is_refused(runs, message):
    with pytest.raises(ValueError, match=message):
        lab.draw_throughput(runs)


# --- bars ---


def test_each_bar_is_as_long_as_its_value_which_stands_beside_it():
    figure = lab.draw_bars({"Orca (Max)": 20.4, "vLLM": 96.3, "n": 1234, "zero": 0}, unit="%", title="Used")
    (ax,) = figure.axes
    bars = sorted(patches(figure), key=lambda p: p.get_y())
    assert [bar.get_width() for bar in bars] == [20.4, 96.3, 1234, 0]
    assert values_of(figure) == ["20.4", "96.3", "1,234", "0"]
    assert [t.get_text() for t in ax.get_yticklabels()] == ["Orca (Max)", "vLLM", "n", "zero"]
    assert ax.yaxis_inverted(), "the first at the top"
    assert ax.get_xlabel() == "%"
    assert figure.get_suptitle() == "Used"
    assert not figure.legends
    png(figure)


def test_bars_of_a_name_stand_below_each_other_and_differ_in_hatching():
    values: Mapping[str, Mapping[str, float | None]] = {
        "Orca": {"published": 7.0, "ours": 7},
        "vLLM": {"published": 30.42, "ours": None},
        "new": {"ours": 3},
    }
    figure = lab.draw_bars(values, unit="requests", title="Batch", form=".2f")
    (ax,) = figure.axes
    found = {(round(p.get_y() + p.get_height() / 2, 2), p.get_gid()): p.get_width() for p in patches(figure)}
    assert found == {
        (-0.19, "bar published"): 7.0, (0.19, "bar ours"): 7,
        (0.81, "bar published"): 30.42, (1.19, "bar ours"): 0,
        (2.19, "bar ours"): 3,
    }  # fmt: skip
    assert values_of(figure) == ["7.00", "7.00", "30.42", NOT_MEASURED, "3.00"]
    hatch = {patch.get_gid(): patch.get_hatch() for patch in ax.patches}
    assert hatch["bar published"] != hatch["bar ours"]
    assert [t.get_text() for t in figure.legends[0].get_texts()] == ["published", "ours"]
    png(figure)


def test_stacked_bars_follow_each_other_and_narrow_ones_are_named_behind():
    values = {
        "Max": {"tokens": 20.4, "reserved": 13.3, "internal": 57.3},
        "vLLM": {"tokens": 96.3, "reserved": 0, "internal": 3.4},
    }
    figure = lab.draw_bars(values, unit="% of KV memory", title="Held", stacked=True)
    (ax,) = figure.axes
    left = [(round(p.get_x(), 6), round(p.get_width(), 6)) for p in patches(figure) if p.get_y() < 0]
    assert left == [(0, 20.4), (20.4, 13.3), (33.7, 57.3)]
    assert values_of(figure) == ["20.4", "13.3", "57.3", "96.3", "internal 3.4"]
    assert max(ax.get_xticks()) == 80, "no tick where there is only text"
    png(figure)


@pytest.mark.parametrize("stacked", [False, True])
def test_values_stay_on_the_picture(stacked):
    values = {
        f"a scheme with a long name, the number {i}": {f"part {k}": 10.0 ** (i - k) for k in range(3)}
        for i in range(4)
    }
    figure = lab.draw_bars(values, unit="$x_{", title="a title of many words " * 6, stacked=stacked)
    png(figure)
    for text in (*figure.axes[0].texts, *figure.axes[0].get_yticklabels(), *figure.texts):
        box = text.get_window_extent()
        assert not text.get_text() or 0 <= box.x0 < box.x1 <= 700, text.get_text()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "at least"),
        ({"a": {}}, "at least one value"),
        ({"a": 1, "b": {"c": 2}}, "name -> series -> value for every name"),
        ({"a": -1}, "a is -1: a bar needs a number of at least 0"),
        ({"a": {"b": float("nan")}}, "a b is nan"),
        ({"a": "7"}, "a is '7'"),
        ({"a": True}, "a is True"),
    ],
    ids=["none", "no-series", "mixed", "negative", "nan", "text", "bool"],
)
def test_what_is_no_bar_is_refused(values, message):
    with pytest.raises(ValueError, match=message):
        lab.draw_bars(values, unit="", title="")


@pytest.mark.parametrize(
    ("value", "text"), [(7, "7"), (0.12345, "0.123"), (132.44, "132"), (15728.4, "15,728"), (1e-5, "1e-05")]
)
def test_a_value_has_three_digits(value, text):
    assert _text(value) == text
