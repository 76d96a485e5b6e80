"""`LLM` with several answers, beam search, prefix cache, priorities and swap: what a caller sees."""

from __future__ import annotations

from typing import Any

import pytest

from minivllm import LLM, BeamSearchParams, SamplingParams
from minivllm.decoding.generate import generate
from minivllm.errors import EngineBusy, InvalidOption, InvalidPrompt, PrefixCacheInUse, RequestTooLong
from minivllm.memory.naive_store import NaiveStore
from minivllm.model.loader import load_model
from minivllm.model.tokenizer import ByteTokenizer

MODEL = load_model("random:tiny-llama", dtype="float64", device="cpu")
THREE = SamplingParams(n=3, temperature=0.9, seed=7, max_tokens=11)
TWO_OF_TWO: dict[str, Any] = {"beam_width": 2, "n": 2}
MEMORIES: dict[str, dict[str, Any]] = {
    "recompute": {"cache": "recompute"},
    "naive": {"cache": "naive"},
    "contiguous": {"cache": "contiguous"},
    "not-shared": {"sharing": False},
    "shared": {},
    "static": {"scheduler": "static"},
    "hash": {"enable_prefix_caching": True, "block_size": 3},
    "chunks-of-3": {"max_num_batched_tokens": 3, "block_size": 3},
    "tight": {"num_blocks": 16, "block_size": 3, "max_num_seqs": 9},
    "swap": {"num_blocks": 16, "block_size": 3, "preemption": "swap", "swap_space": 10**6},
}


def make(**options: Any) -> Any:
    return LLM(MODEL, **{"tokenizer": ByteTokenizer(), "max_model_len": 64, **options})


def plain(prompt: str, **params: Any) -> list[int]:
    return list(generate(MODEL, NaiveStore(), list(prompt.encode()), SamplingParams(**params)))


def is_idle(llm: Any) -> bool:
    llm.engine.manager.check_integrity()
    nothing = llm.engine.manager.snapshot().held == 0 and not llm.engine.has_unfinished()
    return nothing and not llm._states and not llm._added and not llm._news


def tokens(output: Any) -> list[list[int]]:
    return [list(o.token_ids) for o in output.outputs]


@pytest.mark.parametrize("memory", MEMORIES)
def test_answer_i_is_what_seed_plus_i_gives_alone_on_every_memory(memory):
    llm = make(**MEMORIES[memory])
    prompts = ["hello wor", "hello", "bye"]
    outputs = llm.generate(prompts, THREE)
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = [plain(prompt, temperature=0.9, seed=7 + i, max_tokens=11) for i in range(3)]
        assert tokens(output) == expected
        assert [o.index for o in output.outputs] == [0, 1, 2]
        assert len({tuple(t) for t in tokens(output)}) == 3, "the answers differ, or this shows nothing"
    assert is_idle(llm)


@pytest.mark.parametrize("memory", MEMORIES)
def test_answers_end_each_for_its_own_reason(memory):
    """A stop string ends one of them while the others go on with its blocks."""
    alone = [plain("hello", temperature=0.9, seed=7 + i, max_tokens=11) for i in range(3)]
    texts = [ByteTokenizer().decode(t) for t in alone]
    stop = next(
        t[i : i + 2] for t in texts for i in range(3, 8) if sum(t[i : i + 2] in u for u in texts) == 1
    )
    llm = make(**MEMORIES[memory])
    params = SamplingParams(n=3, temperature=0.9, seed=7, max_tokens=11, stop=stop, logprobs=1)
    output = llm.generate("hello", params)[0]
    for o, text in zip(output.outputs, texts, strict=True):
        assert o.text == text.split(stop)[0]
        assert (o.finish_reason, o.stop_reason) == (("stop", stop) if stop in text else ("length", None))
        assert o.logprobs is not None
        assert len(o.logprobs) == len(o.token_ids)
        assert o.cumulative_logprob == pytest.approx(
            sum(at[t].logprob for at, t in zip(o.logprobs, o.token_ids, strict=True))
        )
    assert is_idle(llm)


def test_what_was_shared_is_reported_and_nothing_where_nothing_could_be():
    llm = make(block_size=4)
    one, three = llm.generate(["hello world", "hello world"], [SamplingParams(max_tokens=5), THREE])
    assert one.sharing is None
    # 11 tokens of prompt: 2 full blocks are shared to the end, two of three copy the third; 21 tokens each
    assert (three.sharing.num_blocks, three.sharing.num_blocks_without_sharing) == (2 + 3 * 4, 3 * 6)
    assert three.sharing.num_copies == 2
    assert make(cache="naive").generate("hello", THREE)[0].sharing is None


