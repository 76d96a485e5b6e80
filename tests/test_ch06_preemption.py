"""Chapter 6: who gives way, what it costs and how it comes back: small cases, each plan written out."""

from __future__ import annotations

import pytest
from plans import is_right, request, step, steps, words

from minivllm.errors import InvalidOption, RequestTooLong
from minivllm.memory.paged import PagedManager
from minivllm.memory.prefix_cache import PrefixCachingManager
from minivllm.memory.sharing import SharingManager
from minivllm.memory.swap import SwapSpace
from minivllm.params import BeamSearchParams
from minivllm.scheduling.continuous import ContinuousScheduler
from minivllm.scheduling.plan import SchedulerOutput
from minivllm.scheduling.request import Request
from minivllm.scheduling.request_memory import PreemptionCounters
from minivllm.scheduling.static import StaticScheduler

INDEXES = ["hash", "radix"]


def prefix_manager(num_blocks: int, block_size: int, index: str) -> PrefixCachingManager:
    return PrefixCachingManager(num_blocks, block_size, 1, index)


def two_that_grow(scheduler: ContinuousScheduler) -> list[Request]:
    """In 4 blocks of 2 both have room for 4 of the 6 tokens that each comes to: one must give way."""
    requests = [request(0, 3, 4), request(1, 3, 4)]
    for r in requests:
        scheduler.add(r)
    return requests


def counters(scheduler: ContinuousScheduler) -> PreemptionCounters:
    return scheduler.memory.counters


# -- computed again


def test_a_victim_begins_again_with_the_tokens_it_had():
    scheduler = ContinuousScheduler(PagedManager(4, 2, 1), 2)
    requests = two_that_grow(scheduler)
    assert steps(scheduler) == ["0+3 1+3", "0+1 1+1", "0+1 -1", "0+1", "1+5", "1+1"]
    assert all(map(is_right, requests))
    assert counters(scheduler) == PreemptionCounters(num_preemptions=1, num_recomputed_tokens=4)


@pytest.mark.parametrize("index", INDEXES)
def test_what_a_victim_finds_again_is_not_granted_a_second_time(index):
    """Its first block outlives it, its second goes to the other: of 5 tokens it computes 3, not 5."""
    scheduler = ContinuousScheduler(prefix_manager(4, 2, index), 2)
    requests = two_that_grow(scheduler)
    assert steps(scheduler) == ["0+3 1+3", "0+1 1+1", "0+1 -1", "0+1", "1+3", "1+1"]
    assert all(map(is_right, requests))
    assert counters(scheduler) == PreemptionCounters(num_preemptions=1, num_recomputed_tokens=2)
    assert requests[1].num_cached_tokens == 0, "what it found when it first began"


def test_who_gives_way_takes_no_part_and_its_tokens_count_no_more():
    a, b = request(0, 3, 1, n=1), request(1, 4, 1)
    output = SchedulerOutput()
    output.grant(a, [(a.first, 3)])
    output.grant(b, [(b.first, 2)])
    assert (words(output), output.num_tokens) == ("0+3 1+2", 5)
    output.take_back(a)
    assert (words(output), output.num_tokens) == ("1+2", 2)


def test_nobody_is_admitted_in_a_step_in_which_another_gave_way():
    """Request 2 is the most urgent and would fit into what request 1 gave up."""
    scheduler = ContinuousScheduler(PagedManager(6, 1, 1), 3, policy="priority")
    for r in (request(0, 2, 4, priority=1), request(1, 2, 4, priority=2)):
        scheduler.add(r)
    assert [step(scheduler), step(scheduler)] == ["0+2 1+2", "0+1 1+1"]
    scheduler.add(request(2, 1, 1, priority=0))
    assert [step(scheduler), step(scheduler)] == ["0+1 -1", "0+1 2+1"]


def test_a_failed_step_is_made_again_in_the_order_there_was():
    manager = SharingManager(4, 2, 1)
    scheduler = ContinuousScheduler(manager, 2, swap_space=SwapSpace(9))
    requests = two_that_grow(scheduler)
    assert [step(scheduler), step(scheduler)] == ["0+3 1+3", "0+1 1+1"]
    plan = scheduler.schedule()
    assert words(plan) == "0+1 -1 out2"
    scheduler.take_back(plan)  # whether the two blocks had reached the CPU is not known
    assert [r.request_id for r in scheduler.waiting] == [0, 1]
    assert manager.pool.num_free_blocks == 4
    assert steps(scheduler) == ["0+5", "0+1", "1+5", "1+1"]
    assert all(map(is_right, requests))


