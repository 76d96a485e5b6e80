"""`LLM`: what goes in, what comes out, what is refused, and that it goes on after any of it."""

from __future__ import annotations

import itertools
import math
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import minivllm
from minivllm import LLM, SamplingParams
from minivllm.decoding.generate import generate
from minivllm.engine_args import EngineArgs
from minivllm.errors import (
    EngineBusy,
    EngineClosed,
    InvalidLogits,
    InvalidOption,
    InvalidPrompt,
    MinivllmError,
    RequestTooLong,
)
from minivllm.memory.naive_store import NaiveStore
from minivllm.model.loader import load_model
from minivllm.model.tokenizer import ByteTokenizer
from minivllm.outputs import RequestOutput

MODEL = load_model("random:tiny-llama", dtype="float64", device="cpu")
GREEDY = SamplingParams(temperature=0, max_tokens=12)


def make(model=MODEL, **options) -> Any:
    return LLM(model, **{"tokenizer": ByteTokenizer(), **options})


@pytest.fixture
def llm() -> Any:
    return make()


def plain(prompt: list[int], params: SamplingParams = GREEDY) -> list[int]:
    return list(generate(MODEL, NaiveStore(), prompt, params))


def is_idle(llm: LLM) -> bool:
    llm.engine.manager.check_integrity()
    nothing = llm.engine.manager.snapshot().held == 0 and not llm.engine.has_unfinished()
    return nothing and not llm._states and not llm._added and not llm._news


def test_a_prompt_may_have_any_of_its_forms_and_outputs_come_in_their_order(llm):
    ids = list(b"hello")
    prompts = ["hello", ids, tuple(ids), {"prompt": "hello"}, {"prompt_token_ids": ids}, "another"]
    outputs = llm.generate(prompts, GREEDY)
    assert [o.prompt for o in outputs] == ["hello", None, None, "hello", None, "another"]
    assert [o.prompt_token_ids for o in outputs] == [ids] * 5 + [list(b"another")]
    assert [o.outputs[0].token_ids for o in outputs] == [plain(ids)] * 5 + [plain(list(b"another"))]
    for o in outputs:
        assert o.finished
        assert o.outputs[0].text == ByteTokenizer().decode(o.outputs[0].token_ids)
        assert (o.outputs[0].finish_reason, o.outputs[0].stop_reason) == ("length", None)
        assert len(o.metrics.token_times) == 12
    assert is_idle(llm)


@pytest.mark.parametrize("one", ["hello", list(b"hello"), {"prompt": "hello"}], ids=str)
def test_one_prompt_gives_a_list_of_one(llm, one):
    assert [o.outputs[0].token_ids for o in llm.generate(one, GREEDY)] == [plain(list(b"hello"))]


def test_no_prompts_give_no_outputs(llm):
    assert llm.generate([], GREEDY) == llm.generate((), []) == []


def test_each_prompt_may_have_params_of_its_own(llm):
    each = [SamplingParams(temperature=0, max_tokens=n) for n in (3, 1, 7)]
    outputs = llm.generate(["a", "b", "a"], each)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [3, 1, 7]
    assert llm.generate("a")[0].outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    "prompts, params, error, named",
    [
        (["good", ""], GREEDY, InvalidPrompt, "Prompt 1: The prompt is empty"),
        (["good", [1, 307]], GREEDY, InvalidPrompt, "Prompt 1: Token id 307"),
        (["good", 5], GREEDY, InvalidPrompt, "Prompt 1: "),
        ([[1, "a"]], GREEDY, InvalidPrompt, "list of token ids"),
        ([True], GREEDY, InvalidPrompt, "list of token ids"),
        (None, GREEDY, InvalidPrompt, "not NoneType"),
        (b"bytes", GREEDY, InvalidPrompt, "not bytes"),
        ({}, GREEDY, InvalidPrompt, "not nothing"),
        ({"prompt": "a", "prompt_token_ids": [1]}, GREEDY, InvalidPrompt, "'prompt' or 'prompt_token_ids'"),
        ({"promt": "a"}, GREEDY, InvalidPrompt, "not 'promt'"),
        ({"prompt": [1]}, GREEDY, InvalidPrompt, "must be a text, not list"),
        ({"prompt_token_ids": "abc"}, GREEDY, InvalidPrompt, "list of token ids"),
        ("x" * 1024, GREEDY, RequestTooLong, "1024 tokens"),
        (["a", "b"], [GREEDY], InvalidOption, "1 params do not match 2 prompts"),
        ("a", [GREEDY, GREEDY], InvalidOption, "2 params do not match 1 prompts"),
        ("a", {"temperature": 0}, InvalidOption, "must be SamplingParams, .* not dict"),
        ("a", [None], InvalidOption, "not NoneType"),
        ("a", 3, InvalidOption, "not int"),
        ("a", SamplingParams(stop_token_ids=[400]), InvalidOption, "stop_token_ids names token 400"),
        ("a", SamplingParams(logit_bias={400: 1.0}), InvalidOption, "logit_bias names token 400"),
    ],
    ids=str,
)
def test_what_cannot_be_answered_is_refused_and_the_engine_goes_on(llm, prompts, params, error, named):
    with pytest.raises(error, match=named):
        llm.generate(prompts, params)
    assert is_idle(llm)
    assert llm.generate("hello", GREEDY)[0].outputs[0].token_ids == plain(list(b"hello"))


