"""Chapter 0: the sampler against Transformers' own filters, and what a seed promises."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from minivllm.decoding.sampler import likeliest, sample, sampling_distribution
from minivllm.errors import InvalidLogits, InvalidOption
from minivllm.params import SamplingParams


def logits_of(seed: int, rows: int = 1, vocab: int = 53) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3


def distribution(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Probability of each token id, scaled to sum to 1."""
    probs, order = sampling_distribution(logits, [params] * len(logits))
    probs = torch.zeros_like(probs).scatter(1, order, probs)
    return probs / probs.sum(dim=-1, keepdim=True)


@given(
    seed=st.integers(0, 10_000),
    temperature=st.sampled_from([0.1, 0.7, 1.0, 2.5]),
    min_p=st.sampled_from([0.0, 0.01, 0.2, 1.0]),
    top_k=st.sampled_from([0, -1, 1, 2, 7, 53, 1000]),
    top_p=st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.999, 1.0]),
)
def test_the_distribution_is_that_of_transformers_filters(seed, temperature, min_p, top_k, top_p):
    logits = logits_of(seed, rows=3)
    params = SamplingParams(temperature=temperature, min_p=min_p, top_k=top_k, top_p=top_p)
    no_ids: Any = torch.empty(3, 0, dtype=torch.long)
    expected = TemperatureLogitsWarper(temperature)(no_ids, logits)
    if min_p > 0:
        expected = MinPLogitsWarper(min_p)(no_ids, expected)
    if top_k > 0:
        expected = TopKLogitsWarper(min(top_k, 53))(no_ids, expected)
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(no_ids, expected)
    torch.testing.assert_close(distribution(logits, params), expected.softmax(dim=-1))


def test_top_p_sums_probabilities_and_keeps_the_token_that_crosses_the_line():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    kept = [
        distribution(logits, SamplingParams(top_p=p)).count_nonzero().item()
        for p in (0.01, 0.49, 0.51, 0.79, 0.81)
    ]
    assert kept == [1, 1, 2, 2, 3]


def test_on_the_line_itself_nothing_more_is_kept_and_the_next_token_is_drawn():
    """Powers of two, so that sums are exact: what stands before a token reaches top_p, or u, exactly."""

    class Half(Random):
        def random(self) -> float:
            return 0.5

    logits = torch.tensor([[0.0, -math.log(2), -math.log(2)]], dtype=torch.float64)
    probs, _ = sampling_distribution(logits, [SamplingParams()])
    assert probs.cumsum(dim=-1).tolist() == [[0.5, 0.75, 1.0]]
    kept = [distribution(logits, SamplingParams(top_p=p)).count_nonzero().item() for p in (0.5, 0.75, 1.0)]
    assert kept == [1, 2, 3]
    assert sample(logits, [SamplingParams()], [Half()]) == [1]


def test_min_p_is_relative_to_the_most_likely_token():
    logits = torch.tensor([[0.5, 0.26, 0.24]]).log()
    assert distribution(logits, SamplingParams(min_p=0.5)).count_nonzero() == 2


@pytest.mark.parametrize(
    "params", [SamplingParams(temperature=0), SamplingParams(top_k=1), SamplingParams(top_p=1e-12)]
)
def test_what_leaves_one_token_takes_the_most_likely(params):
    logits = logits_of(1, rows=9)
    assert sample(logits, [params] * 9, [Random(i) for i in range(9)]) == logits.argmax(dim=-1).tolist()