def test_a_failed_step_sends_all_back_in_the_order_in_which_they_ran():
    scheduler = ContinuousScheduler(PagedManager(20, 1, 1), 3)
    for i in range(4):
        scheduler.add(request(i, 2, 2))
    assert step(scheduler) == "0+2 1+2 2+2"
    scheduler.take_back(scheduler.schedule())
    assert [r.request_id for r in scheduler.waiting] == [0, 1, 2, 3]
    assert step(scheduler) == "0+3 1+3 2+3"


# -- who gives way


@pytest.mark.parametrize(
    ("policy", "plan", "queue"), [("fcfs", "1+1 0+1 -2", [2, 3]), ("priority", "0+1 2+1 -1", [1, 3])]
)
def test_the_victim_is_the_last_or_the_least_urgent(policy, plan, queue):
    scheduler = ContinuousScheduler(PagedManager(6, 2, 1), 3, policy=policy)
    requests = [request(i, n, 3, priority=p) for i, (n, p) in enumerate([(4, 0), (3, 2), (4, 1), (9, 2)])]
    scheduler.add(requests[1])
    assert step(scheduler) == "1+3"
    for i in (0, 2, 3):
        scheduler.add(requests[i])
    assert step(scheduler) == "1+1 0+4 2+4"
    assert step(scheduler) == plan
    assert [r.request_id for r in scheduler.waiting] == queue
    steps(scheduler)
    assert all(map(is_right, requests))


def test_a_victim_goes_back_to_its_place_and_not_before_those_more_urgent():
    scheduler = ContinuousScheduler(PagedManager(4, 2, 1), 2, policy="priority")
    for r in (request(0, 3, 4, priority=1), request(1, 3, 4, priority=1)):
        scheduler.add(r)
    assert [step(scheduler), step(scheduler)] == ["0+3 1+3", "0+1 1+1"]
    for r in (request(2, 8, 1, priority=1), request(3, 8, 1, priority=0)):
        scheduler.add(r)
    assert step(scheduler) == "0+1 -1"
    assert [r.request_id for r in scheduler.waiting] == [3, 1, 2]


def test_a_victim_heads_the_next_static_batch():
    """The request that has waited since before the batch comes after it, and neither joins a closed batch."""
    scheduler = StaticScheduler(PagedManager(4, 2, 1), 2)
    requests = [*two_that_grow(scheduler), request(2, 1, 1), request(3, 1, 2)]
    scheduler.add(requests[2])
    scheduler.add(requests[3])
    assert steps(scheduler) == ["0+3 1+3", "0+1 1+1", "0+1 -1", "0+1", "1+5 2+1", "1+1", "3+1", "3+1"]
    assert all(map(is_right, requests))


# -- what is refused, and what is left free


