"""Whatever the options: the same tokens, the books balance, nothing is left. Memory and time may change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from covering import can_be, covering, groups, sample
from invariance import (
    MAX_MODEL_LEN,
    Answer,
    Asked,
    Run,
    answers,
    as_requests,
    expected,
    given,
    least_blocks,
    least_slots,
    run,
    workload,
)
from invariance import model as model_of

from minivllm.engine_args import EngineArgs
from minivllm.engine_parts import build_engine
from minivllm.errors import RequestTooLong
from minivllm.memory.naive_store import NaiveStore
from minivllm.memory.size import bytes_per_token
from minivllm.params import SamplingParams
from minivllm.scheduling.request import Request

# Memory that is not paged, and paged memory: option -> values. A value is a part of a test's name.
PLAIN = {
    "model": ("llama", "qwen3"),
    "memory": ("recompute", "naive", "max", "pow2", "oracle"),
    "scheduler": ("static", "continuous"),
    "pool": ("ample", "double", "one-more", "least"),
    "watermark": ("w0", "w10"),
    "max_num_seqs": ("seqs64", "seqs4"),
    "policy": ("fcfs", "priority"),
    "arrival": ("together", "reversed", "staggered"),
}
PAGED = {
    "model": ("llama", "qwen3"),
    "memory": ("shared", "hash", "radix", "unshared"),
    "block_size": ("b1", "b3", "b16", "b128"),
    "scheduler": ("budget1", "budget7", "budget64", "budget512", "continuous", "static"),
    "threshold": ("", "long5"),
    "prefer": ("", "prefill-first"),
    "preemption": ("recompute", "swap", "swap-little"),
    "pool": PLAIN["pool"],
    "watermark": PLAIN["watermark"],
    "max_num_seqs": PLAIN["max_num_seqs"],
    "policy": PLAIN["policy"],
    "arrival": PLAIN["arrival"],
}
# The same where memory is tight and shared, and requests grow into each other.
TIGHT = PAGED | {
    "model": ("qwen3",),
    "memory": ("shared", "hash", "radix"),
    "scheduler": ("budget7", "budget64", "continuous", "static"),
    "pool": ("one-more", "least"),
    "watermark": ("w0",),
    "max_num_seqs": ("seqs64",),
}
WIDEST = 3  # sequences of a request of the workload


def plain_is_valid(c: Mapping[str, str]) -> bool:
    """Whether options, or some of them, go together in memory that is not paged."""
    return c.get("watermark", "w0") == "w0" or c.get("memory", "naive") == "naive"


def paged_is_valid(c: Mapping[str, str]) -> bool:
    """Whether options, or some of them, go together in paged memory."""
    chunked = c.get("scheduler", "budget7").startswith("budget")
    shares = c.get("memory", "shared") != "unshared"
    return (chunked or not (c.get("threshold") or c.get("prefer"))) and (
        shares or c.get("preemption", "recompute") == "recompute"
    )


def name_of(config: Mapping[str, str]) -> str:
    return "-".join(filter(None, config.values()))


def build(config: Mapping[str, str], pool: int, most: int) -> Any:
    """An engine with these options. pool: blocks, or slots where memory is not paged; most: of these what
    all requests together need."""
    decoder, memory, scheduler = model_of(config["model"]), config["memory"], config["scheduler"]
    options: dict[str, Any] = {"scheduler": scheduler, "scheduling_policy": config["policy"]}
    options["max_num_seqs"] = number(config["max_num_seqs"])
    if config["watermark"] != "w0" or memory in (*PAGED["memory"], "naive"):
        options["watermark"] = number(config["watermark"]) / 100
    if "block_size" not in config:
        contiguous = memory in ("max", "pow2", "oracle")
        options |= {"cache": "contiguous", "reservation": memory} if contiguous else {"cache": memory}
        options["kv_cache_memory_bytes"] = pool * bytes_per_token(decoder)
        return build_engine(decoder, EngineArgs(**options, max_model_len=MAX_MODEL_LEN))
    if scheduler.startswith("budget"):
        options |= {"scheduler": "chunked", "max_num_batched_tokens": number(scheduler)}
        options["prefer_prefill"] = bool(config["prefer"])
        options["long_prefill_token_threshold"] = number(config["threshold"]) if config["threshold"] else None
    block_size = number(config["block_size"])
    if config["preemption"] != "recompute":
        num_cpu_blocks = most if config["preemption"] == "swap" else max(1, pool // 6)
        options["preemption"] = "swap"
        options["swap_space"] = num_cpu_blocks * block_size * bytes_per_token(decoder)
    options["sharing"] = memory != "unshared"
    options["prefix_cache"] = memory if memory in ("hash", "radix") else None
    return build_engine(decoder, EngineArgs(**options, block_size=block_size, num_blocks=pool))


def number(value: str) -> int:
    return int("".join(filter(str.isdigit, value)))


def requests_of(config: Mapping[str, str], block_size: int) -> list[list[Request]]:
    """The workload's requests; groups whole where they can run."""
    eos = model_of(config["model"]).config.eos_token_ids
    budget = number(config["scheduler"]) if config["scheduler"].startswith("budget") else WIDEST
    return as_requests(workload(block_size), eos, config["memory"] in ("shared", "hash", "radix"), budget)


