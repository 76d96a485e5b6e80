"""The batches of whole runs: what the engine makes from arrays is what chapters 0 and 3 make from lists."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import fields
from random import Random
from typing import Any

import pytest

from minivllm import LLM, BeamSearchParams, SamplingParams
from minivllm.errors import InvalidLogits
from minivllm.model.loader import load_model
from minivllm.model.paged_batches import PagedBatches
from minivllm.model.tokenizer import ByteTokenizer

OPTIONS: dict[str, dict[str, Any]] = {
    "roomy": {"num_blocks": 80},
    "chunks": {"num_blocks": 80, "max_num_batched_tokens": 7},
    "preemption": {"num_blocks": 17},
    "prompts first": {"num_blocks": 20, "prefer_prefill": True, "max_num_batched_tokens": 9},
    "prefixes": {"num_blocks": 17, "enable_prefix_caching": True},
    "tree": {"num_blocks": 17, "prefix_cache": "radix"},
    "swap": {"num_blocks": 14, "preemption": "swap", "swap_space": 2**18},
    "swap and prefixes": {
        "num_blocks": 14,
        "preemption": "swap",
        "swap_space": 2**18,
        "enable_prefix_caching": True,
    },
    "static": {"num_blocks": 40, "scheduler": "static"},
}


def watched(llm: LLM) -> list[int]:
    """Every batch is compared with the one from lists; returns a list that grows by the tokens of each."""
    engine, sizes = llm.engine, []
    fast, plain = engine.pack, engine._pack
    assert isinstance(fast, PagedBatches)

    def both(parts: Any) -> Any:
        got, expected = fast(parts), plain(parts)
        assert got.slices == expected.slices
        for name in {field.name for field in fields(expected)} - {"slices"}:
            assert getattr(got, name).tolist() == getattr(expected, name).tolist(), name
            assert getattr(got, name).dtype == getattr(expected, name).dtype, name
        sizes.append(got.num_tokens)
        return got

    engine.pack = both
    return sizes


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_samples_beams_and_failed_steps_have_the_same_batches(options):
    model = load_model("random:tiny-qwen3", dtype="float64", device="cpu", seed=3)
    llm = LLM(model, tokenizer=ByteTokenizer(), block_size=5, max_num_seqs=7, max_model_len=64, **options)
    sizes, random, forward = watched(llm), Random(1), llm.engine.forward
    assert forward is None

    def sometimes_sick(batch: Any, store: Any) -> Any:
        logits = model(batch, store)
        if len(logits) and random.random() < 0.05:
            logits[random.randrange(len(logits))] = float("nan")
        return logits

    for i in range(30):
        prompt = [*range(11), *(random.randrange(300) for _ in range(random.randint(1, 18)))][i % 2 * 11 :]
        if i % 5 == 4:
            llm.add_request(prompt, BeamSearchParams(beam_width=3, max_tokens=random.randint(2, 9)))
        else:
            n, temperature = random.choice([1, 1, 3]), random.choice([0, 1])
            llm.add_request(
                prompt, SamplingParams(n=n if temperature else 1, temperature=temperature, max_tokens=9)
            )
    llm.engine.forward = sometimes_sick
    while llm.has_unfinished_requests():
        with suppress(InvalidLogits):
            llm.step()
        if random.random() < 0.05:
            llm.abort(random.randrange(30))
        llm.engine.manager.check_integrity()
    assert len(sizes) > 40
    assert (llm.preemption_counters.num_preemptions > 0) == (options["num_blocks"] <= 20)


def test_paging_alone_runs_on_the_lists_of_chapters_0_and_3():
    model = load_model("random:tiny-llama", dtype="float32", device="cpu")
    for cache in ({"sharing": False}, {"cache": "naive"}, {"cache": "recompute"}):
        engine = LLM(model, tokenizer=ByteTokenizer(), **cache).engine
        assert engine.pack is None


def test_a_call_ends_when_a_listener_has_ended_what_still_waited():
    """It is told of those that were in a step; the engine's own `finish` tells it nothing of the others."""
    model = load_model("random:tiny-llama", dtype="float32", device="cpu")
    llm = LLM(model, tokenizer=ByteTokenizer(), num_blocks=40, max_num_seqs=2)
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)

    def end_those_that_wait(step: Any) -> None:
        for request in list(llm.engine.scheduler.waiting):
            llm.engine.finish(request, "abort")

    llm.engine.on_step = end_those_that_wait
    outputs = llm.generate(["a", "b", "c", "d"], params)
    assert [o.outputs[0].finish_reason for o in outputs] == ["length", "length", "abort", "abort"]