def test_a_request_that_the_pool_can_never_hold_is_refused_before_its_neighbours_run():
    llm = make(num_blocks=4, block_size=4)
    with pytest.raises(RequestTooLong, match=r"Prompt 1: The request may need 17 tokens"):
        llm.generate(["abc", "abcdefgh"], [GREEDY, SamplingParams(max_tokens=10)])
    assert is_idle(llm)
    assert llm.generate("abcde", GREEDY)[0].outputs[0].token_ids == plain(list(b"abcde"))


def test_output_is_cut_at_max_model_len(llm):
    short = make(max_model_len=20)
    output = short.generate("x" * 15, SamplingParams(temperature=0, max_tokens=100))[0].outputs[0]
    assert (len(output.token_ids), output.finish_reason) == (5, "length")
    with pytest.raises(RequestTooLong, match="20 tokens and max_model_len is 20"):
        short.generate("x" * 20, GREEDY)
    assert len(short.generate("x" * 19, GREEDY)[0].outputs[0].token_ids) == 1


def test_the_same_calls_give_the_same_samples_and_another_seed_others():
    def sampled(**options):
        llm = make(**options)
        return [llm.generate("once", SamplingParams(max_tokens=20))[0].outputs[0].token_ids for _ in range(2)]

    assert sampled() == sampled() == sampled(seed=0, cache="naive", max_num_seqs=1)
    assert sampled()[0] != sampled()[1], "two requests draw different numbers"
    assert sampled(seed=1) != sampled(seed=2)
    assert sampled(seed=None) != sampled(seed=None)


def test_a_seed_of_its_own_makes_a_request_independent_of_the_engines_seed_and_of_company(llm):
    params = SamplingParams(max_tokens=15, seed=5)
    expected = plain(list(b"once"), params)
    assert llm.generate("once", params)[0].outputs[0].token_ids == expected
    outputs = make(seed=9).generate(["x", "once", "yy"], [SamplingParams(), params, GREEDY])
    assert outputs[1].outputs[0].token_ids == expected


class Standin:
    """Takes the model's place, with a function of (batch, store) for its logits."""

    def __init__(self, logits):
        self.config, self.device, self.dtype = MODEL.config, MODEL.device, MODEL.dtype
        self.logits = logits

    def __call__(self, batch, store):
        return self.logits(batch, store)


def text_of(prompt: str, n: int = 200) -> tuple[list[int], str]:
    tokens = plain(list(prompt.encode()), SamplingParams(temperature=0, max_tokens=n))
    return tokens, ByteTokenizer().decode(tokens)


def test_a_stop_string_ends_the_text_before_it_and_keeps_its_tokens(llm):
    tokens, text = text_of("abc", 60)
    stop = text[20:23]
    at = text.find(stop)
    output = llm.generate("abc", SamplingParams(temperature=0, max_tokens=60, stop=["\0never", stop]))[
        0
    ].outputs[0]
    assert output.text == text[:at]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert output.token_ids == tokens[: len(output.token_ids)]
    assert stop in ByteTokenizer().decode(output.token_ids)
    assert is_idle(llm)


def test_a_stop_string_in_the_last_token_allowed_is_still_a_stop(llm):
    _, text = text_of("abc", 9)
    output = llm.generate("abc", SamplingParams(temperature=0, max_tokens=9, stop=text[-2:]))[0].outputs[0]
    expected = text.find(text[-2:])
    assert (output.text, output.finish_reason) == (text[:expected], "stop")


def test_a_stop_token_stands_in_the_tokens_and_not_in_the_text(llm):
    tokens, _ = text_of("abc", 9)
    output = llm.generate("abc", SamplingParams(temperature=0, max_tokens=9, stop_token_ids=[tokens[4]]))[0]
    first = tokens.index(tokens[4])
    assert output.outputs[0].token_ids == tokens[: first + 1]
    assert output.outputs[0].text == ByteTokenizer().decode(tokens[:first])
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", tokens[4])