def check_all(engine: Any, requests: list[Request]) -> None:
    """Raises RequestTooLong where one of them could never run."""
    for request in requests:
        engine.scheduler.check(request)


def run_config(config: Mapping[str, str]) -> Run:
    """The workload through an engine with these options; its answers are those of the plain loops."""
    block_size = number(config.get("block_size", "b3"))
    requests = requests_of(config, block_size)
    every = [r for rs in requests for r in rs]
    if "block_size" in config:
        least = least_blocks(every, block_size)
        most = sum(least_blocks([r], block_size) for r in every)
    else:
        least = least_slots(every, config["memory"] in ("max", "pow2", "oracle"))
        most = len(every) * MAX_MODEL_LEN
    if config["memory"] != "recompute":
        with pytest.raises(RequestTooLong):
            check_all(build(config, least - 1, most), every)
    pool = {"ample": most, "double": 2 * least, "one-more": least + 1, "least": least}[config["pool"]]
    n = len(requests)
    arrivals = {"together": [0] * n, "reversed": range(0, -n, -1), "staggered": range(0, 2 * n, 2)}
    done = run(build(config, pool, most), requests, arrivals[config["arrival"]])
    for i, (wanted, rs) in enumerate(zip(expected(config["model"], block_size), requests, strict=True)):
        if rs:
            same(given(rs), wanted, f"request {i}")
    return done


def same(found: Any, wanted: Any, which: str, abs: float = 1e-9) -> None:
    assert [a.token_ids for a in found] == [a.token_ids for a in wanted], which
    assert [a.finish_reason for a in found] == [a.finish_reason for a in wanted], which
    for one, other in zip(found, wanted, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=abs), which


# Every pair of values of any options, and of those that make memory tight every three.
SETS = {
    "plain": (PLAIN, plain_is_valid, 2, covering(PLAIN, plain_is_valid)),
    "paged": (PAGED, paged_is_valid, 2, covering(PAGED, paged_is_valid)),
    "tight": (TIGHT, paged_is_valid, 3, covering(TIGHT, paged_is_valid, strength=3)),
}
CHOSEN = {name_of(config): config for *_, configs in SETS.values() for config in configs}
# Of 1,152 and of 138,240 valid ones.
DRAWN = [*sample(PLAIN, plain_is_valid, 200), *sample(PAGED, paged_is_valid, 800)]


@pytest.mark.parametrize("config", CHOSEN.values(), ids=name_of)
def test_the_tokens_are_those_of_the_plain_loops(config):
    run_config(config)


@pytest.mark.full
@pytest.mark.parametrize("config", DRAWN, ids=name_of)
def test_the_tokens_of_a_thousand_more_configurations_are_those_of_the_plain_loops(config):
    run_config(config)


