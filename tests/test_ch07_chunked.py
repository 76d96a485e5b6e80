"""Chapter 7: one token budget for a step: small cases, each plan written out."""

from __future__ import annotations

from typing import Any

import pytest
from plans import is_right, request, step, steps, words

from minivllm.errors import InvalidOption
from minivllm.memory.manager import KVManager
from minivllm.memory.paged import PagedManager
from minivllm.memory.prefix_cache import PrefixCachingManager
from minivllm.memory.sharing import SharingManager
from minivllm.memory.swap import SwapSpace
from minivllm.params import BeamSearchParams
from minivllm.scheduling.chunked import ChunkedScheduler
from minivllm.scheduling.request import Request

INDEXES = ["hash", "radix"]


def chunked(budget: int, manager: KVManager | None = None, max_num_seqs: int = 9, **more) -> ChunkedScheduler:
    manager = manager or PagedManager(60, 1, 1)
    return ChunkedScheduler(manager, max_num_seqs, max_num_batched_tokens=budget, **more)


def add(scheduler: ChunkedScheduler, *requests: Request) -> list[Request]:
    for r in requests:
        scheduler.add(r)
    return list(requests)


# -- the budget


def test_a_step_is_filled_by_those_who_run_and_then_by_those_who_wait_in_order():
    """The picture of the module: nothing of the budget is left while anyone has use for it."""
    scheduler = chunked(8)
    requests = add(scheduler, request(0, 1, 5), request(1, 2, 5), request(2, 12, 2))
    assert step(scheduler) == "0+1 1+2 2+5"
    requests += add(scheduler, request(3, 9, 1))
    assert step(scheduler) == "0+1 1+1 2+6"
    assert step(scheduler) == "0+1 1+1 2+1 3+5"
    assert step(scheduler) == "0+1 1+1 2+1 3+4"
    assert step(scheduler) == "0+1 1+1"
    assert not scheduler.has_unfinished()
    assert all(map(is_right, requests))


def test_a_prompt_gives_its_first_token_with_its_last_chunk_and_none_before():
    scheduler = chunked(4)
    (r,) = add(scheduler, request(0, 10, 2))
    lengths = []
    while scheduler.has_unfinished():
        lengths.append((step(scheduler), len(r.sequences[0].output_token_ids)))
    assert lengths == [("0+4", 0), ("0+4", 0), ("0+2", 1), ("0+1", 2)]
    assert is_right(r)


def test_a_prompt_that_has_begun_goes_on_before_another_begins():
    scheduler = chunked(4)
    requests = add(scheduler, request(0, 6, 1), request(1, 6, 1))
    assert steps(scheduler) == ["0+4", "0+2 1+2", "1+4"]
    assert all(map(is_right, requests))


def test_a_budget_of_one_token_is_enough():
    scheduler = chunked(1)
    requests = add(scheduler, request(0, 3, 2), request(1, 2, 2))
    assert steps(scheduler) == ["0+1", "0+1", "0+1", "0+1", "1+1", "1+1", "1+1"]
    assert all(map(is_right, requests))


def test_a_threshold_leaves_budget_for_those_behind_a_long_prompt():
    scheduler = chunked(8, long_prefill_token_threshold=3)
    requests = add(scheduler, request(0, 10, 2), request(1, 4, 2), request(2, 9, 1))
    assert steps(scheduler) == ["0+3 1+3 2+2", "0+3 1+1 2+3", "0+3 1+1 2+3", "0+1 2+1", "0+1"]
    assert all(map(is_right, requests))
    scheduler = chunked(8)
    requests = add(scheduler, request(0, 10, 2), request(1, 4, 2), request(2, 9, 1))
    assert steps(scheduler) == ["0+8", "0+2 1+4 2+2", "0+1 1+1 2+6", "2+1"]


