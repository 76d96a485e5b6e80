"""Chapter 0: penalties, bias and tokens ruled out, against Transformers and the formulas; logprobs."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import MinNewTokensLengthLogitsProcessor, RepetitionPenaltyLogitsProcessor

from minivllm.decoding.generate import generate
from minivllm.decoding.penalties import adjust
from minivllm.decoding.sampler import top_logprobs
from minivllm.errors import InvalidOption
from minivllm.memory.store import RecomputeStore
from minivllm.model.loader import load_model
from minivllm.outputs import RequestMetrics
from minivllm.params import SamplingParams

VOCAB = 23
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=9)


def logits_of(seed: int, rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3


@given(seed=st.integers(0, 999), prompt=TOKENS, output=TOKENS, penalty=st.sampled_from([0.5, 1.3, 7.0]))
def test_the_repetition_penalty_is_that_of_transformers_over_prompt_and_output(seed, prompt, output, penalty):
    logits = logits_of(seed)
    got = adjust(logits, [SamplingParams(repetition_penalty=penalty)], [prompt], [output], ())
    seen = torch.tensor([[*prompt, *output]], dtype=torch.int64)
    assert torch.equal(got, RepetitionPenaltyLogitsProcessor(penalty)(seen, logits.clone()))


@given(seed=st.integers(0, 999), prompt=TOKENS, output=TOKENS, left=st.integers(0, 12))
def test_min_tokens_rules_out_what_transformers_rules_out(seed, prompt, output, left):
    logits, eos = logits_of(seed), [3, 11]
    got = adjust(logits, [SamplingParams(min_tokens=left)], [prompt], [output], eos)
    theirs = MinNewTokensLengthLogitsProcessor(len(prompt), left, eos)
    ids = torch.tensor([[*prompt, *output]], dtype=torch.int64)
    assert torch.equal(got, theirs(ids, logits.clone()))


@given(
    seed=st.integers(0, 999),
    prompt=TOKENS,
    output=TOKENS,
    presence=st.sampled_from([-2.0, 0.0, 0.7]),
    frequency=st.sampled_from([-0.3, 0.0, 2.0]),
    bias=st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-100.0, 0.5, 100.0]), max_size=3),
)
def test_presence_and_frequency_count_the_output_alone(seed, prompt, output, presence, frequency, bias):
    """The formula of OpenAI's API: logit - count x frequency - (count > 0) x presence."""
    logits, count = logits_of(seed), Counter(output)
    params = SamplingParams(presence_penalty=presence, frequency_penalty=frequency, logit_bias=bias)
    got = adjust(logits, [params], [prompt], [output], ())
    for token in range(VOCAB):
        expected = logits[0, token].item() + bias.get(token, 0.0)
        expected -= count[token] * frequency + (count[token] > 0) * presence
        assert got[0, token].item() == pytest.approx(expected, abs=1e-12)


def test_bias_comes_before_the_repetition_penalty_and_the_other_penalties_after_it():
    params = SamplingParams(repetition_penalty=2.0, presence_penalty=1.0, logit_bias={0: 3.0})
    got = adjust(torch.ones(1, VOCAB), [params], [[]], [[0]], ())
    assert got[0, :2].tolist() == [(1 + 3) / 2 - 1, 1.0]


def test_the_callers_stop_tokens_are_ruled_out_too_and_its_ignored_ones_are_not():
    params = SamplingParams(min_tokens=2, stop_token_ids=[7], ignore_eos=True)
    ruled_out = adjust(torch.zeros(1, VOCAB), [params], [[1]], [[2]], (3,)).isinf().nonzero()[:, 1]
    assert ruled_out.tolist() == [7]
    assert not adjust(torch.zeros(1, VOCAB), [params], [[1]], [[2, 2]], (3,)).isinf().any()


def test_from_min_tokens_on_the_stop_tokens_are_free_also_beside_a_bias():
    for num_output, banned in ((0, True), (1, True), (2, False)):
        params = SamplingParams(min_tokens=2, logit_bias={9: 1.0})
        row = adjust(torch.zeros(1, VOCAB), [params], [[1]], [[4] * num_output], (3,))[0]
        assert bool(row[3].isinf()) is banned
    assert (
        not adjust(torch.zeros(1, VOCAB), [SamplingParams(logit_bias={9: 1.0})], [[1]], [[]], (3,))
        .isinf()
        .any()
    )


