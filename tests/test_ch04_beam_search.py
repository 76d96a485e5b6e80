"""Chapter 4: beam search against Transformers and against plain enumeration, on poisoned shared memory."""

from __future__ import annotations

import copy
import itertools
import math
from dataclasses import replace
from random import Random

import pytest
import torch
from branching import expected_report, is_empty, memory
from hypothesis import given
from hypothesis import strategies as st
from oracle import hf_beam_search, hf_twin, random_decoder

import minivllm
from minivllm.decoding.beam_search import advance, beam_search, top_candidates
from minivllm.decoding.beams import BeamSearch, Candidate
from minivllm.decoding.greedy import greedy
from minivllm.errors import InvalidLogits, InvalidOption, InvalidPrompt, OutOfBlocks, RequestTooLong
from minivllm.memory.store import RecomputeStore
from minivllm.model.batch import Batch
from minivllm.model.presets import PRESETS
from minivllm.params import BeamSearchParams

FAMILIES = {"tiny-llama": 23, "tiny-qwen2": 29, "tiny-qwen3": 31}  # small vocabularies: many texts end
WIDTHS = (1, 2, 3, 4, 7)
PENALTIES = (0.0, 0.5, 1.0, 2.0, -1.0)
EARLY: tuple[bool | str, ...] = (True, False, "never")
EOS = ((), (4,), (4, 9), (2, 4, 9, 11, 17))
MAX_TOKENS = (1, 2, 17)
PROMPTS = ([5], [3, 1, 4, 1], [7, 2, 7, 1, 8, 2, 8], list(range(13)))
BLOCK_SIZES = (1, 3, 4, 16)


@pytest.fixture(scope="module")
def every_twins():
    """Decoders whose distributions are neither flat nor sharp, and the same in Transformers."""
    found = {}
    for name, vocab_size in FAMILIES.items():
        decoder = random_decoder(replace(PRESETS[name], vocab_size=vocab_size), seed=3)
        decoder.norm.weight.data *= 0.5
        found[name] = decoder, hf_twin(decoder)
    return found


@pytest.fixture(params=FAMILIES)
def twins(every_twins, request):
    return every_twins[request.param]


@pytest.fixture
def tiny(every_twins):
    return every_twins["tiny-llama"][0]


def set_eos(decoder, eos):
    decoder.config = replace(decoder.config, eos_token_ids=tuple(eos))


def check_against_transformers(twins, prompt, params, eos, block_size):
    decoder, theirs = twins
    set_eos(decoder, eos)
    store, manager = memory(decoder.config, 150, block_size)
    found, report = beam_search(decoder, store, manager, prompt, params)
    expected = hf_beam_search(
        theirs,
        prompt,
        beam_width=params.beam_width,
        max_tokens=params.max_tokens,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        eos_token_ids=() if params.ignore_eos else eos,
    )
    assert [h.token_ids for h in found] == [tokens for tokens, _ in expected]
    for h, (_, score) in zip(found, expected, strict=True):
        assert h.score == pytest.approx(score, abs=1e-9, rel=1e-9)
        assert h.score == h.cumulative_logprob / len(h.token_ids) ** params.length_penalty
        ended = h.token_ids[-1] in eos and not params.ignore_eos
        assert h.finish_reason == ("stop" if ended else "length")
        assert ended or len(h.token_ids) == params.max_tokens
    assert report.num_copies == sum(map(len, store.copies)) == manager.num_copies
    assert is_empty(manager)
    return found


@pytest.mark.parametrize("width", WIDTHS)
def test_sequences_and_scores_are_those_of_transformers(every_twins, width):
    """Every penalty with every way of stopping early; the rest drawn from a seed."""
    reasons = set()
    for i, (penalty, early) in enumerate(itertools.product(PENALTIES, EARLY)):
        draw = Random(100 * width + i)
        max_tokens = MAX_TOKENS[draw.choice([0, 1, 2, 2])]
        params = BeamSearchParams(width, max_tokens, penalty, early)
        eos, prompt, block_size = map(draw.choice, (EOS, PROMPTS, BLOCK_SIZES))
        twins = every_twins[draw.choice(list(FAMILIES))]
        found = check_against_transformers(twins, prompt, params, eos, block_size)
        reasons |= {h.finish_reason for h in found}
    assert reasons == {"stop", "length"}


@pytest.mark.full
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("max_tokens", MAX_TOKENS)
def test_every_combination_gives_what_transformers_gives(twins, width, max_tokens):
    draw = Random(width)
    for penalty, early, eos in itertools.product(PENALTIES, EARLY, EOS):
        params = BeamSearchParams(width, max_tokens, penalty, early)
        check_against_transformers(twins, draw.choice(PROMPTS), params, eos, draw.choice(BLOCK_SIZES))