def test_steps_give_all_answers_as_they_grow_and_abort_ends_them_all():
    for options in ({}, {"cache": "naive"}):
        llm = make(**options)
        first = llm.add_request("hello", THREE)
        llm.add_request("other", SamplingParams(max_tokens=3, temperature=0))
        seen = [o for o in llm.step() if o.request_id == first]
        assert [len(t) for o in seen for t in tokens(o)] == [1, 1, 1]
        ended = llm.abort(first)
        assert [o.finish_reason for o in ended.outputs] == ["abort"] * 3
        assert llm.abort(first) is llm.abort(99) is llm.abort("x") is None
        while llm.has_unfinished_requests():
            llm.step()
        assert is_idle(llm)


@pytest.mark.parametrize("memory", ["shared", "static", "hash", "chunks-of-3", "tight", "swap"])
def test_beams_are_the_same_on_every_memory_that_can_fork(memory):
    params = BeamSearchParams(beam_width=3, max_tokens=7, length_penalty=0.5)
    expected = make(block_size=2).beam_search("hello", params)[0]
    llm = make(**MEMORIES[memory])
    found = llm.beam_search(["hello", "hello wor", "hello"], params)
    for i in (0, 2):
        assert tokens(found[i]) == tokens(expected)
        assert [o.score for o in found[i].outputs] == pytest.approx([o.score for o in expected.outputs])
    scores = [o.score for o in expected.outputs]
    assert scores == sorted(scores, reverse=True)
    assert all(o.score == pytest.approx(o.cumulative_logprob / 7**0.5) for o in expected.outputs)
    assert all(o.text == ByteTokenizer().decode(o.token_ids) for o in expected.outputs)
    assert expected.sharing.num_blocks < expected.sharing.num_blocks_without_sharing
    assert is_idle(llm)


def test_a_beam_search_beside_other_requests_under_way_and_aborted():
    llm = make(block_size=2)
    params = BeamSearchParams(beam_width=4, max_tokens=9)
    alone = make().generate("bye", SamplingParams(temperature=0, max_tokens=9))[0]
    search, other = (
        llm.add_request("hello", params),
        llm.add_request("bye", SamplingParams(temperature=0, max_tokens=9)),
    )
    for _ in range(4):
        llm.step()
    ended = llm.abort(search)
    assert [len(o.token_ids) for o in ended.outputs] == [4] * 4
    assert {o.finish_reason for o in ended.outputs} == {"abort"}
    done: dict[int, Any] = {}
    while llm.has_unfinished_requests():
        done |= {o.request_id: o for o in llm.step()}
    assert tokens(done[other]) == tokens(alone)
    assert is_idle(llm)


@pytest.mark.parametrize(
    ("call", "error", "named"),
    [
        (lambda: BeamSearchParams(**TWO_OF_TWO), InvalidOption, "n=2 .*beam search"),
        (lambda: make().beam_search("a", SamplingParams(n=4)), InvalidOption, r"BeamSearchParams.*n=4"),
        (lambda: make().beam_search("a", {"beam_width": 4}), InvalidOption, "BeamSearchParams.*dict"),
        (lambda: make().generate("a", BeamSearchParams(2)), InvalidOption, "beam_search"),
        (lambda: make(cache="naive").beam_search("a", BeamSearchParams(2)), InvalidOption, "cache='paged'"),
        (lambda: make(sharing=False).beam_search("a", BeamSearchParams(2)), InvalidOption, "shared"),
        (lambda: SamplingParams(n=0), InvalidOption, "n=0"),
        (lambda: SamplingParams(n=10**9), InvalidOption, "n=1000000000 .*from 1 to 16384"),
        (lambda: make(max_num_seqs=2).generate("a", THREE), InvalidOption, "3 sequences.*max_num_seqs=2"),
        (
            lambda: make(max_num_batched_tokens=2).generate("a", THREE),
            InvalidOption,
            "3 .*max_num_batched_tokens=2",
        ),
        (
            lambda: make(num_blocks=11, block_size=1).generate("a", THREE),
            RequestTooLong,
            "3 sequences of 11 tokens",
        ),
        (lambda: make().stream("a", THREE), InvalidOption, "n=3 .*stream"),
        (
            lambda: make().generate("a", priority=3),
            InvalidOption,
            "priority=3 .*scheduling_policy='priority'",
        ),
        (
            lambda: make(scheduling_policy="priority").generate("a", priority="x"),
            InvalidOption,
            "priority='x'",
        ),
        (
            lambda: make(scheduling_policy="priority").generate(["a", "b"], priority=[1]),
            InvalidOption,
            "1 priorities do not match 2",
        ),
        (lambda: make().reset_prefix_cache(), InvalidOption, "enable_prefix_caching=True"),
        (lambda: make().prefix_cache_stats, InvalidOption, "enable_prefix_caching=True"),
        (lambda: make().generate({"prompt": "a", "cache_salt": 5}), InvalidPrompt, "cache_salt.*5"),
        (lambda: make().generate({"prompt": "a", "cache_salt": ""}), InvalidPrompt, "cache_salt"),
        (lambda: make().generate({"cache_salt": "a"}), InvalidPrompt, "'prompt' or 'prompt_token_ids'"),
    ],
    ids=lambda value: None if callable(value) else value if isinstance(value, str) else value.__name__,
)
def test_bad_use_is_refused_by_name(call, error, named):
    with pytest.raises(error, match=named):
        call()