def test_rows_that_ask_for_nothing_stay_and_the_given_logits_are_not_touched():
    logits = logits_of(1, rows=3)
    before = logits.clone()
    params = [SamplingParams(), SamplingParams(logit_bias={4: 9.0}), SamplingParams()]
    got = adjust(logits, params, [[1]] * 3, [[4]] * 3, (3,))
    assert torch.equal(logits, before)
    assert torch.equal(got[[0, 2]], before[[0, 2]])
    assert (got - before).nonzero().tolist() == [[1, 4]]
    assert adjust(logits, [SamplingParams()] * 3, [[1]] * 3, [[4]] * 3, (3,)) is logits


def test_half_precision_is_widened_so_that_a_small_bias_counts():
    logits = torch.full((1, VOCAB), 100.0, dtype=torch.bfloat16)
    got = adjust(logits, [SamplingParams(logit_bias={5: 0.01})], [[1]], [[2]], ())
    assert got.argmax() == 5


@given(seed=st.integers(0, 999), token=st.integers(0, VOCAB - 1), k=st.integers(0, VOCAB + 3))
def test_logprobs_are_log_softmax_with_ranks_by_counting(seed, token, k):
    row = (logits_of(seed)[0] * 2).round() / 2  # with ties
    found = top_logprobs(row, token, k)
    order = sorted(range(VOCAB), key=lambda i: (-row[i].item(), i))
    assert set(found) == {token, *order[:k]}
    assert next(iter(found)) == token
    for i, entry in found.items():
        assert entry.rank == order.index(i) + 1
        assert entry.logprob == pytest.approx(row.log_softmax(0)[i].item())


def test_the_loop_honours_stops_penalties_and_min_tokens():
    model = load_model("random:tiny-llama", dtype="float64", device="cpu")

    def run(**options):
        return list(generate(model, RecomputeStore(), [5, 6, 7], SamplingParams(temperature=0, **options)))

    plain = run(max_tokens=12)
    assert run(max_tokens=12, stop_token_ids=[plain[4]]) == plain[: plain.index(plain[4]) + 1]
    later = run(max_tokens=12, stop_token_ids=[plain[2]], min_tokens=5)
    assert len(later) > 5
    assert plain[2] not in later[:5]
    assert plain[0] not in run(max_tokens=12, logit_bias={plain[0]: -100})
    once = run(max_tokens=40, presence_penalty=2.0, frequency_penalty=2.0, repetition_penalty=50.0)
    assert len(set(once)) > len(set(run(max_tokens=40))), "penalties keep it from repeating itself"


@pytest.mark.parametrize(
    "options, named",
    [
        ({"stop": "x"}, "stop"),
        ({"logprobs": 1}, "logprobs"),
        ({"stop_token_ids": [307]}, "stop_token_ids names token 307"),
        ({"logit_bias": {999: 1.0}}, "logit_bias names token 999"),
        ({"stop_token_ids": range(307), "min_tokens": 2}, "min_tokens=2 .* none is left"),
    ],
    ids=["stop", "logprobs", "stop token", "bias", "all stop"],
)
def test_what_the_loop_cannot_do_is_refused_not_ignored(options, named):
    model = load_model("random:tiny-llama", dtype="float64", device="cpu")
    with pytest.raises(InvalidOption, match=named):
        next(generate(model, RecomputeStore(), [5], SamplingParams(**options)))


def test_the_metrics_are_what_their_names_say():
    metrics = RequestMetrics(arrival_time=10.0, first_scheduled_time=12.5, token_times=[13.0, 13.5, 15.5])
    assert (metrics.queue_time, metrics.ttft, metrics.e2e_latency) == (2.5, 3.0, 5.5)
    assert metrics.itl == [0.5, 2.0]
    assert metrics.tpot == 1.25
    empty = RequestMetrics(arrival_time=10.0)
    assert (empty.queue_time, empty.ttft, empty.tpot, empty.e2e_latency) == (None, None, None, None)
    assert empty.itl == []
    one = RequestMetrics(arrival_time=10.0, first_scheduled_time=10.0, token_times=[11.0])
    assert (one.tpot, one.itl) == (None, [])
