"""Chapter 0: the draw from a row's head against the draw from the sorted row."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.decoding import sampler
from minivllm.decoding.draw import Settings, draw_from_head, row_sums, weights_of
from minivllm.params import SamplingParams

ENDS = 0.0, 1 - 2**-53


def of(logits: torch.Tensor, uniform: list[float], **params: float) -> Settings:
    return Settings.of([SamplingParams(**params)] * len(logits), uniform, logits)  # type: ignore[arg-type]


# Among them shares that sums of equal probabilities reach exactly: there rounding decides.
CUTS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([1e-300, 0.05, 0.7, 1.0, 3.0, 1e6]),
        "top_k": st.sampled_from([0, 1, 2, 5, 6, 7, 20, 60, 61, 1000]),
        "top_p": st.sampled_from([1e-300, 1e-9, 0.1, 0.1234567, 0.25, 0.5, 0.75, 0.9, 0.9987654, 1.0]),
        "min_p": st.sampled_from([0.0, 1e-6, 0.01, 0.2, 1.0]),
    }
)


@settings(max_examples=500)
@given(
    seed=st.integers(0, 2**30),
    steps=st.sampled_from([1, 4, 2**20]),  # of logits in one unit: with few, many are equal
    spread=st.sampled_from([0.0, 1.0, 4.0, 40.0]),
    cuts=CUTS,
    size=st.sampled_from([1, 2, 6, 20, 60]),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
)
def test_what_a_head_is_certain_of_is_the_sorted_rows_token(seed, steps, spread, cuts, size, dtype):
    generator = torch.Generator().manual_seed(seed)
    logits = ((torch.randn(8, 61, generator=generator) * spread * steps).round() / steps).to(dtype)
    logits[:2, ::3] = -math.inf
    uniform = [*ENDS, *ENDS, 0.5, *torch.rand(3, generator=generator, dtype=torch.float64).tolist()]
    own = of(logits, uniform, **cuts)
    tokens, certain = draw_from_head(logits, own, size)
    expected = sampler.draw_sorted(logits, own)
    assert torch.equal(tokens[certain], expected[certain])


@given(seed=st.integers(0, 2**30), cuts=CUTS, most=st.sampled_from([1, 130, 10_000]))
def test_every_row_is_drawn_in_the_end_whatever_the_heads_and_slices(seed, cuts, most):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(7, 61, generator=generator) * torch.tensor([[0.0], [0.1], [1], [2], [4], [9], [30]])
    own = of(logits, torch.rand(7, generator=generator, dtype=torch.float64).tolist(), **cuts)
    expected = sampler.draw_sorted(logits, own)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "MAX_DRAWN", most)
        patch.setattr(sampler, "MAX_SORTED", most // 2)
        for heads in ((), (1,), (3, 11), (11, 61, 400)):
            patch.setattr(sampler, "HEADS", heads)
            assert torch.equal(sampler.draw(logits, own), expected)


@pytest.mark.parametrize(
    "cuts",
    [{}, {"top_p": 0.5}, {"top_p": 0.95}, {"top_k": 9}, {"min_p": 0.1}, {"top_k": 9, "top_p": 0.9}],
    ids=str,
)
def test_a_peaked_row_is_not_sorted(cuts, monkeypatch):
    """Nine tokens have 0.96 of it: enough for a draw at 0.9, though top-p may end beyond the head."""
    logits = torch.zeros(3, 1000)
    logits[:, 100:109] = 8 - torch.arange(9) / 100
    own = of(logits, [0.0, 0.5, 0.9], **cuts)
    tokens, certain = draw_from_head(logits, own, 16)
    assert certain.all()
    assert torch.equal(tokens, sampler.draw_sorted(logits, own))
    monkeypatch.setattr(sampler, "HEADS", (16,))
    monkeypatch.setattr(sampler, "draw_sorted", None)
    assert torch.equal(sampler.draw(logits, own), tokens)


def test_a_draw_beyond_the_head_or_among_equals_is_not_certain():
    logits = torch.zeros(3, 1000)
    logits[:, 100:109] = 8 - torch.arange(9) / 100
    beyond = of(logits, [0.99] * 3)
    assert not draw_from_head(logits, beyond, 16)[1].any()
    equal = of(logits, [0.97] * 3, top_k=12)  # three of 991 equals: those with the lowest ids
    assert not draw_from_head(logits, equal, 16)[1].any()
    assert not draw_from_head(torch.zeros(3, 1000), beyond, 16)[1].any()


def test_where_top_p_ends_beyond_the_head_a_draw_is_certain_only_if_no_end_changes_it():
    """0.4 and 0.3 are trusted, then come 0.2 and 0.1. To reach 0.75 one token more is kept: 0.9. All that is
    known is that it is 0.75 to 0.95, so 0.5 of it is 0.375 to 0.475: the first token or the second."""
    logits = torch.tensor([[0.1, 0.4, 0.2, 0.3]], dtype=torch.float64).log()
    for u, token in ((0.4, 1), (0.5, None), (0.6, 3), (0.8, None)):
        own = of(logits, [u], top_p=0.75)
        found, certain = draw_from_head(logits, own, 3)
        assert bool(certain) == (token is not None)
        assert token in (None, int(found))
        assert token in (None, int(sampler.draw_sorted(logits, own)))


def test_rows_of_a_slice_have_their_own_settings(monkeypatch):
    monkeypatch.setattr(sampler, "HEADS", (2, 5))
    monkeypatch.setattr(sampler, "MAX_DRAWN", 40)
    logits = torch.randn(9, 20, generator=torch.Generator().manual_seed(5))
    params = [SamplingParams(temperature=0.5 + i, top_k=i, top_p=1 - i / 20) for i in range(9)]
    own = Settings.of(params, [i / 9 for i in range(9)], logits)
    expected = [
        int(sampler.draw_sorted(logits[i : i + 1], Settings.of([p], [i / 9], logits)))
        for i, p in enumerate(params)
    ]
    assert sampler.draw(logits, own).tolist() == expected


@pytest.mark.parametrize("vocab_size", [1, 5, 512, 1000, 49_152])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_the_least_top_p_there_is_keeps_the_likeliest(vocab_size, dtype):
    """Beyond the head, so that the row is sorted; of a sum below one half it would be nothing."""
    logits = torch.randn(3, vocab_size, generator=torch.Generator().manual_seed(3)).to(dtype)
    for cuts in ({"top_p": 5e-324}, {"top_p": 5e-324, "top_k": 5000}, {"top_p": 1e-308, "top_k": 3}):
        own = of(logits, [0.0, 0.5, ENDS[1]], temperature=100.0, **cuts)
        for tokens in (sampler.draw(logits, own), sampler.draw_sorted(logits, own)):
            assert tokens.tolist() == sampler.likeliest(logits)[1].tolist()


@given(st.integers(0, 2**30), st.sampled_from([1, 511, 512, 513, 4000, 49_152]), st.integers(1, 3))
@settings(max_examples=30)
def test_the_sum_of_a_row_is_the_same_alone_and_beside_others_by_any_number_of_threads(seed, size, num_rows):
    """PyTorch's own sum is not: one row of 49,152 numbers is shared among threads, three are not."""
    rows = torch.randn(
        num_rows, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).exp()
    threads, found = torch.get_num_threads(), []
    try:
        for n in (1, 2, 4):
            torch.set_num_threads(n)
            found += [row_sums(rows), torch.cat([row_sums(row[None]) for row in rows])]
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, found[0]) for one in found)
    torch.testing.assert_close(found[0], rows.sum(dim=-1, keepdim=True))