@pytest.mark.parametrize("block_size", [1, 2, 3, 4])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_alone_a_request_never_gives_way_in_the_least_memory_that_takes_it(n, block_size):
    """And in one block less it is refused: its own length bounds it, and nothing waits for ever."""
    for prompt_len in range(1, 8):
        for max_tokens in range(1, 8):
            each = -(-(prompt_len + max_tokens - 1) // block_size)
            common = prompt_len // block_size if n > 1 else 0
            least = common + n * (each - common)
            r = request(0, prompt_len, max_tokens, n)
            scheduler = ContinuousScheduler(SharingManager(least, block_size, 1), n, watermark=block_size)
            scheduler.add(r)
            assert len(steps(scheduler)) == max_tokens
            assert (r.num_preemptions, is_right(r)) == (0, True)
            if least > 1:
                with pytest.raises(RequestTooLong, match=f"max_tokens={max_tokens}"):
                    ContinuousScheduler(SharingManager(least - 1, block_size, 1), n).add(r)


def test_prompt_and_output_together_are_bounded_by_the_pool():
    """4 blocks of 2: the last of 3 + 6 tokens is never put into memory; one more does not fit."""
    ContinuousScheduler(PagedManager(4, 2, 1), 1).add(request(0, 3, 6))
    with pytest.raises(RequestTooLong, match=r"may need 9 tokens .*3 of prompt, max_tokens=7"):
        ContinuousScheduler(PagedManager(4, 2, 1), 1).add(request(0, 3, 7))


@pytest.mark.parametrize("wide", ["samples", "beams"])
def test_a_group_that_can_never_run_is_refused_by_name(wide):
    def group() -> Request:
        if wide == "beams":
            return Request(0, [1, 2, 3], BeamSearchParams(3, max_tokens=2))
        return request(0, 3, 2, n=3)

    with pytest.raises(InvalidOption, match=r"3 sequences .* max_num_seqs=2"):
        ContinuousScheduler(SharingManager(9, 2, 1), 2).add(group())
    with pytest.raises(InvalidOption, match=r"3 sequences .* can be shared"):
        ContinuousScheduler(PagedManager(9, 2, 1), 3).add(group())
    with pytest.raises(RequestTooLong, match="3 sequences of 4 tokens"):
        ContinuousScheduler(SharingManager(3, 2, 1), 3).add(group())  # 1 full block, and 1 for each
    ContinuousScheduler(SharingManager(4, 2, 1), 3).add(group())


@pytest.mark.parametrize(
    ("watermark", "plans", "cost"),
    [
        (2, ["0+2 1+2", "0+1 1+1", "0+1 -1", "0+1", "1+4", "1+1"], (1, 3)),
        (3, ["0+2", "0+1", "0+1", "0+1", "1+2", "1+1", "1+1", "1+1"], (0, 0)),
    ],
    ids=["too-low", "high-enough"],
)
def test_with_a_watermark_nobody_is_admitted_only_to_give_way(watermark, plans, cost):
    scheduler = ContinuousScheduler(PagedManager(6, 1, 1), 2, watermark)
    requests = [request(0, 2, 4), request(1, 2, 4)]
    for r in requests:
        scheduler.add(r)
    assert steps(scheduler) == plans
    assert (counters(scheduler).num_preemptions, counters(scheduler).num_recomputed_tokens) == cost
    assert all(map(is_right, requests))


# -- swapped out


def test_a_victim_that_is_swapped_out_computes_nothing_again():
    scheduler = ContinuousScheduler(SharingManager(4, 2, 1), 2, swap_space=SwapSpace(2))
    requests = two_that_grow(scheduler)
    assert steps(scheduler) == ["0+3 1+3", "0+1 1+1", "0+1 -1 out2", "0+1", "1+1 in2", "1+1"]
    assert all(map(is_right, requests))
    assert counters(scheduler) == PreemptionCounters(1, 0, 2, 2)


def test_where_the_swap_space_is_full_the_victim_begins_again():
    scheduler = ContinuousScheduler(SharingManager(4, 2, 1), 2, swap_space=SwapSpace(1))
    requests = two_that_grow(scheduler)
    assert steps(scheduler) == ["0+3 1+3", "0+1 1+1", "0+1 -1", "0+1", "1+5", "1+1"]
    assert all(map(is_right, requests))
    assert counters(scheduler) == PreemptionCounters(1, 4, 0, 0)


@pytest.mark.parametrize("index", INDEXES)
def test_on_the_way_back_prefix_hits_come_first_and_misses_are_copied(index):
    """One of the victim's two blocks is still on the device."""
    scheduler = ContinuousScheduler(prefix_manager(4, 2, index), 2, swap_space=SwapSpace(2))
    requests = two_that_grow(scheduler)
    assert steps(scheduler) == ["0+3 1+3", "0+1 1+1", "0+1 -1 out2", "0+1", "1+1 in1", "1+1"]
    assert all(map(is_right, requests))
    assert counters(scheduler) == PreemptionCounters(1, 0, 2, 1)


# -- groups


def a_group_gives_way(num_cpu_blocks: int) -> tuple[ContinuousScheduler, list[Request]]:
    """6 blocks of 2: request 0, and two answers that share one full block and have one each."""
    swap = SwapSpace(num_cpu_blocks) if num_cpu_blocks else None
    scheduler = ContinuousScheduler(SharingManager(6, 2, 1), 3, swap_space=swap)
    requests = [request(0, 3, 4), request(1, 3, 4, n=2)]
    for r in requests:
        scheduler.add(r)
    assert [step(scheduler), step(scheduler)] == ["0+3 1.0+3", "0+1 1.0+1 1.1+1 copy1"]
    return scheduler, requests


@pytest.mark.parametrize("num_cpu_blocks", [0, 2], ids=["no-swap", "too-little"])
def test_a_group_that_begins_again_computes_what_is_common_once(num_cpu_blocks):
    """Each answer has 5 tokens, 3 of them the prompt: 3 + 2 + 2 are computed, not 10."""
    scheduler, requests = a_group_gives_way(num_cpu_blocks)
    assert steps(scheduler) == ["0+1 -1", "0+1 1.0+3", "1.0+2 1.1+2 copy1", "1.0+1 1.1+1"]
    assert all(map(is_right, requests))
    assert counters(scheduler) == PreemptionCounters(num_preemptions=1, num_recomputed_tokens=3 + 1 + 1)


def test_a_group_is_swapped_out_and_comes_back_whole_and_shares_again():
    """4 computed tokens in 2 blocks each, the first shared: 3 blocks go and come."""
    scheduler, requests = a_group_gives_way(3)
    assert steps(scheduler) == ["0+1 -1 out3", "0+1", "1.0+1 1.1+1 in3", "1.0+1 1.1+1"]
    assert all(map(is_right, requests))
    assert counters(scheduler) == PreemptionCounters(1, 0, 3, 3)


def test_the_block_that_a_group_will_copy_to_is_kept_from_its_admission_on():
    """3 blocks of 2: the prompt has two, the third is the second answer's, though it stands empty."""
    scheduler = ContinuousScheduler(SharingManager(3, 2, 1), 3)
    requests = [request(0, 3, 2, n=2), request(1, 1, 1)]
    for r in requests:
        scheduler.add(r)
    assert steps(scheduler) == ["0.0+3", "0.0+1 0.1+1 copy1", "1+1"]
    assert all(map(is_right, requests))
    assert counters(scheduler).num_preemptions == 0


@pytest.mark.parametrize(("ended", "promised"), [([2], {0: 1}), ([0], {2**32: 1}), ([1, 2], {})])
def test_what_is_kept_for_a_group_follows_the_answers_that_are_left(ended, promised):
    """Three answers, and some of them end from outside before their prompt is computed."""
    manager = SharingManager(9, 2, 1)
    scheduler = ContinuousScheduler(manager, 3)
    r = request(0, 3, 4, n=3)
    scheduler.add(r)
    plan = scheduler.schedule()
    assert manager.promised == {0: 2}
    for i in ended:
        scheduler.finish(r, "abort", sequence=r.sequences[i])
    manager.check_integrity()
    assert manager.promised == promised
    assert words(plan) == "0.0+3"


def test_nothing_is_kept_for_a_group_of_which_one_answer_is_left():
    """Two of three answers end with their first token; what was kept for them is there for others."""
    manager = SharingManager(4, 2, 1)
    scheduler = ContinuousScheduler(manager, 4)
    r = Request(0, [1, 2, 3], request(0, 1, 2, n=3).params, eos_token_ids=(7,))
    scheduler.add(r)
    plan = scheduler.schedule()
    assert manager.promised == {0: 2}
    scheduler.update(plan, {0: 5, 2**32: 7, 2 * 2**32: 7})
    assert (len(r.live), manager.promised) == (1, {})
    scheduler.add(request(1, 4, 1))
    assert step(scheduler) == "0.0+1 1+4"


# -- prefixes


@pytest.mark.parametrize("index", INDEXES)
def test_two_equal_prompts_in_one_step_are_both_computed_and_later_ones_find_them(index):
    """Nothing can be found before it is computed, and equal blocks of running requests are not merged."""
    manager = prefix_manager(12, 2, index)
    scheduler = ContinuousScheduler(manager, 3)
    prompt = [1, 2, 3, 4, 5]
    requests = [request(i, 5, 3, prompt=prompt) for i in range(3)]
    scheduler.add(requests[0])
    scheduler.add(requests[1])
    assert step(scheduler) == "0+5 1+5"
    tables = [manager.block_table(i) for i in range(2)]
    assert not set(tables[0]) & set(tables[1])
    scheduler.add(requests[2])
    assert step(scheduler) == "0+1 1+1 2+1"
    assert manager.block_table(2)[:2] == tables[0][:2]
    steps(scheduler)
    assert [r.num_cached_tokens for r in requests] == [0, 0, 4]


@pytest.mark.parametrize("index", INDEXES)
@pytest.mark.parametrize(("length", "new"), [(3, 1), (4, 2), (5, 1)], ids=["kB-1", "kB", "kB+1"])
def test_a_prompt_that_is_cached_to_its_end_leaves_a_token_to_compute(index, length, new):
    scheduler = ContinuousScheduler(prefix_manager(9, 2, index), 1)
    requests = [request(i, length, 2, prompt=list(range(length))) for i in range(2)]
    for r in requests:
        scheduler.add(r)
    assert steps(scheduler) == [f"0+{length}", "0+1", f"1+{new}", "1+1"]
    assert all(map(is_right, requests))


@pytest.mark.parametrize("index", INDEXES)
def test_a_hit_on_a_free_block_takes_it_off_the_free_ones(index):
    """Two blocks are free, and both are request 2's prefix: there is no third for its last token."""
    scheduler = ContinuousScheduler(prefix_manager(4, 2, index), 2)
    prompt = [1, 2, 3, 4, 5]
    scheduler.add(request(0, 5, 1, prompt=prompt))
    assert step(scheduler) == "0+5"
    scheduler.add(request(1, 3, 2))
    scheduler.add(request(2, 5, 1, prompt=prompt))
    assert steps(scheduler) == ["1+3", "1+1", "2+1"]


@pytest.mark.parametrize("index", INDEXES)
def test_a_step_that_failed_leaves_nothing_to_be_found(index):
    scheduler = ContinuousScheduler(prefix_manager(9, 2, index), 1)
    prompt = [1, 2, 3, 4, 5]
    requests = [request(i, 5, 1, prompt=prompt) for i in range(2)]
    for r in requests:
        scheduler.add(r)
    scheduler.take_back(scheduler.schedule())
    assert steps(scheduler) == ["0+5", "1+1"]
