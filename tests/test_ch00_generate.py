"""Chapter 0: the generate loop, and text that comes out of it whole."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minivllm.decoding.detokenizer import Detokenizer
from minivllm.decoding.generate import generate
from minivllm.errors import InvalidPrompt, RequestTooLong
from minivllm.memory.store import RecomputeStore
from minivllm.model.decoder import Decoder
from minivllm.model.loader import load_model
from minivllm.model.tokenizer import ByteTokenizer
from minivllm.params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def tiny() -> Decoder:
    return load_model("random:tiny-llama", dtype="float64", device="cpu", seed=5)


def run(model, prompt, params=GREEDY, store=None):
    return list(generate(model, store or RecomputeStore(), prompt, params))


def test_the_same_seed_gives_the_same_tokens_and_another_seed_others(tiny):
    first, again, other = (run(tiny, [1, 2, 3], SamplingParams(seed=s, max_tokens=20)) for s in (1, 1, 2))
    assert first == again != other


def test_without_a_seed_two_runs_differ(tiny):
    params = SamplingParams(max_tokens=20, temperature=3.0)
    assert run(tiny, [1, 2, 3], params) != run(tiny, [1, 2, 3], params)


def test_it_ends_after_the_end_of_sequence_token_unless_told_to_go_on(tiny):
    free = run(tiny, [7, 8])
    stop = next(i for i, t in enumerate(free) if i >= 3 and t not in free[:i])
    config = tiny.config
    try:
        tiny.config = type(config)(**{**vars(config), "eos_token_ids": (free[stop],)})
        assert run(tiny, [7, 8]) == free[: stop + 1]
        assert run(tiny, [7, 8], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)) == free
    finally:
        tiny.config = config


def test_it_ends_at_the_models_longest_context(tiny):
    longest = tiny.config.max_position_embeddings
    assert len(run(tiny, [5] * (longest - 3))) == 3


@pytest.mark.parametrize(
    ("prompt", "named"),
    [
        ([], "empty"),
        ("", "empty"),
        ("text", "token ids"),
        ([1, 2.0], "token ids"),
        ([True], "token ids"),
        (torch.tensor([1, 2]), "token ids"),
        (b"text", "token ids"),
        (7, "token ids"),
        (None, "token ids"),
        ([3, -1], "-1 at place 1"),
        ([3, 4, 307], "307 at place 2"),
    ],
    ids=str,
)
def test_a_prompt_that_is_none_is_refused_and_the_model_goes_on(tiny, prompt, named):
    with pytest.raises(InvalidPrompt, match=named):
        run(tiny, prompt)
    assert len(run(tiny, [1])) == 12


@pytest.mark.parametrize("extra", [0, 1, 500])
def test_a_prompt_that_leaves_no_room_to_generate_is_refused(tiny, extra):
    longest = tiny.config.max_position_embeddings
    with pytest.raises(RequestTooLong, match=f"{longest + extra} tokens.*{longest}"):
        run(tiny, [1] * (longest + extra))


class CountingStore(RecomputeStore):
    def __init__(self):
        self.freed = []

    def free(self, seq_id):
        self.freed.append(seq_id)


def test_the_store_lets_go_of_the_sequence_however_the_run_ends(tiny):
    store = CountingStore()
    run(tiny, [1, 2], store=store)
    assert store.freed == [0]
    tokens = generate(tiny, store, [1, 2], GREEDY, seq_id=9)
    next(tokens)
    tokens.close()
    assert store.freed == [0, 9]


TEXTS = st.text(alphabet="aé世🙂\U0001f469\u200d ", max_size=12)


@given(TEXTS)
def test_pieces_joined_are_the_whole_text_and_none_is_broken(text):
    tokenizer = ByteTokenizer()
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.add(token) for token in tokenizer.encode(text)]
    assert "".join(pieces) == text, "whole characters come out with their last byte"
    assert detokenizer.flush() == ""


@given(st.lists(st.integers(0, 300), max_size=20))
def test_bytes_that_are_no_text_come_out_at_the_end_at_the_latest(token_ids):
    tokenizer = ByteTokenizer()
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.add(token) for token in token_ids]
    assert "".join(pieces) + detokenizer.flush() == tokenizer.decode(token_ids)


def test_a_tokenizer_that_drops_a_leading_space_does_not_eat_the_spaces_between():
    class Stripping(ByteTokenizer):
        words = (" one", " two", " three")

        def decode(self, token_ids, *, skip_special_tokens=True):
            return "".join(self.words[i] for i in token_ids).lstrip()

    detokenizer = Detokenizer(Stripping())
    pieces = list(itertools.chain(map(detokenizer.add, [0, 1, 2, 0]), [detokenizer.flush()]))
    assert "".join(pieces) == "one two three one"


def test_the_prompt_that_was_given_stays_as_it_was(tiny):
    prompt = [1, 2, 3]
    run(tiny, prompt)
    assert prompt == [1, 2, 3]


def test_a_seed_may_be_a_numpy_number(tiny):
    import numpy as np

    seeds: tuple[Any, ...] = (4, np.int64(4))
    runs = [run(tiny, [1, 2], SamplingParams(seed=seed)) for seed in seeds]
    assert runs[0] == runs[1]