def test_ignoring_the_end_of_sequence_is_having_none(twins):
    for ignore in (True, False):
        params = BeamSearchParams(3, 9, 0.0, ignore_eos=ignore)
        found = check_against_transformers(twins, PROMPTS[1], params, EOS[3], 4)
        assert any(h.finish_reason == "stop" for h in found) is not ignore


def test_texts_end_early_and_late(twins):
    """That the tests above have something to find: hypotheses of many lengths, ended by each token."""
    lengths, last = set(), set()
    for prompt, early in itertools.product(PROMPTS, EARLY):
        set_eos(twins[0], EOS[3])
        found, _ = beam_search(
            twins[0], *memory(twins[0].config, 150, 3), prompt, BeamSearchParams(7, 17, 1.0, early)
        )
        lengths |= {len(h.token_ids) for h in found}
        last |= {h.token_ids[-1] for h in found if h.finish_reason == "stop"}
    assert len(lengths) >= 5
    assert len(last) >= 3


@given(seed=st.integers(0, 2**32), max_tokens=st.integers(1, 3), penalty=st.sampled_from(PENALTIES))
def test_a_search_wide_enough_for_all_texts_finds_the_best(seed, max_tokens, penalty):
    """Against enumeration: 5 tokens, of which 3 and 4 end a text, and logits that depend on all before."""
    vocab, eos = 5, {3, 4}

    def logits(tokens) -> torch.Tensor:
        draw = Random(f"{seed} {tokens}")
        return torch.tensor([draw.gauss(0, 2) for _ in range(vocab)], dtype=torch.float64)

    texts = {
        text: sum(logits(text[:i]).log_softmax(0)[text[i]].item() for i in range(n))
        for n in range(1, max_tokens + 1)
        for text in itertools.product(range(vocab), repeat=n)
        if not eos & set(text[:-1]) and (text[-1] in eos or n == max_tokens)
    }
    expected = sorted(texts, key=lambda text: -texts[text] / len(text) ** penalty)
    search = BeamSearch(BeamSearchParams(len(texts), 50, penalty), max_tokens, sorted(eos))
    while not search.done:
        advance(search, torch.stack([logits(beam.token_ids) for beam in search.live]))
    assert [tuple(h.token_ids) for h in search.best()] == expected
    assert [h.cumulative_logprob for h in search.best()] == pytest.approx([texts[t] for t in expected])


@given(data=st.data(), vocab=st.integers(1, 9), rows=st.integers(1, 4), k=st.integers(1, 40))
def test_candidates_are_a_plain_sort_and_equals_keep_their_order(data, vocab, rows, k):
    """Logits and scores from few values, so that many are equal."""
    values = st.sampled_from([-math.inf, -1.0, 0.0, 2.0])
    row = st.lists(values, min_size=vocab, max_size=vocab).filter(lambda r: max(r) > -math.inf)
    logits = torch.tensor(data.draw(st.lists(row, min_size=rows, max_size=rows)))
    scores = data.draw(st.lists(st.sampled_from([0.0, -3.0]), min_size=rows, max_size=rows))
    sums = (logits.double().log_softmax(-1) + torch.tensor(scores, dtype=torch.float64)[:, None]).tolist()
    every = [
        Candidate(s, row, token) for row, r in enumerate(sums) for token, s in enumerate(r) if s > -math.inf
    ]
    assert top_candidates(logits, scores, k) == sorted(every, key=lambda c: -c.logprob)[:k]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_sums_do_not_suffer_from_a_narrow_dtype(dtype):
    logits = torch.linspace(-4, 4, 50).to(dtype)[None]
    (best, row, token), *_ = top_candidates(logits, [-1000.0], 1)
    assert (row, token) == (0, 49)
    assert best == pytest.approx(-1000 + logits[0].double().log_softmax(0)[49].item(), abs=1e-12)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=str)
def test_a_damaged_row_is_named_and_changes_nothing(bad):
    search = BeamSearch(BeamSearchParams(3), 16, [0])
    advance(search, torch.arange(10.0)[None])
    before = copy.copy(search)
    logits = torch.randn(3, 10, generator=torch.Generator().manual_seed(0))
    logits[1, slice(None) if bad == -math.inf else 4] = bad
    with pytest.raises(InvalidLogits, match=f"Row 1 of the logits has {bad} for its maximum") as error:
        advance(search, logits)
    assert error.value.row == 1
    assert vars(search) == vars(before)
    with pytest.raises(ValueError, match="4 rows of logits and 3 live beams"):
        advance(search, torch.zeros(4, 10))
    assert vars(search) == vars(before)


