"""`LLM` under random use: everything at once, with steps that fail and listeners that interfere.

Whatever happens, the tokens of what was not aborted are those of a plain run, and nothing is left over.
"""

from __future__ import annotations

import contextlib
from random import Random
from typing import Any

import pytest

from minivllm import LLM, BeamSearchParams, SamplingParams
from minivllm.decoding.generate import generate
from minivllm.errors import InvalidOption, RequestTooLong
from minivllm.memory.naive_store import NaiveStore
from minivllm.memory.prefix_cache import PrefixCachingManager
from minivllm.model.loader import load_model
from minivllm.model.tokenizer import ByteTokenizer

MODEL = load_model("random:tiny-llama", dtype="float64", device="cpu")
BYTES_PER_TOKEN = 1344


class Failure(Exception):
    """What the tests let fail."""


def make(**options: Any) -> Any:
    return LLM(MODEL, tokenizer=ByteTokenizer(), max_model_len=96, **options)


def random_options(random: Random) -> dict[str, Any]:
    block_size = random.choice([1, 2, 3, 5, 16])
    options: dict[str, Any] = {
        "block_size": block_size,
        "num_blocks": random.randint(60 // block_size + 3, 200 // block_size + 6),
        "max_num_seqs": random.choice([4, 6, 9]),
        "scheduler": random.choice(["static", "continuous", "chunked"]),
        "watermark": random.choice([0.0, 0.1]),
        "scheduling_policy": random.choice(["fcfs", "priority"]),
    }
    if options["scheduler"] == "chunked":
        options["max_num_batched_tokens"] = random.choice([4, 7, 64])
        options["prefer_prefill"] = random.random() < 0.3
        options["long_prefill_token_threshold"] = random.choice([None, None, 1, 3, 9])
    if random.random() < 0.6:
        options["prefix_cache"] = random.choice(["hash", "radix"])
    if random.random() < 0.6:
        blocks = random.choice([1, 3, 40])
        options |= {"preemption": "swap", "swap_space": blocks * block_size * BYTES_PER_TOKEN}
    return options


def random_request(random: Random, shared: list[int]) -> tuple[dict[str, Any], Any]:
    own = [random.randrange(256) for _ in range(random.randint(1, 9))]
    prompt: dict[str, Any] = {"prompt_token_ids": [*shared[: random.randint(0, 12)], *own]}
    most = random.randint(1, 14)
    if random.random() < 0.2:
        return prompt, BeamSearchParams(random.randint(1, 3), max_tokens=most)
    if random.random() < 0.2:
        prompt["cache_salt"] = "salt"
    return prompt, SamplingParams(
        n=random.choice([1, 1, 1, 3]),
        temperature=random.choice([0, 0.9]),
        seed=random.randint(0, 99),
        max_tokens=most,
        ignore_eos=random.random() < 0.5,
    )


def plain(prompt: dict[str, Any], params: Any) -> list[list[int]]:
    ids = prompt["prompt_token_ids"]
    if isinstance(params, BeamSearchParams):
        found = make().beam_search({"prompt_token_ids": ids}, params)[0]
        return [list(o.token_ids) for o in found.outputs]
    alone = [
        SamplingParams(
            temperature=params.temperature,
            seed=params.seed + i,
            max_tokens=params.max_tokens,
            ignore_eos=params.ignore_eos,
        )
        for i in range(params.n)
    ]
    return [list(generate(MODEL, NaiveStore(), ids, p)) for p in alone]


def let_fail(random: Random, store: Any, share: float) -> None:
    """Moving blocks fails now and then, before or after it has been done."""

    def failing(method: Any) -> Any:
        def call(blocks: Any) -> None:
            fails, late = random.random() < share, random.random() < 0.5
            if late or not fails:
                method(blocks)
            if fails:
                raise Failure

        return call

    for name in ("swap_out", "swap_in", "copy_blocks"):
        if hasattr(store, name):
            setattr(store, name, failing(getattr(store, name)))


def run(seed: int) -> None:
    random = Random(seed)
    options = random_options(random)
    llm = make(**options)
    engine, shared = llm.engine, [random.randrange(256) for _ in range(12)]
    wanted: dict[int, tuple[dict[str, Any], Any]] = {}
    aborted: set[int] = set()
    done: dict[int, Any] = {}

    def abort_one(share: float) -> None:
        if wanted and random.random() < share:
            request_id = random.choice(list(wanted))
            if llm.abort(request_id) is not None:
                aborted.add(request_id)

    def listen(step: Any) -> None:
        engine.manager.check_integrity()
        abort_one(0.1)
        if random.random() < 0.05:
            raise Failure

    let_fail(random, engine.store, random.choice([0, 0, 0.1]))
    engine.on_step = listen if random.random() < 0.3 else None
    to_come, steps = random.randint(3, 14), 0
    while to_come or llm.has_unfinished_requests():
        if to_come and random.random() < 0.5:
            to_come -= 1
            prompt, params = random_request(random, shared)
            urgency = random.randint(-2, 2) if options["scheduling_policy"] == "priority" else None
            with contextlib.suppress(RequestTooLong, InvalidOption):  # it could never fit, or is too wide
                wanted[llm.add_request(prompt, params, urgency)] = prompt, params
        abort_one(0.03)
        with contextlib.suppress(Failure):
            done |= {output.request_id: output for output in llm.step() if output.finished}
        engine.manager.check_integrity()
        if engine.scheduler.memory.swap_space is not None:
            engine.scheduler.memory.swap_space.check_integrity()
        steps += 1
        assert steps < 6000, f"{options} never ends"
    assert wanted.keys() - aborted <= done.keys()
    for request_id in wanted.keys() - aborted:
        found = [list(o.token_ids) for o in done[request_id].outputs]
        assert found == plain(*wanted[request_id]), f"request {request_id} with {options}"
    assert engine.manager.snapshot().held == 0
    assert not engine.manager.promised
    if isinstance(engine.manager, PrefixCachingManager):
        llm.reset_prefix_cache()
    swap_space = engine.scheduler.memory.swap_space
    assert swap_space is None or swap_space.num_free_blocks == swap_space.num_blocks
    assert not llm._states
    assert not llm._added
    assert not llm._news


@pytest.mark.parametrize("seed", range(24))
def test_whatever_happens_the_tokens_stay_the_same_and_nothing_is_left(seed):
    run(seed)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(1000, 2000))
def test_whatever_happens_a_thousand_times(seed):
    run(seed)