def test_logprobs_are_those_of_the_models_own_distribution(llm):
    params = SamplingParams(temperature=0.5, seed=1, max_tokens=4, logprobs=3, logit_bias={7: 50})
    output = llm.generate([1, 2, 3], params)[0].outputs[0]
    tokens = [1, 2, 3]
    total = 0.0
    for token, at in zip(output.token_ids, output.logprobs, strict=True):
        with torch.inference_mode():
            from minivllm.memory.store import RecomputeStore
            from minivllm.model.batch import Batch

            row = MODEL(Batch.pack([(0, tokens, 0)]), RecomputeStore())[0].log_softmax(-1)
        best = row.topk(3).indices.tolist()
        assert set(at) == {token, *best}
        assert all(at[i].rank == rank for rank, i in enumerate(best, start=1))
        assert at[token].logprob == pytest.approx(row[token].item())
        assert at[token].rank == int((row > row[token]).sum()) + 1
        total += row[token].item()
        tokens.append(token)
    assert output.token_ids[0] == 7, "the bias decides, and is not in the logprobs"
    assert output.cumulative_logprob == pytest.approx(total)
    without = llm.generate([1], GREEDY)[0].outputs[0]
    assert (without.logprobs, without.cumulative_logprob) == (None, None)


@settings(max_examples=25)
@given(
    text=st.text(min_size=1, max_size=12), stop=st.sampled_from([(), "a", "\ufffd"]), seed=st.integers(0, 99)
)
def test_a_stream_joined_is_the_text_of_generate(text, stop, seed):
    llm = make(num_blocks=200)
    params = SamplingParams(max_tokens=20, seed=seed, stop=stop)
    pieces = list(llm.stream(text, params))
    assert "".join(pieces) == llm.generate(text, params)[0].outputs[0].text
    assert all(pieces), "no empty piece"
    assert is_idle(llm)


class Spelled(ByteTokenizer):
    """Every token is one byte of a long text, so that characters are cut apart."""

    def __init__(self, text: str):
        self.bytes = text.encode()

    def decode(self, token_ids, *, skip_special_tokens=True):
        return bytes(self.bytes[i] for i in token_ids).decode("utf-8", errors="replace")


def counting(batch, store):
    """A model whose next token is the position: with `Spelled` it recites its text."""
    logits = torch.zeros(len(batch.slices), 307)
    for row, piece in enumerate(batch):
        logits[row, piece.seq_len - 1] = 9.0
    return logits


def test_a_stream_has_no_broken_character():
    text = "naïve café 🙂 日本語 ok"
    llm = make(cache="recompute")
    llm._tokenizer = Spelled(text)
    llm.engine.model = Standin(counting)
    pieces = list(llm.stream([0], SamplingParams(temperature=0, max_tokens=len(text.encode()))))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    cut = list(llm.stream([0], SamplingParams(temperature=0, max_tokens=len("naïve café ".encode()) + 2)))
    assert "".join(cut) == "naïve café \ufffd", "cut in the middle of a character, and said so"


def test_a_stream_checks_at_once_and_queues_at_the_first_piece(llm):
    with pytest.raises(InvalidPrompt):
        llm.stream("")
    never_started = llm.stream("abc", GREEDY)
    assert is_idle(llm)
    del never_started
    begun = llm.stream("abc", GREEDY)
    first = next(begun)
    assert llm.engine.has_unfinished()
    begun.close()
    assert is_idle(llm)
    assert text_of("abc", 12)[1].startswith(first)


def test_a_stream_returns_the_whole_output(llm):
    def keep():
        kept.append((yield from llm.stream("abc", GREEDY)))

    kept: list[RequestOutput] = []
    assert "".join(keep()) == text_of("abc", 12)[1]
    assert kept[0].outputs[0].token_ids == plain(list(b"abc"))
    assert kept[0].finished


def test_generate_streams_and_added_requests_share_the_engine(llm):
    added = llm.add_request("added", GREEDY)
    stream = llm.stream("streamed", GREEDY)
    pieces = [next(stream)]
    generated = llm.generate(["one", "two"], GREEDY)
    pieces += stream
    assert "".join(pieces) == text_of("streamed", 12)[1]
    assert [o.outputs[0].token_ids for o in generated] == [plain(list(b"one")), plain(list(b"two"))]
    outputs = []
    while llm.has_unfinished_requests():
        outputs += llm.step()
    assert {o.request_id for o in outputs} == {added}
    assert outputs[-1].finished
    assert outputs[-1].outputs[0].token_ids == plain(list(b"added"))
    assert is_idle(llm)


def test_step_gives_each_added_request_whole_from_its_start(llm):
    ids = [llm.add_request(text, GREEDY) for text in ("abc", "de")]
    seen: dict[int, list[list[int]]] = {i: [] for i in ids}
    while llm.has_unfinished_requests():
        for output in llm.step():
            seen[output.request_id].append(list(output.outputs[0].token_ids))
    for i, text in zip(ids, (b"abc", b"de"), strict=True):
        tokens = plain(list(text))
        assert seen[i] == [tokens[:n] for n in range(1, 13)]
    assert llm.step() == []
    assert is_idle(llm)