def test_a_copy_is_a_snapshot():
    """A step that is undone and made again gives the same."""
    draw = torch.Generator().manual_seed(1)
    search = BeamSearch(BeamSearchParams(3, 6), 6, [0, 1])
    rows = 1
    while not search.done:
        logits = torch.randn(rows, 10, generator=draw)
        before, untouched = copy.copy(search), copy.deepcopy(vars(search))
        chosen = advance(search, logits)
        assert vars(before) == untouched
        assert advance(before, logits) == chosen
        assert vars(before) == vars(search)
        assert len(chosen) == len(search.live) == len(search.scores)
        assert search.scores == sorted(search.scores, reverse=True)
        rows = len(chosen)
    assert len(search.best()) == 3


def test_a_text_that_ends_outside_the_likeliest_is_let_go():
    """Width 2, token 0 ends: what ends as third-best is no hypothesis, and has no place in the beam."""
    search = BeamSearch(BeamSearchParams(2, 9), 9, [0])
    assert search.choose([Candidate(-1.0, 0, 5), Candidate(-1.5, 0, 6), Candidate(-1.7, 0, 0)]) == [
        (0, 5),
        (0, 6),
    ]
    assert search.best() == []
    chosen = search.choose(
        [Candidate(-2.0, 1, 0), Candidate(-2.5, 0, 7), Candidate(-2.6, 1, 0), Candidate(-3.0, 1, 8)]
    )
    assert chosen == [(0, 7), (1, 8)]
    assert [(h.token_ids, h.score, h.finish_reason) for h in search.best()] == [([6, 0], -1.0, "stop")]
    assert [beam.token_ids for beam in search.live] == [(5, 7), (6, 8)]


@pytest.mark.parametrize(
    "early, penalty, live, over",
    [
        (True, 1.0, -0.1, True),
        (False, 1.0, -3.9, False),  # -3.9 / 2 is above -2.0
        (False, 1.0, -4.0, True),  # and -4.0 / 2 is not
        ("never", 1.0, -19.9, False),  # / 10, the longest
        ("never", 1.0, -20.0, True),
        ("never", 0.0, -4.0, True),  # the sum itself, against sums: it can only fall
        ("never", 0.0, -1.9, False),
        ("never", -1.0, -2.1, True),  # times the length: the shortest is best
        ("never", -1.0, -0.9, False),
    ],
)
def test_when_a_search_is_over(early, penalty, live, over):
    """One hypothesis of 1 token with a sum of -2.0; then the only beam has 2 tokens and this sum."""
    search = BeamSearch(BeamSearchParams(1, 10, penalty, early), 10, [0])
    chosen = search.choose([Candidate(-2.0, 0, 0), Candidate(-0.05, 0, 5)])
    if early is True:
        assert chosen == []
        assert search.done
        return
    assert chosen == [(0, 5)]
    assert search.choose([Candidate(live, 0, 6)]) == ([] if over else [(0, 6)])
    assert search.done is over
    assert [h.token_ids for h in search.best()] == [[0]]


def test_a_vocabulary_smaller_than_the_beam_gives_fewer_beams_and_no_text_twice():
    search = BeamSearch(BeamSearchParams(7, 2), 2, [])
    assert len(advance(search, torch.tensor([[0.3, 0.1, 0.2]]))) == 3
    assert advance(search, torch.zeros(3, 3)) == []
    texts = [tuple(h.token_ids) for h in search.best()]
    assert len(set(texts)) == len(texts) == 7


def test_one_beam_that_stops_early_is_greedy(tiny):
    set_eos(tiny, ())
    for prompt in PROMPTS:
        found, report = beam_search(tiny, *memory(tiny.config, 60, 3), prompt, BeamSearchParams(1, 12))
        assert found[0].token_ids == greedy(tiny, RecomputeStore(), prompt, 12)
        assert report.num_copies == 0
        assert report.num_blocks == report.num_blocks_without_sharing


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda p: f"{len(p)} tokens")
def test_blocks_and_copies_are_those_of_plain_books(tiny, prompt, block_size):
    """The same search with nothing kept, which tells each beam's parent; and it finds the same texts."""
    set_eos(tiny, (4,))
    params = BeamSearchParams(5, 17)
    search, parents = BeamSearch(params, 17, (4,)), []
    while not search.done:
        rows = [(i, [*prompt, *beam.token_ids], 0) for i, beam in enumerate(search.live)]
        with torch.inference_mode():
            chosen = advance(search, tiny(Batch.pack(rows), RecomputeStore()))
        parents.append([row for row, _ in chosen])
    store, manager = memory(tiny.config, 150, block_size)
    found, report = beam_search(tiny, store, manager, prompt, params)
    assert [h.token_ids for h in found] == [h.token_ids for h in search.best()]
    assert report == expected_report(len(prompt), block_size, parents[:-1])
    assert (report.num_copies == 0) is (block_size == 1)
    assert is_empty(manager)