def test_equals_where_top_p_falls_on_a_sum_give_one_row_the_token_that_it_has_beside_others():
    """The one among 50 equals at which half of them is reached: rounding decides, and always in one way."""
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        for vocab_size in (40_000, 49_152, 65_536):
            logits = torch.full((vocab_size,), -5.0)
            logits[:1000] = 0
            rows = torch.stack([logits] * 3)
            for top_k in (0, 50, 64):
                for top_p in (0.1, 0.25, 0.5, 0.9):
                    for u in (0.2335, 0.5, ENDS[1]):
                        own = of(rows, [u] * 3, temperature=0.7, top_p=top_p, top_k=top_k)
                        for draw in (sampler.draw, sampler.draw_sorted):
                            alone = draw(rows[:1], own.rows(slice(0, 1)))
                            assert draw(rows, own).tolist() == alone.tolist() * 3
    finally:
        torch.set_num_threads(threads)


def test_a_row_is_cut_alike_alone_and_beside_others_where_top_p_falls_on_a_sum():
    """Each row's top-p is a share that its first tokens reach, so that rounding decides. PyTorch's own sum of
    such a row may be 2e-16 more alone than beside others, by two threads."""
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        for seed in (3, 5, 6):
            generator = torch.Generator().manual_seed(seed)
            probs = torch.rand(40_000, generator=generator, dtype=torch.float64).sort(descending=True).values
            probs /= probs.sum()
            before = probs.cumsum(dim=-1) - probs
            top_p = (before[1:20_000:1000] / probs.expand(2, -1).contiguous().sum(dim=-1)[0])[:, None]
            none, every = torch.zeros_like(top_p), torch.full_like(top_p, len(probs))
            beside = sampler.cut_tail(probs.expand(len(top_p), -1), every, top_p, none)
            for row, p in zip(beside, top_p, strict=True):
                assert torch.equal(sampler.cut_tail(probs[None], every[:1], p[None], none[:1])[0], row)
    finally:
        torch.set_num_threads(threads)


def test_the_logits_stay_as_they_are():
    logits = torch.randn(2, 30, dtype=torch.float64)
    before = logits.clone()
    weights = weights_of(logits, torch.full((2, 1), 0.5, dtype=torch.float64))
    torch.testing.assert_close(weights / weights.sum(dim=-1, keepdim=True), (logits / 0.5).softmax(dim=-1))
    sampler.draw(logits, of(logits, [0.3, 0.9]))
    assert torch.equal(logits, before)


@given(st.integers(0, 2**30), st.integers(0, 40), st.sampled_from([1, 3, 1000]))
def test_the_best_logprobs_are_those_of_a_stable_sort(seed, k, steps):
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(30, generator=generator) * steps).round() / steps
    logits[::7] = -math.inf
    found = sampler.top_logprobs(logits, 4, k)
    logprobs = logits.double().log_softmax(dim=-1)
    order = logprobs.sort(descending=True, stable=True).indices.tolist()
    assert next(iter(found)) == 4
    assert [i for i in found if i != 4] == [i for i in order[:k] if i != 4]
    assert all(entry.rank == order.index(i) + 1 for i, entry in found.items())
    assert all(entry.logprob == logprobs[i] for i, entry in found.items())