def test_the_tokens_drawn_follow_the_distribution():
    logits = logits_of(8, vocab=6)
    params, generator = SamplingParams(temperature=1.3, top_k=4), Random(11)
    expected = distribution(logits, params)[0]
    n = 20_000
    drawn = torch.tensor(
        [sample(logits.expand(50, -1), [params] * 50, [generator] * 50) for _ in range(n // 50)]
    )
    share = torch.bincount(drawn.flatten(), minlength=6) / n
    assert (share - expected).abs().max() < 4 * math.sqrt(0.25 / n)  # four standard deviations
    assert share[expected == 0].sum() == 0


def test_neighbours_do_not_change_what_a_seed_draws():
    logits = logits_of(2, rows=5)
    params = [SamplingParams(seed=i, temperature=0.9 + i, top_p=0.9) for i in range(5)]
    together = sample(logits, params, [Random(i) for i in range(5)])
    for i in range(5):
        assert sample(logits[i : i + 1], [params[i]], [Random(i)]) == together[i : i + 1]
    mixed = [SamplingParams(temperature=0), *params[1:]]
    assert sample(logits, mixed, [Random(i) for i in range(5)])[1:] == together[1:]


def test_a_greedy_row_draws_no_number():
    generator = Random(3)
    sample(logits_of(0), [SamplingParams(temperature=0)], [generator])
    assert generator.random() == Random(3).random()


@pytest.mark.parametrize("u", [0.0, 1 - 2**-53])
def test_the_ends_of_the_uniform_range_give_the_first_and_the_last_kept_token(u):
    class Fixed(Random):
        def random(self) -> float:
            return u

    logits = torch.tensor([[0.1, 3.0, 2.0, 1.0, -math.inf]])
    expected = 1 if u == 0 else 3
    assert sample(logits, [SamplingParams(top_k=3)], [Fixed()]) == [expected]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_extreme_logits_and_temperatures_give_a_token(dtype):
    logits = torch.tensor([[-60000.0, 60000.0, 59000.0, -math.inf]]).to(dtype)
    for temperature, possible in ((1e-300, {1}), (1e-6, {1}), (1.0, {1}), (1e6, {0, 1, 2})):
        params = SamplingParams(temperature=temperature)
        assert {sample(logits, [params], [Random(i)])[0] for i in range(30)} == possible


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", 10**400),
        ("top_k", 10**400),
        ("seed", 2**70),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.01),
        ("min_p", -0.01),
        ("min_p", 2),
        ("top_k", -2),
        ("top_k", 1.5),
        ("max_tokens", 0),
        ("max_tokens", None),
        ("max_tokens", 2.0),
        ("seed", "x"),
        ("seed", -1),
        ("ignore_eos", 1),
    ],
)
def test_a_value_outside_its_range_is_refused_by_name(name, value):
    with pytest.raises(InvalidOption, match=f"{name}="):
        SamplingParams(**{name: value})


def test_values_at_the_ends_of_their_ranges_are_taken():
    assert SamplingParams(temperature=0, top_p=1, min_p=1, top_k=-1, max_tokens=1, seed=0).greedy


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_from_which_no_token_can_be_chosen_are_refused(bad, temperature):
    logits = logits_of(0, rows=3)
    logits[1, 5] = bad
    with pytest.raises(InvalidLogits, match="Row 1"):
        sample(logits, [SamplingParams(temperature=temperature)] * 3, [Random(0)] * 3)
    with pytest.raises(InvalidLogits, match="Row 0"):
        sample(torch.full((1, 4), -math.inf), [SamplingParams()], [Random(0)])


def test_rows_without_parameters_of_their_own_are_refused():
    with pytest.raises(ValueError, match="3 rows, 2 params and 3 generators"):
        sample(logits_of(0, rows=3), [SamplingParams()] * 2, [Random(0)] * 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("vocab_size", [1, 2, 511, 512, 513, 1024, 1300, 49152, 50257])
def test_the_likeliest_is_the_first_of_the_largest(vocab_size, dtype):
    """Wherever it stands: in a whole block of numbers, in what is left after the last, or in both."""
    generator = torch.Generator().manual_seed(vocab_size)
    wide = torch.randn(13, vocab_size + 3, generator=generator).to(dtype)
    logits = wide[:, 1 : vocab_size + 1]
    places = torch.randint(vocab_size, (13, 2), generator=generator)
    for row, (one, other) in enumerate(places.tolist()):  # two equal ones, in bfloat16 there may be more
        logits[row, one] = logits[row, other] = 9.0
    logits[10], logits[11], logits[12, -1] = float("-inf"), float("nan"), float("nan")
    largest, token_ids = likeliest(logits)
    assert torch.equal(token_ids[:10], places[:10].amin(dim=-1))
    assert (largest[:10] == 9.0).all()
    assert largest[10] == float("-inf")
    assert token_ids[10] == 0
    assert largest[11:].isnan().all()
    assert token_ids[12] == vocab_size - 1