@pytest.mark.parametrize(
    "when", ["before the first step", "running", "while it waits", "twice", "finished", "unread"]
)
def test_a_request_can_be_aborted_in_every_state(when):
    llm = make(max_num_seqs=1)
    first, second = llm.add_request("abc", GREEDY), llm.add_request("de", GREEDY)
    if when == "before the first step":
        assert llm.abort(first).outputs[0].token_ids == []
    elif when == "while it waits":
        llm.step()
        assert llm.abort(second).outputs[0].finish_reason == "abort"
    elif when in ("running", "twice"):
        llm.step()
        llm.step()
        output = llm.abort(first)
        assert (output.finished, output.outputs[0].finish_reason) == (True, "abort")
        assert output.outputs[0].token_ids == plain(list(b"abc"))[:2]
        assert output.outputs[0].text == ByteTokenizer().decode(output.outputs[0].token_ids)
        if when == "twice":
            assert llm.abort(first) is None
    elif when == "finished":
        while not any(o.finished for o in llm.step()):
            pass
        assert llm.abort(first) is None
    elif when == "unread":
        llm.generate("other", GREEDY)
        assert llm.abort(first) is None, "it has ended, and step still has it to give"
    assert llm.abort(12345) is None
    assert llm.abort("nonsense") is None
    finished = set()
    while llm.has_unfinished_requests():
        finished |= {o.request_id for o in llm.step() if o.finished}
    expected = {first, second} - {second if when == "while it waits" else first}
    if when == "unread":
        expected |= {first}
    assert finished == expected
    assert is_idle(llm)


def test_chat_puts_conversations_into_the_models_format(llm):
    conversation = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    ids = ByteTokenizer().apply_chat_template(conversation)
    assert llm.chat(conversation, GREEDY)[0].prompt_token_ids == ids
    both = llm.chat([conversation, conversation[1:]], GREEDY)
    assert [o.outputs[0].token_ids for o in both] == [
        plain(ids),
        plain(ByteTokenizer().apply_chat_template(conversation[1:])),
    ]


@pytest.mark.parametrize(
    "messages",
    [
        "hello",
        [],
        [[]],
        None,
        [{"role": "user"}],
        [{"role": "user", "content": 3}],
        [{"content": "x"}],
        ["hello"],
        [[{"role": "user", "content": "a"}], "b"],
        {"role": "user", "content": "a"},
    ],
    ids=str,
)
def test_a_conversation_that_is_none_is_refused(llm, messages):
    with pytest.raises(InvalidPrompt, match=r"role"):
        llm.chat(messages, GREEDY)
    assert is_idle(llm)


def test_a_closed_engine_says_so_and_closing_twice_is_no_fault():
    with make() as llm:
        request_id = llm.add_request("abc", GREEDY)
        stream = llm.stream("abc", GREEDY)
        late = llm.stream("abc", GREEDY)
        begun = next(stream)
    llm.close()
    assert "".join([begun, *stream]) == begun, "the stream ends with what it had"
    for call in (
        lambda: llm.generate("a"),
        lambda: llm.generate([]),
        lambda: llm.stream("a"),
        lambda: next(late),
        lambda: llm.add_request("a"),
        lambda: llm.chat([{"role": "user", "content": "a"}]),
        lambda: llm.engine,
    ):
        with pytest.raises(EngineClosed, match="closed"):
            call()
    assert llm.abort(request_id) is None
    assert llm.get_tokenizer().encode("a") == [97]


def fails_at(llm: Any, call: int, error: BaseException) -> None:
    """Let the model raise at its n-th call from now."""
    model, calls = llm.engine.model, iter(range(1, 1000))

    def broken(batch, store):
        if next(calls) == call:
            raise error
        return model(batch, store)

    llm.engine.model = Standin(broken)


@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt()], ids=["error", "ctrl-c"])
def test_after_an_error_within_generate_nothing_is_left_and_added_requests_go_on(error):
    llm = make()
    added = llm.add_request("added", GREEDY)
    fails_at(llm, 4, error)
    with pytest.raises(type(error)):
        llm.generate(["one", "two"], GREEDY)
    outputs = []
    while llm.has_unfinished_requests():
        outputs += llm.step()
    assert (outputs[-1].request_id, outputs[-1].outputs[0].token_ids) == (added, plain(list(b"added")))
    assert llm.generate("three", GREEDY)[0].outputs[0].token_ids == plain(list(b"three"))
    assert is_idle(llm)


def with_sick_request(llm: Any, request_id: int) -> None:
    """From its second token on, a request's logits are NaN."""
    model = llm.engine.model

    def sick(batch, store):
        logits = model(batch, store)
        for row, piece in enumerate(batch):
            if piece.seq_id == request_id and piece.seq_len > 4:
                logits[row] = math.nan
        return logits

    llm.engine.model = Standin(sick)


def test_a_request_ended_by_bad_logits_is_given_by_step_as_aborted(llm):
    with_sick_request(llm, 1)
    ids = [llm.add_request(text, GREEDY) for text in ("abc", "def", "ghi")]
    last: dict[int, RequestOutput] = {}
    errors = []
    while llm.has_unfinished_requests():
        try:
            last |= {o.request_id: o for o in llm.step()}
        except InvalidLogits as error:
            errors.append(error.request_id)
    assert errors == [1]
    assert [last[i].outputs[0].finish_reason for i in ids] == ["length", "abort", "length"]
    assert last[0].outputs[0].token_ids == plain(list(b"abc"))
    assert is_idle(llm)