@pytest.mark.parametrize("name", ["max_num_batched_tokens", "long_prefill_token_threshold"])
def test_a_limit_below_one_is_refused_by_name(name):
    limits: dict[str, Any] = {"max_num_batched_tokens": 8, name: 0}
    with pytest.raises(InvalidOption, match=f"{name}=0"):
        ChunkedScheduler(PagedManager(9, 1, 1), 9, **limits)


# -- memory


@pytest.mark.parametrize("index", INDEXES)
def test_hit_chunk_decode_and_return_from_the_cpu_share_a_step(index):
    """14 blocks of 2. Request 1 gives way, and comes back when requests 8 and 0 have ended, one of its two
    blocks from the CPU. Request 2 begins as request 1 does, and request 3 gets what is left of the budget."""
    scheduler = chunked(8, PrefixCachingManager(14, 2, 1, index), swap_space=SwapSpace(9))
    requests = add(scheduler, request(8, 12, 4))
    assert step(scheduler) == "8+8"
    requests += add(scheduler, request(9, 1, 9), request(0, 3, 4))
    assert step(scheduler) == "8+4 9+1 0+3"
    requests += add(scheduler, request(1, 4, 3))
    assert step(scheduler) == "8+1 9+1 0+1 1+4"
    assert step(scheduler) == "8+1 9+1 0+1 -1 out2"
    assert step(scheduler) == "8+1 9+1 0+1"
    page = requests[-1].prompt_token_ids[:2]
    requests += add(scheduler, request(2, 5, 2, prompt=[*page, 7, 8, 9]), request(3, 9, 2))
    assert step(scheduler) == "9+1 1+1 2+3 3+3 in1"
    assert step(scheduler) == "9+1 1+1 2+1 3+5"
    assert step(scheduler) == "9+1 3+1"
    steps(scheduler)
    assert all(map(is_right, requests))
    assert scheduler.memory.counters.num_recomputed_tokens == 0


@pytest.mark.parametrize("index", INDEXES)
def test_a_block_cannot_be_found_while_its_chunk_is_in_flight(index):
    """Request 2 comes when half of the prompt is computed; in its first step the rest is under way."""
    scheduler = chunked(12, PrefixCachingManager(20, 2, 1, index), long_prefill_token_threshold=4)
    prompt = list(range(9))
    requests = add(scheduler, *(request(i, 9, 1, prompt=prompt) for i in range(2)))
    assert step(scheduler) == "0+4 1+4"
    requests += add(scheduler, request(2, 9, 1, prompt=prompt))
    assert step(scheduler) == "0+4 1+4 2+4"
    requests += add(scheduler, request(3, 9, 1, prompt=prompt))
    assert step(scheduler) == "0+1 1+1 2+1 3+1"
    assert [r.num_cached_tokens for r in requests] == [0, 0, 4, 8]
    assert all(map(is_right, requests))


@pytest.mark.parametrize("index", INDEXES)
def test_a_chunk_that_failed_cannot_be_found(index):
    scheduler = chunked(4, PrefixCachingManager(20, 2, 1, index), 1)
    requests = add(scheduler, *(request(i, 9, 1, prompt=list(range(9))) for i in range(2)))
    assert step(scheduler) == "0+4"
    plan = scheduler.schedule()
    assert words(plan) == "0+4"
    scheduler.take_back(plan)
    assert steps(scheduler) == ["0+4", "0+1", "1+1"], "4 of 9 tokens were computed and are found"
    assert [r.num_cached_tokens for r in requests] == [0, 8], (
        "its own tokens were not there when it first began"
    )
    assert all(map(is_right, requests))


def test_nobody_is_admitted_in_a_step_in_which_another_gave_way():
    scheduler = chunked(9, PagedManager(6, 1, 1), policy="priority")
    add(scheduler, request(0, 2, 4, priority=1), request(1, 2, 4, priority=2))
    assert [step(scheduler), step(scheduler)] == ["0+2 1+2", "0+1 1+1"]
    add(scheduler, request(2, 1, 1, priority=0))
    assert [step(scheduler), step(scheduler)] == ["0+1 -1", "0+1 2+1"]


