"""Chapter 0: when a sequence ends, and what a stop string leaves of its text."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm.decoding.stopping import StopStrings, finish_reason, stop_token_ids
from minivllm.params import SamplingParams

LETTERS = st.text("abn\n", min_size=1, max_size=4)


def reason(output: list[int], max_tokens: int = 9, **options) -> str | None:
    return finish_reason(output, SamplingParams(max_tokens=9, **options), (5, 6), max_tokens)


def test_a_sequence_ends_by_token_or_length_and_the_token_goes_first():
    assert reason([1, 2]) is None
    assert reason([1, 5]) == reason([6]) == "stop"
    assert reason([5, 1]) is None, "only the last token counts"
    assert reason([1, 7], stop_token_ids=[7]) == "stop"
    assert reason([1, 2], max_tokens=2) == "length"
    assert reason([1, 5], max_tokens=2) == "stop"


def test_ignore_eos_leaves_the_callers_own_stop_tokens():
    assert reason([1, 5], ignore_eos=True) is None
    assert reason([1, 5], ignore_eos=True, stop_token_ids=[5]) == "stop"
    assert stop_token_ids(SamplingParams(stop_token_ids=[7, 8]), (5,)) == (7, 8, 5)
    assert stop_token_ids(SamplingParams(stop_token_ids=[7], ignore_eos=True), (5,)) == (7,)


def test_nothing_stops_within_min_tokens():
    assert reason([1, 5], min_tokens=2) is None
    assert reason([1, 2, 5], min_tokens=2) == "stop"
    assert reason([1, 7], min_tokens=2, stop_token_ids=[7]) is None


@given(pieces=st.lists(st.text("abn\n", max_size=4), max_size=12), stop=st.lists(LETTERS, max_size=3))
def test_the_text_ends_where_the_first_stop_string_begins_and_no_stream_shows_more(pieces, stop):
    checker, shown = StopStrings(stop), [""]
    for n, piece in enumerate(pieces, start=1):
        so_far = "".join(pieces[:n])
        begins = {s: so_far.find(s) for s in stop if s in so_far}
        found = checker.add(piece)
        shown.append(checker.text)
        if begins:
            first = [s for s, at in begins.items() if at == min(begins.values())]
            assert found == min(first, key=len), "of two that begin at one place the one that ends first"
            assert checker.text == so_far[: min(begins.values())]
            break
        assert found is None
        assert so_far.startswith(checker.text)
        held = so_far[len(checker.text) :]
        assert held == "" or any(s.startswith(held) for s in stop), "only what may become a stop is held back"
    else:
        checker.flush()
        assert checker.text == "".join(pieces)
    assert all(checker.text.startswith(earlier) for earlier in shown), "what was shown is never taken back"


def test_a_stop_string_that_spans_two_tokens_is_found():
    checker = StopStrings(["</s>"])
    assert [checker.add(piece) for piece in ("yes", "<", "/", "s> and more")] == [None, None, None, "</s>"]
    assert checker.text == "yes"


def test_a_beginning_that_comes_to_nothing_is_given_out():
    checker = StopStrings(["aab"])
    seen = []
    for piece in "aaab":
        stop = checker.add(piece)
        seen.append(checker.text)
    assert seen == ["", "", "a", "a"]
    assert stop == "aab"


def test_text_within_min_tokens_is_no_part_of_a_stop():
    checker = StopStrings(["ab"])
    assert checker.add("xab a", may_stop=False) is None
    assert checker.add("b") is None
    assert checker.text == "xab ab"
    assert checker.add("ab") == "ab"


@pytest.mark.parametrize(
    "options",
    [
        {"stop": ""},
        {"stop": ["a", ""]},
        {"stop": [1]},
        {"stop": b"a"},
        {"stop": 7},
        {"stop_token_ids": [-1]},
        {"stop_token_ids": [1.0]},
        {"stop_token_ids": [True]},
        {"stop_token_ids": "12"},
        {"stop_token_ids": 3},
        {"min_tokens": -1},
        {"min_tokens": 17},
        {"min_tokens": None},
        {"logprobs": -1},
        {"logprobs": True},
        {"presence_penalty": 2.1},
        {"presence_penalty": float("nan")},
        {"frequency_penalty": -2.1},
        {"frequency_penalty": "1"},
        {"repetition_penalty": 0},
        {"repetition_penalty": float("inf")},
        {"logit_bias": [1]},
        {"logit_bias": {1: 101}},
        {"logit_bias": {-1: 1}},
        {"logit_bias": {"1": 1}},
        {"logit_bias": {1: float("nan")}},
    ],
    ids=str,
)
def test_an_option_outside_its_range_is_refused_by_name(options):
    with pytest.raises(ValueError, match=f"^{next(iter(options))}="):
        SamplingParams(**options)


def test_what_a_caller_hands_in_is_copied():
    stop, bias = ["x"], {1: 2.0}
    params = SamplingParams(stop=stop, logit_bias=bias, stop_token_ids=iter([3, 4]))
    stop.append("y")
    bias[2] = 3.0
    assert (params.stop, params.logit_bias, params.stop_token_ids) == (("x",), {1: 2.0}, (3, 4))
    assert SamplingParams(stop="end").stop == ("end",)
    nothing: dict[str, Any] = {"stop": None, "stop_token_ids": None, "logit_bias": None}
    assert SamplingParams(**nothing) == SamplingParams()
    assert len({params, SamplingParams()}) == 2, "params can be a key"


def test_after_its_end_a_checker_repeats_nothing():
    checker = StopStrings(["ab"])
    checker.add("xa")
    checker.flush()
    checker.flush()
    assert checker.text == "xa"
    checker = StopStrings(["ab"])
    assert checker.add("xabya") == "ab"
    checker.flush()
    assert checker.text == "x"