@pytest.mark.parametrize("call", ["generate", "step", "stream"])
def test_a_listener_cannot_start_a_step_within_a_step(llm, call):
    other = llm.stream("zz", GREEDY)
    next(other)
    calls: dict[str, Any] = {
        "generate": lambda: llm.generate("x", GREEDY),
        "step": llm.step,
        "stream": lambda: list(llm.stream("y", GREEDY)),
    }
    llm.engine.on_step = lambda step: calls[call]()
    with pytest.raises(EngineBusy):
        llm.generate("abc", GREEDY)
    llm.engine.on_step = None
    assert llm.generate("abc", GREEDY)[0].outputs[0].token_ids == plain(list(b"abc"))
    other.close()
    assert is_idle(llm)


def test_numbers_of_any_kind_are_taken_as_pythons_own(llm):
    half = Fraction(1, 2)
    numbers: dict[str, Any] = {
        "temperature": np.float16(0.5),
        "seed": np.int64(3),
        "max_tokens": np.int32(6),
        "presence_penalty": half,
        "frequency_penalty": np.float32(0.5),
        "repetition_penalty": Fraction(5, 4),
        "logit_bias": {np.int64(5): half},
    }
    params = SamplingParams(**numbers)
    same = SamplingParams(
        temperature=0.5, seed=3, max_tokens=6, presence_penalty=0.5, frequency_penalty=0.5,
        repetition_penalty=1.25, logit_bias={5: 0.5},
    )  # fmt: skip
    assert params == same
    assert {type(value) for value in vars(params).values()} == {type(value) for value in vars(same).values()}
    assert llm.generate("abc", params)[0].outputs == llm.generate("abc", same)[0].outputs


def test_outputs_given_by_step_do_not_change_afterwards(llm):
    llm.add_request("abc", SamplingParams(temperature=0, max_tokens=5, logprobs=1))
    first = llm.step()[0]
    before = (
        list(first.outputs[0].token_ids),
        len(first.metrics.token_times),
        len(first.outputs[0].logprobs),
    )
    while llm.has_unfinished_requests():
        llm.step()
    after = (list(first.outputs[0].token_ids), len(first.metrics.token_times), len(first.outputs[0].logprobs))
    assert before == after == (before[0], 1, 1)


def test_a_call_that_is_refused_changes_no_later_sample():
    def sample(llm):
        return llm.generate("once", SamplingParams(max_tokens=20))[0].outputs[0].token_ids

    tried = make()
    with pytest.raises(InvalidPrompt):
        tried.generate(["a", ""], GREEDY)
    tried.stream("never begun", GREEDY)
    assert sample(tried) == sample(make())


def test_closing_leaves_nothing_to_wait_for(llm):
    llm.add_request("abc", SamplingParams(temperature=0, max_tokens=2))
    llm.generate("abcdef", GREEDY)
    assert llm.has_unfinished_requests()
    llm.close()
    assert not llm.has_unfinished_requests()


def test_a_tokenizer_that_fails_once_loses_no_request(llm):
    ids = [llm.add_request(text, SamplingParams(temperature=0, max_tokens=3)) for text in ("abc", "de")]
    decode, calls = llm._tokenizer.decode, itertools.count()

    def fails(*arguments, **options):
        if next(calls) == 5:
            raise RuntimeError("no such byte")
        return decode(*arguments, **options)

    llm._tokenizer.decode = fails
    finished, errors = set(), 0
    for _ in range(30):
        try:
            finished |= {o.request_id for o in llm.step() if o.finished}
        except RuntimeError:
            errors += 1
        if not llm.has_unfinished_requests():
            break
    assert errors == 1
    assert finished == set(ids)
    assert is_idle(llm)


@pytest.mark.parametrize("wrong", [[], {}, None, -1, 0.5], ids=str)
def test_aborting_what_is_no_request_does_no_harm(llm, wrong):
    assert llm.abort(wrong) is None


def test_text_held_back_for_a_stop_string_is_given_at_the_end(llm):
    _, text = text_of("abc", 6)
    params = SamplingParams(temperature=0, max_tokens=6, stop=text[-1] + "zz")
    assert llm.generate("abc", params)[0].outputs[0].text == text
    assert "".join(llm.stream("abc", params)) == text


def recite(text: str, **options) -> Any:
    """The output of a model whose n-th token is the n-th byte of the text."""
    llm = make(cache="recompute")
    llm._tokenizer = Spelled(text)
    llm.engine.model = Standin(counting)
    return llm.generate([0], SamplingParams(temperature=0, **options))[0].outputs[0]


