"""Chapter 4: parallel sampling gives the texts of so many requests of one, in less memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
from branching import expected_report, is_empty, memory
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import random_decoder

from minivllm.decoding.generate import generate
from minivllm.decoding.parallel import parallel_sample
from minivllm.errors import InvalidOption, InvalidPrompt, OutOfBlocks
from minivllm.memory.store import RecomputeStore
from minivllm.model.presets import PRESETS
from minivllm.outputs import SharingReport
from minivllm.params import SamplingParams

EOS = (2, 4, 9)


@pytest.fixture(scope="module")
def tiny():
    return random_decoder(replace(PRESETS["tiny-qwen3"], vocab_size=31, eos_token_ids=EOS), seed=3)


def one_by_one(model, prompt, params):
    """The same samples, each on its own and with nothing kept."""
    every = [replace(params, n=1, seed=params.seed + i) for i in range(params.n)]
    return [list(generate(model, RecomputeStore(), prompt, p)) for p in every]


def parents_of(outputs):
    """For each step after the first, the row that each running sample has in the step before."""
    before, parents = None, []
    for step in range(1, max(map(len, outputs))):
        running = [i for i, tokens in enumerate(outputs) if len(tokens) > step]
        parents.append([0 if before is None else before.index(i) for i in running])
        before = running
    return parents


@settings(max_examples=25)
@given(
    prompt=st.lists(st.integers(0, 30), min_size=1, max_size=13),
    n=st.integers(1, 5),
    seed=st.integers(0, 1000),
    max_tokens=st.integers(1, 8),
    block_size=st.sampled_from([1, 3, 4, 16]),
    others=st.sampled_from(
        [
            {},
            {"temperature": 0},
            {"ignore_eos": True},
            {"top_k": 5, "min_tokens": 1},
            {"presence_penalty": 2.0},
        ]
    ),
)
def test_samples_blocks_and_copies_are_those_of_plain_models(
    tiny, prompt, n, seed, max_tokens, block_size, others
):
    params = SamplingParams(n=n, seed=seed, max_tokens=max_tokens, **others)
    store, manager = memory(tiny.config, 150, block_size)
    outputs, report = parallel_sample(tiny, store, manager, prompt, params)
    assert outputs == one_by_one(tiny, prompt, params)
    assert report == expected_report(len(prompt), block_size, parents_of(outputs))
    assert report.num_copies == sum(map(len, store.copies)) == manager.num_copies
    assert is_empty(manager)


@pytest.mark.parametrize(
    "prompt_len, report",
    [
        (8, SharingReport(2 + 4, 4 * 3, 0)),  # the last block is full: nothing to copy
        (9, SharingReport(2 + 4, 4 * 3, 3)),
        (11, SharingReport(2 + 4 * 2, 4 * 4, 3)),
        (3, SharingReport(4 * 2, 4 * 2, 3)),
    ],
)
def test_one_prompt_is_kept_once_and_its_last_block_copied_by_all_but_one(tiny, prompt_len, report):
    """Four samples of 4 tokens, of which the last is never put into memory; blocks of 4."""
    params = SamplingParams(n=4, seed=0, max_tokens=4, ignore_eos=True)
    prompt = list(range(prompt_len))
    assert parallel_sample(tiny, *memory(tiny.config, 50, 4), prompt, params)[1] == report


def test_without_a_seed_samples_differ(tiny):
    params = SamplingParams(n=3, max_tokens=12, ignore_eos=True, temperature=2.0)
    outputs, _ = parallel_sample(tiny, *memory(tiny.config, 50, 4), [1, 2, 3], params)
    assert len({tuple(tokens) for tokens in outputs}) == 3


def test_samples_that_all_end_at_once_leave_nothing(tiny):
    store, manager = memory(tiny.config, 3, 4)
    outputs, report = parallel_sample(
        tiny, store, manager, [1, 2, 3, 4, 5], SamplingParams(n=5, seed=1, max_tokens=1)
    )
    assert [len(tokens) for tokens in outputs] == [1] * 5
    assert report == SharingReport(2, 2, 0)
    assert is_empty(manager)


def test_what_cannot_be_is_refused_and_memory_that_runs_out_is_given_back(tiny):
    store, manager = memory(tiny.config, 6, 4)
    with pytest.raises(InvalidPrompt, match="empty"):
        parallel_sample(tiny, store, manager, [], SamplingParams(n=2))
    with pytest.raises(InvalidOption, match="logit_bias names token 31"):
        parallel_sample(tiny, store, manager, [1], SamplingParams(logit_bias={31: 1.0}))
    for others in ({"stop": "a"}, {"logprobs": 1}):
        with pytest.raises(InvalidOption, match="token ids only"):
            parallel_sample(tiny, store, manager, [1], SamplingParams(n=2, **others))
    with pytest.raises(OutOfBlocks):
        parallel_sample(tiny, store, manager, [1, 2, 3], SamplingParams(n=3, max_tokens=15, ignore_eos=True))
    assert is_empty(manager)