def test_a_prompt_that_loses_its_first_chunks_loses_no_token():
    scheduler = chunked(4, PagedManager(8, 1, 1))
    requests = add(scheduler, request(0, 1, 6), request(1, 6, 2))
    assert steps(scheduler) == ["0+1 1+3", "0+1 1+3", "0+1 -1", "0+1", "0+1", "0+1", "1+4", "1+3"]
    assert scheduler.memory.counters.num_recomputed_tokens == 6
    assert all(map(is_right, requests))


# -- prompts first


def stream_of_prompts(prefer_prefill: bool) -> list[str]:
    """Request 0 decodes, and in every step a prompt arrives that fills the budget."""
    scheduler = chunked(6, PagedManager(90, 1, 1), prefer_prefill=prefer_prefill)
    requests = add(scheduler, request(0, 2, 4))
    found = [step(scheduler)]
    for i in range(1, 6):
        requests += add(scheduler, request(i, 6, 1))
        found.append(step(scheduler))
    found += steps(scheduler)
    assert all(map(is_right, requests))
    return found


def test_with_prompts_first_those_who_decode_starve_while_prompts_keep_coming():
    assert stream_of_prompts(True) == ["0+2", "1+6", "2+6", "3+6", "4+6", "5+6", "0+1", "0+1", "0+1"]


def test_with_one_budget_for_all_everyone_who_decodes_gets_a_token_in_every_step():
    found = stream_of_prompts(False)
    assert found == ["0+2", "0+1 1+5", "0+1 1+1 2+4", "0+1 2+2 3+3", "3+3 4+3", "4+3 5+3", "5+3"]


def test_a_victim_that_was_scheduled_already_gives_its_budget_back():
    """Request 1's prompt takes 4 of 5 tokens and the last free blocks. Request 0 needs one: request 1 gives
    way, and its tokens are there for request 2, who decodes too."""
    scheduler = chunked(5, PagedManager(6, 1, 1), prefer_prefill=True)
    requests = add(scheduler, request(0, 1, 2), request(2, 1, 2))
    assert step(scheduler) == "0+1 2+1"
    requests += add(scheduler, request(1, 4, 1))
    plan = scheduler.schedule()
    assert (words(plan), plan.num_tokens) == ("0+1 2+1 -1", 2)
    scheduler.take_back(plan)
    steps(scheduler)
    assert all(map(is_right, requests))


# -- groups


def test_a_group_gets_its_tokens_in_one_step_or_waits():
    """Three answers and two tokens left: the group waits for request 0, which it could not wait for ever."""
    scheduler = chunked(3, SharingManager(40, 2, 1))
    requests = add(scheduler, request(0, 1, 4), request(1, 2, 3, n=3))
    assert steps(scheduler) == ["0+1 1.0+2", "0+1", "0+1", "0+1", "1.0+1 1.1+1 1.2+1", "1.0+1 1.1+1 1.2+1"]
    assert all(map(is_right, requests))


def test_a_threshold_below_its_width_does_not_stop_a_group():
    scheduler = chunked(9, SharingManager(40, 2, 1), long_prefill_token_threshold=1)
    (r,) = add(scheduler, request(0, 4, 2, n=3))
    assert steps(scheduler) == ["0.0+3", "0.0+1", "0.0+1 0.1+1 0.2+1"]
    assert is_right(r)


@pytest.mark.parametrize("wide", ["samples", "beams"])
def test_a_group_wider_than_the_budget_is_refused_by_name(wide):
    group = request(0, 2, 2, n=4) if wide == "samples" else Request(0, [1], BeamSearchParams(4, max_tokens=2))
    with pytest.raises(InvalidOption, match=r"4 sequences, .* max_num_batched_tokens=3"):
        chunked(3, SharingManager(40, 2, 1)).add(group)
    chunked(4, SharingManager(40, 2, 1)).add(group)