def test_a_stop_string_may_end_first_behind_min_tokens():
    assert recite("xabcabc", max_tokens=7, stop="abc", min_tokens=3).text == "xabc"
    assert recite("xabcabc", max_tokens=7, stop="abc", min_tokens=4).text == "xabc"
    assert recite("xabcabc", max_tokens=7, stop="bc", min_tokens=3).stop_reason == "bc"
    assert len(recite("xabcabc", max_tokens=7, stop="c", min_tokens=3).token_ids) == 4
    assert len(recite("xabcabc", max_tokens=7, stop="c", min_tokens=4).token_ids) == 7


def test_bytes_that_no_character_came_of_are_text_too_and_nothing_follows_a_stop():
    text = "ab🙂"
    cut = len(text.encode()) - 1
    assert recite(text, max_tokens=cut).text == "ab\ufffd"
    stopped = recite(text, max_tokens=cut, stop="\ufffd")
    assert (stopped.text, stopped.finish_reason, stopped.stop_reason) == ("ab", "stop", "\ufffd")
    assert recite(text, max_tokens=cut, stop="b").text == "a"


def test_an_added_request_with_bad_logits_does_not_take_generate_down_with_it(llm, caplog):
    with_sick_request(llm, 0)
    added = llm.add_request("def", GREEDY)
    assert llm.generate("abc", GREEDY)[0].outputs[0].token_ids == plain(list(b"abc"))
    assert "Request 0 was ended" in caplog.text
    (output,) = llm.step()
    assert (output.request_id, output.outputs[0].finish_reason) == (added, "abort")
    with_sick_request(llm, 2)
    with pytest.raises(InvalidLogits, match="Request 2"):
        llm.generate("def", GREEDY)
    assert is_idle(llm)


@pytest.mark.parametrize("stop", [(), "text"], ids=["length", "stop string"])
@pytest.mark.parametrize("at", range(6))
def test_a_listener_that_fails_delays_nothing_and_loses_nothing(llm, at, stop):
    _, text = text_of("abc", 6)
    params = SamplingParams(temperature=0, max_tokens=6, stop=[text[-1]] if stop else [])
    expected = llm.generate("abc", params)[0].outputs[0]
    first = llm.engine.num_steps

    def listener(step):
        if step.index == first + at:
            raise ValueError("the listener's fault")

    llm.engine.on_step = listener
    llm.add_request("abc", params)
    outputs = []
    for _ in range(20):
        with suppress(ValueError):
            outputs += llm.step()
        if not llm.has_unfinished_requests():
            break
    assert outputs[-1].outputs[0] == expected
    assert is_idle(llm)