def test_a_prefix_is_found_again_counted_in_three_ways_and_forgotten_on_reset():
    llm = make(enable_prefix_caching=True, block_size=4)
    greedy = SamplingParams(temperature=0, max_tokens=3)
    first = llm.generate("a system prompt; one", greedy)[0]  # 20 tokens: 5 full blocks, 4 of which can hit
    second = llm.generate("a system prompt; two", greedy)[0]
    again = llm.generate("a system prompt; one", greedy)[0]
    assert [o.num_cached_tokens for o in (first, second, again)] == [0, 16, 16]
    assert tokens(again) == tokens(first) == [plain("a system prompt; one", temperature=0, max_tokens=3)]
    stats = llm.prefix_cache_stats
    assert (stats.block_hit_rate, stats.token_hit_rate, stats.request_hit_rate) == (8 / 15, 32 / 60, 2 / 3)
    llm.reset_prefix_cache()
    assert llm.generate("a system prompt; one", greedy)[0].num_cached_tokens == 0
    llm.add_request("a system prompt; one", greedy)
    llm.step()
    with pytest.raises(PrefixCacheInUse, match="blocks are held"):
        llm.reset_prefix_cache()
    while llm.has_unfinished_requests():
        llm.step()
    assert is_idle(llm)


def test_only_requests_with_the_same_salt_find_each_others_prefixes():
    llm = make(enable_prefix_caching=True, block_size=4)
    greedy = SamplingParams(temperature=0, max_tokens=3)
    salts = ["a", "b", None, "a", None, "b"]
    found = [
        llm.generate({"prompt": "a system prompt", **({"cache_salt": s} if s else {})}, greedy)[0]
        for s in salts
    ]
    assert [o.num_cached_tokens for o in found] == [0, 0, 0, 12, 12, 12]
    assert len({tuple(map(tuple, tokens(o))) for o in found}) == 1


def test_generated_tokens_are_found_again_too_as_the_next_turn_of_a_chat_needs():
    llm = make(enable_prefix_caching=True, block_size=4)
    greedy = SamplingParams(temperature=0, max_tokens=10)
    first = llm.generate({"prompt_token_ids": list(b"hello")}, greedy)[0]
    turn = [*b"hello", *first.outputs[0].token_ids, *b" more"]
    # 14 tokens of the first turn stood in memory, the last one generated did not: 3 full blocks
    assert llm.generate({"prompt_token_ids": turn}, greedy)[0].num_cached_tokens == 12


@pytest.mark.parametrize("scheduler", ["static", "continuous", "chunked"])
def test_the_urgent_come_first_and_priorities_change_no_token(scheduler):
    llm = make(scheduling_policy="priority", scheduler=scheduler, max_num_seqs=1)
    greedy = SamplingParams(temperature=0, max_tokens=2)
    ids = [llm.add_request(c, greedy, priority=p) for c, p in (("a", 5), ("b", 1), ("c", 5), ("d", -3))]
    done = []
    while llm.has_unfinished_requests():
        done += [o for o in llm.step() if o.finished]
    assert [o.request_id for o in done] == [ids[3], ids[1], ids[0], ids[2]]
    for o in done:
        assert tokens(o) == [plain(o.prompt, temperature=0, max_tokens=2)]
    many = llm.generate(["x", "y"], greedy, priority=[2, 1])
    assert [tokens(o) for o in many] == [[plain(c, temperature=0, max_tokens=2)] for c in "xy"]
    assert is_idle(llm)