def test_searches_end_at_the_models_longest_context(tiny):
    set_eos(tiny, ())
    config = tiny.config
    try:
        tiny.config = replace(config, max_position_embeddings=9)
        found, _ = beam_search(tiny, *memory(config, 60, 4), [1, 2, 3, 4], BeamSearchParams(3, 50))
        assert [len(h.token_ids) for h in found] == [5, 5, 5]
        with pytest.raises(RequestTooLong):
            beam_search(tiny, *memory(config, 60, 4), [1] * 9, BeamSearchParams(3))
    finally:
        tiny.config = config
    with pytest.raises(InvalidPrompt, match="empty"):
        beam_search(tiny, *memory(config, 60, 4), [], BeamSearchParams(3))


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 5, 6, 7])
def test_memory_that_runs_out_is_given_back(tiny, num_blocks):
    set_eos(tiny, ())
    store, manager = memory(tiny.config, num_blocks, 4)
    with pytest.raises(OutOfBlocks):
        beam_search(tiny, store, manager, [3, 1, 4, 1, 5, 9], BeamSearchParams(4, 17))
    assert is_empty(manager)


def test_a_model_that_fails_leaves_no_block_behind(tiny):
    set_eos(tiny, ())
    store, manager = memory(tiny.config, 60, 4)
    steps = itertools.count()
    hook = tiny.register_forward_hook(
        lambda _model, _inputs, out: out * math.nan if next(steps) == 5 else out
    )
    try:
        with pytest.raises(InvalidLogits):
            beam_search(tiny, store, manager, [3, 1, 4], BeamSearchParams(4, 17))
    finally:
        hook.remove()
    assert next(steps) == 6
    assert is_empty(manager)


def test_a_neighbour_in_the_same_memory_is_left_alone(tiny):
    set_eos(tiny, (4,))
    store, manager = memory(tiny.config, 80, 4)
    manager.allocate(7, 10)
    before = manager.block_table(7)
    params = BeamSearchParams(4, 17)
    shared, _ = beam_search(tiny, store, manager, PROMPTS[2], params, seq_id=3)
    assert manager.block_table(7) == before
    assert manager.pool.num_free_blocks == 77
    alone, _ = beam_search(tiny, *memory(tiny.config, 80, 4), PROMPTS[2], params)
    assert shared == alone


def test_params_keep_their_values_as_pythons_own():
    assert minivllm.BeamSearchParams is BeamSearchParams
    assert BeamSearchParams(4) == BeamSearchParams(4, 16, 1.0, False, False)
    wider = replace(BeamSearchParams(4, length_penalty=2), beam_width=5)
    assert wider == BeamSearchParams(5, length_penalty=2.0)
    assert isinstance(wider.length_penalty, float)
    assert "n=" not in repr(wider).replace("stopping=", "")
    assert hash(BeamSearchParams(4)) == hash(BeamSearchParams(4))


@pytest.mark.parametrize(
    "name, value, expected",
    [
        ("beam_width", 0, "an integer, at least 1"),
        ("beam_width", True, "an integer, at least 1"),
        ("beam_width", 2.0, "an integer, at least 1"),
        ("max_tokens", 0, "an integer, at least 1"),
        ("max_tokens", 2**63, "an integer, at least 1"),
        ("max_tokens", None, "an integer, at least 1"),
        ("length_penalty", math.nan, "a number from -10 to 10"),
        ("length_penalty", math.inf, "a number from -10 to 10"),
        ("length_penalty", "1", "a number from -10 to 10"),
        ("early_stopping", 1, 'True, False or "never"'),
        ("early_stopping", "always", 'True, False or "never"'),
        ("early_stopping", None, 'True, False or "never"'),
        ("ignore_eos", 1, "True or False"),
        ("n", 2, "a beam search: it gives beam_width results"),
    ],
    ids=str,
)
def test_a_value_that_cannot_be_had_is_refused_by_name(name, value, expected):
    with pytest.raises(InvalidOption) as error:
        BeamSearchParams(**({"beam_width": 2} | {name: value}))
    assert str(error.value).startswith(f"{name}={value!r} is not possible")
    assert expected in str(error.value)