@pytest.mark.parametrize("which", SETS)
def test_all_option_values_that_go_together_meet(which):
    axes, valid, strength, configs = SETS[which]
    met = {group for config in configs for group in combinations(config.items(), strength)}
    assert met == {group for group in groups(axes, strength) if can_be(axes, valid, group)}
    assert all(map(valid, configs))


@pytest.mark.parametrize("block_size", [1, 3, 16, 128])
def test_each_request_runs_in_the_least_memory_of_its_own_and_one_block_less_is_refused(block_size):
    config = {name: values[0] for name, values in TIGHT.items()} | {"block_size": f"b{block_size}"}
    for i, rs in enumerate(requests_of(config, block_size)):
        least = least_blocks(rs, block_size)
        if least > 1:
            with pytest.raises(RequestTooLong):
                check_all(build(config, least - 1, least), rs)
        run(build(config, least, least), [rs], [0])
        same(given(rs), expected(config["model"], block_size)[i], f"request {i}")


@pytest.mark.parametrize("block_size", [1, 3])
@pytest.mark.parametrize("index", ["hash", "radix"])
def test_tight_memory_is_what_the_workload_makes_it(index, block_size):
    """Blocks are copied on write, found again, swapped both ways, or computed again for want of room."""
    config = {name: values[0] for name, values in TIGHT.items()} | {
        "memory": index,
        "block_size": f"b{block_size}",
        "preemption": "swap-little",
        "scheduler": "budget64",
        "pool": "least",
    }
    done = run_config(config)
    counters = done.engine.scheduler.memory.counters
    assert min(vars(counters).values()) > 0, counters
    assert done.num_fallbacks > 0
    assert done.engine.manager.stats.num_hit_tokens > 0
    assert (done.engine.manager.num_copies > 0) == (block_size > 1)


TEXT = "The train left at 07:45 and arrived at 09:10, ten minutes late; the ticket had cost 23.50 euros, and"


@pytest.fixture(scope="module")
def real(smollm2, smollm2_tokenizer) -> tuple[list[Asked], list[tuple[Answer, ...]]]:
    """Requests to the real model, with a prefix of two blocks in common, and what the plain loop gives."""
    common, short = smollm2_tokenizer.encode(TEXT)[:32], smollm2_tokenizer.encode("Once upon")
    greedy = SamplingParams(temperature=0, max_tokens=4, logprobs=0, ignore_eos=True)
    asked = [
        Asked(tuple(common), greedy),
        Asked((*common, *short), greedy),
        Asked(tuple(common), replace(greedy, n=2, temperature=1.0, seed=3)),
        Asked(tuple(common[:15]), greedy),
        Asked(tuple(short), replace(greedy, n=3, temperature=1.0, seed=7)),
    ]
    return asked, [answers(smollm2, a, NaiveStore()) for a in asked]


@pytest.mark.xdist_group("real model")
@pytest.mark.parametrize(
    "options",
    [
        {"scheduler": "continuous"},
        {"prefix_cache": "hash", "max_num_batched_tokens": 7},
        {"preemption": "swap", "swap_space": 4, "max_num_batched_tokens": 40},
    ],
    ids=["sharing", "hash-budget7", "swap"],
)
def test_the_real_model_gives_the_tokens_of_the_plain_loop_in_the_least_memory(smollm2, real, options):
    asked, wanted = real
    requests = as_requests(asked, smollm2.config.eos_token_ids, shares=True, budget=64)
    options = dict(options)
    if "swap_space" in options:
        options["swap_space"] *= 16 * bytes_per_token(smollm2)
    least = least_blocks([r for rs in requests for r in rs], 16)
    args = EngineArgs(**options, block_size=16, num_blocks=least, watermark=0.0)
    done = run(build_engine(smollm2, args), requests, [0, 0, 1, 1, 2])
    for i, answer in enumerate(wanted):
        same(given(requests[i]), answer, f"request {i}", abs=1e-3)
    counters = done.engine.scheduler.memory.counters
    assert counters.num_preemptions > 0
    assert (counters.num_swapped_in_blocks > 0) == ("swap_space" in options)