def test_a_progress_bar_comes_when_it_is_asked_for(llm, capsys):
    llm.generate(["a", "b"], GREEDY)
    assert capsys.readouterr().err == ""
    llm.generate(["a", "b"], GREEDY, use_tqdm=True)
    shown = capsys.readouterr().err
    assert "2/2" in shown
    assert "tok/s" in shown
    llm.generate(["a", "b"], GREEDY, use_tqdm=False)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "options, named",
    [
        ({"cache": "pagd"}, "cache='pagd'.*recompute, naive, contiguous, paged"),
        ({"cache": None}, "cache=None"),
        ({"scheduler": "eager"}, "scheduler='eager'.*static, continuous, chunked"),
        ({"scheduler": "chunked", "cache": "naive"}, "scheduler='chunked' .*cache='naive'.*cache='paged'"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens=0"),
        ({"long_prefill_token_threshold": 0}, "long_prefill_token_threshold=0"),
        ({"max_num_batched_tokens": 5, "scheduler": "static"}, "max_num_batched_tokens=5 .*'chunked'"),
        ({"prefer_prefill": True, "cache": "naive"}, "prefer_prefill=True .*'chunked'"),
        ({"prefer_prefill": 1}, "prefer_prefill=1 .*True, False"),
        ({"prefix_cache": "tree"}, "prefix_cache='tree'.*hash, radix"),
        ({"prefix_cache": "hash", "cache": "contiguous"}, "prefix_cache='hash' .*cache='paged'"),
        ({"enable_prefix_caching": True, "cache": "naive"}, "enable_prefix_caching=True .*cache='paged'"),
        ({"enable_prefix_caching": False, "prefix_cache": "hash"}, "contradict"),
        ({"enable_prefix_caching": "yes"}, "enable_prefix_caching='yes'"),
        ({"sharing": False, "prefix_cache": "hash"}, "prefix_cache='hash' .*sharing=False"),
        ({"sharing": False, "preemption": "swap", "swap_space": 10**6}, "preemption='swap' .*sharing=False"),
        ({"sharing": True, "cache": "naive"}, "sharing=True .*cache='paged'"),
        ({"attention": "flash"}, "attention='flash'"),
        ({"preemption": "swap"}, "preemption='swap' needs swap_space"),
        ({"preemption": "swap", "swap_space": 0}, "preemption='swap' needs swap_space"),
        ({"preemption": "swap", "swap_space": 5}, "swap_space=5 .*a block takes 21504 bytes"),
        ({"preemption": "swap", "swap_space": -5}, "swap_space=-5"),
        ({"preemption": "swap", "swap_space": 2**62}, "no room for.*swap_space"),
        ({"preemption": "swap", "cache": "naive"}, "preemption='swap' .*cache='paged'"),
        ({"swap_space": 10**6}, "swap_space=1000000 is for preemption='swap'"),
        ({"preemption": "forget"}, "preemption='forget'.*recompute, swap"),
        ({"reservation": "min", "cache": "contiguous"}, "reservation='min'.*max, pow2, oracle"),
        ({"reservation": "max"}, "reservation='max' is not possible with cache='paged'.*cache='contiguous'"),
        ({"block_size": 16, "cache": "naive"}, "block_size=16 .*cache='naive'.*cache='paged'"),
        ({"num_blocks": 9, "cache": "contiguous"}, "num_blocks=9 .*cache='contiguous'"),
        ({"watermark": 0.1, "cache": "contiguous"}, "watermark=0.1 .*'naive' or 'paged'"),
        ({"watermark": 0.1, "cache": "recompute"}, "watermark=0.1"),
        ({"block_size": 0}, "block_size=0.*from 1"),
        ({"block_size": 2.5}, "block_size=2.5"),
        ({"block_size": True}, "block_size=True"),
        ({"num_blocks": 0}, "num_blocks=0"),
        ({"num_blocks": -3}, "num_blocks=-3"),
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        ({"max_num_seqs": None}, "max_num_seqs=None"),
        ({"max_model_len": 1}, "max_model_len=1.*from 2"),
        ({"max_model_len": 1025}, "max_model_len=1025.*longest context is 1024"),
        ({"watermark": 1.0}, "watermark=1.0.*from 0 to below 1"),
        ({"watermark": "x"}, "watermark='x'"),
        ({"watermark": math.nan}, "watermark=nan"),
        ({"kv_cache_memory_bytes": 0}, "kv_cache_memory_bytes=0"),
        ({"kv_cache_memory_bytes": 100}, "kv_cache_memory_bytes=100.*a block takes 21504 bytes"),
        ({"kv_cache_memory_bytes": 100, "cache": "naive"}, "one token takes 1344 bytes"),
        ({"kv_cache_memory_bytes": "4GB"}, "kv_cache_memory_bytes='4GB'"),
        ({"kv_cache_memory_bytes": 2**62}, "no room for 4,611,686,018,427,371,520 bytes"),
        ({"num_blocks": 2**50}, "no room for"),
        ({"gpu_memory_utilization": 0.5}, "gpu_memory_utilization is not possible on cpu"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization=1.5"),
        ({"kv_cache_memory_bytes": 2**62, "cache": "naive"}, "no room for 4,611,686,018,427,387,904 bytes"),
        ({"scheduling_policy": "lottery"}, "scheduling_policy='lottery'.*fcfs, priority"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": "x"}, "seed='x'"),
        ({"dtype": "float16"}, "loaded already"),
        ({"attention": "torch", "cache": "naive"}, "attention='torch' .*cache='paged'"),
        ({"tokenizer": 5}, "tokenizer=5"),
    ],
    ids=str,
)
def test_an_option_that_cannot_be_had_is_refused_by_name(options, named):
    with pytest.raises(InvalidOption, match=named):
        make(**options)


def test_options_are_refused_before_a_model_is_looked_for():
    with pytest.raises(InvalidOption, match="cache"):
        LLM("no/such-model", cache="x")
    with pytest.raises(MinivllmError):
        LLM("./no/such/folder")
    with pytest.raises(InvalidOption, match="tokenizer"):
        LLM(MODEL)


def test_defaults_follow_from_the_cache():
    chosen = {
        cache: EngineArgs(cache=cache).resolve(MODEL)
        for cache in ("recompute", "naive", "contiguous", "paged")
    }
    assert [a.scheduler for a in chosen.values()] == ["continuous"] * 3 + ["chunked"]
    assert [a.max_num_batched_tokens for a in chosen.values()] == [None] * 3 + [512]
    assert EngineArgs(max_num_seqs=700).resolve(MODEL).max_num_batched_tokens == 700
    assert EngineArgs(enable_prefix_caching=True).resolve(MODEL).prefix_cache == "hash"
    assert [a.prefix_cache for a in chosen.values()] == [None] * 4
    assert [a.sharing for a in chosen.values()] == [None] * 3 + [True]
    assert {a.max_model_len for a in chosen.values()} == {1024}
    assert [a.block_size for a in chosen.values()] == [None, None, None, 16]
    assert [a.reservation for a in chosen.values()] == [None, None, "max", None]
    assert [a.watermark for a in chosen.values()] == [None, 0.01, None, 0.01]
    assert chosen["paged"].num_blocks == 64 * 1024 // 16, "no more than max_num_seqs requests can use"
    assert chosen["naive"].kv_cache_memory_bytes == 64 * 1024 * 1344
    assert EngineArgs(num_blocks=7).resolve(MODEL).kv_cache_memory_bytes == 7 * 16 * 1344
    again = chosen["paged"].resolve(MODEL)
    assert again == chosen["paged"]


def test_one_budget_gives_each_cache_as_many_slots_as_it_pays_for():
    budget = 1344 * 1000 + 5
    slots = {
        cache: make(cache=cache, kv_cache_memory_bytes=budget).engine.manager.snapshot().num_slots
        for cache in ("naive", "contiguous", "paged")
    }
    assert slots == {"naive": 1000, "contiguous": 1000, "paged": 62 * 16}


def test_the_watermark_is_whole_blocks():
    def spare(**options) -> int:
        return make(**options).engine.scheduler.watermark

    assert spare(num_blocks=200) == 2 * 16
    assert spare(num_blocks=99) == 16, "rounded up: never none, unless none is asked for"
    assert spare(num_blocks=10, watermark=0.25) == 3 * 16
    assert spare(num_blocks=10, watermark=0.0) == 0
    assert spare(cache="naive", kv_cache_memory_bytes=1344 * 1000) == 10
    assert spare(cache="naive", kv_cache_memory_bytes=1344 * 250) == 3


def test_the_real_model_answers_in_a_chat(smollm2, smollm2_tokenizer):
    llm = LLM(smollm2, tokenizer=smollm2_tokenizer)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    output = llm.chat(question, SamplingParams(temperature=0, max_tokens=40))[0].outputs[0]
    assert "Paris" in output.text
    assert (output.finish_reason, output.stop_reason) == ("stop", None)
    assert "<|im_end|>" not in output.text
    stopped = llm.chat(question, SamplingParams(temperature=0, max_tokens=40, stop="Par"))[0].outputs[0]
    assert stopped.text == output.text[: output.text.find("Par")]


def test_an_interrupt_between_a_last_token_and_its_text_loses_neither(llm):
    tokenizer = llm.get_tokenizer()
    request_id = llm.add_request("abc", SamplingParams(temperature=0, max_tokens=1))
    state = llm._states[request_id]
    read, calls = state.read_new_tokens, iter([KeyboardInterrupt()])

    def interrupted():
        for error in calls:
            raise error
        return read()

    state.read_new_tokens = interrupted
    with pytest.raises(KeyboardInterrupt):
        llm.step()
    assert llm.has_unfinished_requests()
    (output,) = llm.step()
    assert output.finished
    assert output.outputs[0].text == tokenizer.decode(output.outputs[0].token_ids)
    assert not llm.has_unfinished_requests()
    assert is_idle(llm)


def press_at(line: int, work: Callable[[], Any]) -> int:
    """Run work and press Ctrl-C at the n-th line of the package that it runs; returns how many there were."""
    count, package = 0, str(Path(minivllm.__file__).parent)

    def trace(frame, event, argument):
        nonlocal count
        if not frame.f_code.co_filename.startswith(package):
            return None
        if event == "line":
            count += 1
            if count == line:
                signal.raise_signal(signal.SIGINT)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("call", ["generate", "stream"])
@pytest.mark.parametrize(
    "cache", [{"cache": "naive"}, {"cache": "paged", "num_blocks": 9, "block_size": 2}], ids=str
)
def test_ctrl_c_at_any_line_leaves_nothing_behind(cache, call):
    """Ninety lines, evenly spread over all that a call runs; an odd step, so that no loop hides some."""
    prompts, params = [[1, 2], [3, 4, 5], [7] * 9], SamplingParams(temperature=0, max_tokens=4)
    expected = [plain(p, params) for p in prompts]

    def work(llm: Any) -> None:
        if call == "generate":
            llm.generate(prompts, params)
        else:
            list(llm.stream(prompts[1], params))

    total = press_at(-1, lambda: work(make(max_model_len=16, **cache)))
    for line in range(1, total, max(1, total // 90) | 1):
        llm = make(max_model_len=16, **cache)
        press_at(line, partial(work, llm))
        assert is_idle(llm), f"line {line}"
        assert [o.outputs[0].token_ids for o in llm.generate(prompts, params)] == expected, f"line {line}"


def test_a_model_by_name_has_the_weights_of_its_seed_and_the_tokenizer_that_is_given():
    class Own(ByteTokenizer):
        pass

    own = Own()
    for seed, expected in ((0, 0), (1, 1), (None, 0)):
        llm = LLM("random:tiny-qwen3", seed=seed, tokenizer=own, max_num_seqs=1)
        weights = load_model("random:tiny-qwen3", seed=expected).embed_tokens.weight
        assert torch.equal(llm.engine.model.embed_tokens.weight, weights)
        assert llm.get_tokenizer() is own
    assert isinstance(LLM("random:tiny-qwen3", max_num_seqs=1).get_tokenizer(), ByteTokenizer)