def test_swapped_requests_come_back_and_compute_nothing_twice():
    prompts = [f"prompt {i}" for i in range(5)]
    greedy = SamplingParams(temperature=0, max_tokens=20)
    expected = [[plain(p, temperature=0, max_tokens=20)] for p in prompts]
    seen = {}
    for name, options in {
        "recompute": {},
        "swap": {"preemption": "swap", "swap_space": 10**6},
        "little": {"preemption": "swap", "swap_space": 9 * 4 * 1344},
    }.items():
        llm = make(num_blocks=18, block_size=4, watermark=0.0, **options)
        assert [tokens(o) for o in llm.generate(prompts, greedy)] == expected
        seen[name] = llm.preemption_counters
        assert is_idle(llm)
        if options:
            llm.engine.scheduler.memory.swap_space.check_integrity()
            assert llm.engine.scheduler.memory.swap_space.num_free_blocks == (
                llm.engine.scheduler.memory.swap_space.num_blocks
            )
    assert seen["recompute"].num_preemptions > 0 < seen["recompute"].num_recomputed_tokens
    assert seen["recompute"].num_swapped_out_blocks == 0 == seen["swap"].num_recomputed_tokens
    assert seen["swap"].num_swapped_out_blocks == seen["swap"].num_swapped_in_blocks > 0
    assert seen["little"].num_swapped_out_blocks > 0 < seen["little"].num_recomputed_tokens


@pytest.mark.parametrize("failing", [1, 3], ids=["first-step", "third-step"])
def test_a_request_whose_step_failed_is_counted_once_and_its_own_blocks_are_no_hits(failing, monkeypatch):
    llm = make(enable_prefix_caching=True, block_size=4, max_num_batched_tokens=8)
    real, calls = llm.engine.model.forward, 0

    def forward(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == failing:
            raise RuntimeError("the device is gone")
        return real(*arguments)

    monkeypatch.setattr(llm.engine.model, "forward", forward)
    llm.add_request({"prompt_token_ids": list(range(40))}, SamplingParams(temperature=0, max_tokens=2))
    outputs: list[Any] = []
    while llm.has_unfinished_requests():
        try:
            outputs += llm.step()
        except RuntimeError as error:
            assert "device" in str(error)  # noqa: PT017
    stats = llm.prefix_cache_stats
    assert (stats.num_requests, stats.num_tokens, stats.num_hit_tokens) == (1, 40, 0)
    assert outputs[-1].num_cached_tokens == 0
    assert is_idle(llm)


def test_blocks_move_out_then_in_then_are_copied_and_only_then_written(monkeypatch):
    """A block that is swapped out may be given to a swap-in or a copy of the same step."""
    llm = make(num_blocks=14, block_size=3, preemption="swap", swap_space=10**6, watermark=0.0)
    store = llm.engine.store
    order: list[str] = []
    steps: list[list[str]] = []

    def note(name: str) -> None:
        real = getattr(store, name)

        def noted(*arguments: Any) -> Any:
            order.append(name)
            return real(*arguments)

        monkeypatch.setattr(store, name, noted)

    def listen(step: Any) -> None:
        steps.append(order.copy())
        order.clear()

    for name in ("swap_out", "swap_in", "copy_blocks", "attend"):
        note(name)
    llm.engine.on_step = listen
    llm.generate(["hello", "bye"], SamplingParams(temperature=0, max_tokens=9))
    assert steps
    assert all(step[:4] == ["swap_out", "swap_in", "copy_blocks", "attend"] for step in steps)


def test_one_sequence_of_a_group_cannot_be_ended_in_the_middle_of_a_step():
    llm = make()
    llm.add_request("hello", THREE)
    request = llm.engine.scheduler.waiting[0]
    errors = []

    def listen(step: Any) -> None:
        with pytest.raises(EngineBusy) as caught:
            llm.engine.finish(request, "stop", None, request.sequences[0])
        errors.append(caught)

    llm.engine.on_step = listen
    llm.step()
    assert len(errors) == 1
    llm.engine.on_step = None
    while llm.has_unfinished_requests():
        llm.step()
    assert is_idle(llm)
