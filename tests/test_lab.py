"""What measures and examines: the comparison of tokens, the ladder's rungs, the doctor."""

from __future__ import annotations

import copy
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from random import Random
from types import SimpleNamespace

import pytest
import torch

from minivllm import engine_parts
from minivllm.decoding.generate import generate
from minivllm.errors import InvalidModelFile, InvalidOption, RequestTooLong
from minivllm.lab import doctor, ladder
from minivllm.lab.ladder_workload import SYSTEM, TEXT, default_budget, default_requests, ladder_requests
from minivllm.lab.same_tokens import (
    Comparison,
    compare_sampled,
    compare_tokens,
    distance,
    verdict_of_many,
)
from minivllm.lab.scheduling_cost import running_scheduler, scheduler_step
from minivllm.lab.step_time import time_step
from minivllm.lab.waste import Split, mean_split, split_blocks, split_held
from minivllm.lab.workload import WorkloadRequest
from minivllm.memory.contiguous import ContiguousManager
from minivllm.memory.naive_store import NaiveStore
from minivllm.memory.paged import PagedManager
from minivllm.memory.prefix_cache import PrefixCachingManager
from minivllm.memory.sharing import SharingManager
from minivllm.memory.size import bytes_per_token
from minivllm.memory.store import RecomputeStore
from minivllm.model.loader import load_model
from minivllm.model.tokenizer import ByteTokenizer
from minivllm.params import SamplingParams

PROMPT = [5, 6, 7]
BUDGET = (
    64 * 3 * 2 * 2 * 14 * 4
)  # bytes of 64 tokens' keys and values in tiny-llama: layers, k and v, heads, dim


@pytest.fixture(scope="module")
def tiny():
    return load_model("random:tiny-llama", dtype="float32", device="cpu", seed=1)


@pytest.fixture(scope="module")
def tokens(tiny):
    return list(generate(tiny, RecomputeStore(), PROMPT, SamplingParams(temperature=0, max_tokens=9)))


def test_equal_tokens_are_the_same(tiny, tokens):
    assert compare_tokens(tiny, PROMPT, tokens, list(tokens)).verdict == "yes"


def test_a_wrong_token_is_no_tie(tiny, tokens):
    wrong = [*tokens[:4], (tokens[4] + 1) % 300, *tokens[5:]]
    comparison = compare_tokens(tiny, PROMPT, tokens, wrong)
    assert comparison.verdict == "NO, from token 5"
    assert comparison.gap > comparison.error > 0


def test_a_run_that_ends_early_is_not_the_same(tiny, tokens):
    assert compare_tokens(tiny, PROMPT, tokens, tokens[:-1]).verdict == "NO, from token 9"


def test_two_tokens_nearer_than_the_error_are_a_tie_and_what_follows_is_still_checked(tiny, tokens):
    """Two rows of the output layer made equal: either token may win, and each leads on to other tokens."""
    model = copy.deepcopy(tiny)
    twin = next(i for i in range(300) if i not in tokens)
    model.lm_head.weight[twin] = model.lm_head.weight[tokens[2]]
    params = SamplingParams(temperature=0, max_tokens=6)
    rest = list(generate(model, RecomputeStore(), [*PROMPT, *tokens[:2], twin], params))
    swapped = [*tokens[:2], twin, *rest]
    assert compare_tokens(model, PROMPT, tokens, swapped).verdict == "tie at token 3"
    assert compare_tokens(model, PROMPT, tokens, swapped[:-1]).verdict.startswith("NO")
    garbage = [*swapped[:-1], (swapped[-1] + 1) % 300]
    assert compare_tokens(model, PROMPT, tokens, garbage).verdict == "NO, from token 9"


SAMPLING = SamplingParams(temperature=0.9, seed=11, max_tokens=7, ignore_eos=True)


@pytest.fixture(scope="module")
def drawn(tiny):
    return list(generate(tiny, RecomputeStore(), PROMPT, SAMPLING))


def test_a_sampled_token_that_its_number_does_not_lead_to_is_no_tie(tiny, drawn):
    assert compare_sampled(tiny, PROMPT, drawn, list(drawn), 0.9, Random(11)).verdict == "yes"
    for place in (0, 3):
        wrong = [*drawn[:place], (drawn[place] + 1) % 300, *drawn[place + 1 :]]
        comparison = compare_sampled(tiny, PROMPT, drawn, wrong, 0.9, Random(11))
        assert comparison.verdict.startswith("NO")
        assert comparison.gap > comparison.error > 0
    assert compare_sampled(tiny, PROMPT, drawn, drawn[:-1], 0.9, Random(11)).verdict == "NO, from token 7"


class Given(Random):
    """Draws these numbers."""

    def __init__(self, numbers):
        super().__init__(0)
        self.numbers = list(numbers)

    def random(self):
        return self.numbers.pop(0)


def test_a_number_on_the_boundary_between_two_tokens_is_a_tie_and_what_follows_is_still_checked(tiny):
    """The number is the boundary itself: rounding decides, and each token leads on to others."""
    exact = copy.deepcopy(tiny).double()
    with torch.inference_mode():
        batch = ladder.Batch.pack([(0, PROMPT, 0)])
        probs, order = exact(batch, RecomputeStore())[0].softmax(-1).sort(descending=True)
    boundary = probs.cumsum(0)[2].item()
    before, after = order[2].item(), order[3].item()

    def run(token: int) -> list[int]:
        params = SamplingParams(temperature=1, seed=5, max_tokens=5, ignore_eos=True)
        return [token, *generate(tiny, RecomputeStore(), [*PROMPT, token], params)]

    def compare(expected, got, first):
        rest = Random(5)
        return compare_sampled(
            tiny, PROMPT, expected, got, 1.0, Given([first, *(rest.random() for _ in range(5))])
        ).verdict

    a, b = run(before), run(after)
    assert compare(a, b, boundary) == "tie at token 1"
    assert compare(b, a, boundary) == "tie at token 1"
    assert compare(a, b, boundary - 1e-3) == "NO, from token 1"
    assert compare(a, b, boundary + 1e-3) == "NO, from token 1", "b is right, and a is the one that is not"
    assert compare(a, run(order[7].item()), boundary) == "NO, from token 1"
    assert compare(a, [*b[:-1], (b[-1] + 1) % 300], boundary) == "NO, from token 6"


def test_how_far_a_number_is_from_where_a_token_stands():
    probs = torch.tensor([0.125, 0.5, 0.25, 0.125], dtype=torch.float64)
    assert [distance(probs, 2, x, 1e-9) for x in (0.25, 0.5, 0.6, 0.75, 1.0)] == [0.25, 0, 0, 0, 0.25]
    assert distance(probs, 1, 0.75, 1e-9) == 0.25
    for token in (0, 3):  # as likely as one another: either may be the first of the two
        assert [distance(probs, token, x, 1e-9) for x in (0.75, 0.8, 1.0)] == [0, 0, 0]


def requests_of(*lengths: tuple[int, int]) -> list[WorkloadRequest]:
    return [
        WorkloadRequest(tuple((7 * i + j) % 300 for j in range(n)), None, out)
        for i, (n, out) in enumerate(lengths)
    ]


WORKLOAD = requests_of((9, 12), (3, 5), (17, 8), (1, 1), (30, 9))


def test_every_rung_gives_the_same_tokens_under_the_same_budget(tiny):
    results = list(ladder.run_ladder(tiny, WORKLOAD))
    assert [r.rung.name for r in results] == list(ladder.RUNGS)[:-2] == list(ladder.rungs_of(tiny.device))
    assert [r.same_tokens for r in results] == ["(reference)"] + ["yes"] * (len(results) - 1)
    slots = {r.records[0].snapshot.num_slots for r in results}
    assert slots == {64}, "the five need 9 + 11, 3 + 4, 17 + 7, 1, 30 + 8 = 90 slots together"
    for r in results:
        assert [len(tokens) for tokens in r.outputs] == [w.max_tokens for w in WORKLOAD]
        assert r.latency["output_tokens"] == 35
        assert sum(r.in_flight) == sum(len(record.step.scheduled) for record in r.records) >= 35
        assert sum(record.step.num_sampled for record in r.records) == 35
        assert max(record.snapshot.held for record in r.records) <= 64


def test_on_the_ladders_own_workload_every_rung_shows_what_it_is_for(tiny):
    """The demo's requests in the demo's number of slots; what fits does not depend on the model."""
    workload = ladder_requests(ByteTokenizer())
    results = {r.rung.name: r for r in ladder.run_ladder(tiny, workload)}
    assert {r.same_tokens for r in results.values()} == {"(reference)", "yes"}
    assert default_budget(tiny, workload) // bytes_per_token(tiny) == 512
    most = {name: max(r.in_flight) for name, r in results.items()}
    computed = {name: sum(r.computed) for name, r in results.items()}
    mean = {name: r.to_json()["in_flight_mean"] for name, r in results.items()}
    assert computed["recompute"] < 8702, "more would take minutes"
    assert most["contiguous-max"] == 1
    for policy in ("max", "pow2", "oracle"):
        assert most["paged"] >= 1.5 * most[f"contiguous-{policy}"]
    assert most["sharing"] > most["paged"]
    assert computed["sharing"] < 0.8 * computed["paged"]
    assert results["sharing"].num_copied_blocks == 9, "three groups of four: all but one copy a last block"
    assert results["paged"].num_copied_blocks == 0
    assert computed["prefix"] < computed["sharing"]
    rate = results["prefix"].prefix_hit_rate
    assert rate is not None
    assert rate > 0.1
    assert results["sharing"].prefix_hit_rate is None
    assert mean["continuous"] > 1.3 * mean["prefix"]
    assert max(results["chunked"].computed) <= ladder.MAX_NUM_BATCHED_TOKENS
    assert max(results["continuous"].computed[1:]) > 2 * ladder.MAX_NUM_BATCHED_TOKENS, "a long prompt joins"


def test_the_budget_has_room_for_a_group_that_shares_blocks(tiny):
    for n in (1, 2, 3):
        workload = ladder_requests(ByteTokenizer(), n)
        (result,) = ladder.run_ladder(tiny, workload, rungs=["sharing"])
        assert len(result.outputs) == 3 + n
    single = requests_of((16, 2))
    assert default_budget(tiny, single) == 32 * bytes_per_token(tiny)


def test_neighbouring_rungs_of_paged_memory_differ_in_one_thing():
    paged = [dict(r.options) for r in ladder.RUNGS.values() if r.options["cache"] == "paged"]
    changed = [
        sorted(key for key in a.keys() | b.keys() if a.get(key) != b.get(key)) for a, b in pairwise(paged)
    ]
    budget = "max_num_batched_tokens"
    assert changed == [
        ["sharing"], ["prefix_cache"], ["scheduler"], [budget, "scheduler"], ["attention"], ["enforce_eager"]
    ]  # fmt: skip


def test_the_last_rungs_are_for_a_gpu(tiny):
    assert ladder.rungs_of(torch.device("cuda", 1)) == tuple(ladder.RUNGS)
    with pytest.raises(InvalidOption, match="attention='triton'"):
        next(ladder.run_ladder(tiny, WORKLOAD, rungs=["naive", "triton"]))
    with pytest.raises(InvalidOption, match="rung 'graphs' is not possible on cpu"):
        next(ladder.run_ladder(tiny, WORKLOAD, rungs=["naive", "graphs"]))


SAMPLES = [
    WorkloadRequest((5, 6, 7, 8, 9), None, 4, n=3, temperature=0.9, seed=3),
    WorkloadRequest((5, 6, 7), None, 6),
    WorkloadRequest((9, 8, 7, 6, 5, 4, 3), None, 2, n=2, temperature=1.5, seed=3),
]


def test_the_samples_of_a_request_are_sequences_with_seeds_in_a_row_on_every_rung(tiny):
    expected = []
    for w in SAMPLES:
        for i in range(w.n):
            params = SamplingParams(
                temperature=w.temperature,
                seed=None if w.seed is None else w.seed + i,
                max_tokens=w.max_tokens,
            )
            expected.append(list(generate(tiny, NaiveStore(), w.token_ids, params)))
    for r in ladder.run_ladder(tiny, SAMPLES, kv_cache_memory_bytes=2 * BUDGET):
        assert r.outputs == expected
        assert r.to_json()["token_ids"] == expected
        assert r.latency["output_tokens"] == 3 * 4 + 6 + 2 * 2
        assert r.latency["requests"] == 6, "times are those of sequences"
        if r.rung.name in ("recompute", "sharing"):
            assert r.in_flight == [6, 6, 4, 4, 1, 1]
        assert r.computed[0] == {"recompute": 32, "sharing": 15}.get(r.rung.name, r.computed[0])


def test_a_sample_that_differs_is_named(tiny):
    (right,) = ladder.run_ladder(tiny, SAMPLES, rungs=["sharing"], kv_cache_memory_bytes=2 * BUDGET)
    wrong = [list(tokens) for tokens in right.outputs]
    assert ladder.compare_outputs(tiny, SAMPLES, right.outputs, wrong) == "yes"
    wrong[5][1] = (wrong[5][1] + 1) % 300
    assert ladder.compare_outputs(tiny, SAMPLES, right.outputs, wrong) == "NO, request 2.1 from token 2"


def test_each_sample_is_held_to_the_numbers_of_its_own_seed(tiny, monkeypatch):
    drawn = []

    def note(model, prompt, expected, got, temperature, generator):
        drawn.append((temperature, generator.random()))
        return Comparison()

    monkeypatch.setattr(ladder, "compare_sampled", note)
    ladder.compare_outputs(tiny, SAMPLES, [[1]] * 6, [[1]] * 6)
    seeds = [(0.9, 3), (0.9, 4), (0.9, 5), (1.5, 3), (1.5, 4)]
    assert drawn == [(temperature, Random(seed).random()) for temperature, seed in seeds]


def test_more_samples_than_a_rung_can_run_at_once_are_refused_before_anything_runs(tiny):
    many = [WorkloadRequest((5, 6), None, 3, n=49, temperature=1, seed=0)]
    with pytest.raises(InvalidOption, match=r"n=49 .*'chunked': it runs at most 48"):
        next(ladder.run_ladder(tiny, many, kv_cache_memory_bytes=40 * BUDGET))
    with pytest.raises(RequestTooLong, match=r"49 times 4 tokens.*'sharing'"):
        next(ladder.run_ladder(tiny, many, kv_cache_memory_bytes=BUDGET))


def test_what_is_shared_counts_once_and_what_is_cached_is_not_held():
    manager = PrefixCachingManager(8, 4, 1)
    manager.begin(0, 6, [])
    manager.fork(0, 9)  # blocks of 4 and 2 tokens, both shared
    assert split_blocks(manager.snapshot(), {0: 10, 9: 7}) == Split(6, 2, 0)
    manager.allocate(9, 7)
    manager.take_copies()  # 9 has a last block of its own, which is full with 7 tokens but for one slot
    assert split_blocks(manager.snapshot(), {0: 10, 9: 7}) == Split(4 + 2 + 3, 2, 1)
    manager.register(0, [1, 2, 3, 4, 5, 6])
    manager.free(0)
    manager.free(9)
    assert manager.snapshot().cached
    assert split_blocks(manager.snapshot(), {}) == Split()


def test_a_memory_without_sharing_is_split_alike_by_block_and_by_sequence():
    plain, sharing = PagedManager(9, 4, 1), SharingManager(9, 4, 1)
    for manager in (plain, sharing):
        for seq_id, n in ((0, 5), (1, 9), (2, 1)):
            manager.allocate(seq_id, n)
    final = {0: 11, 1: 9, 2: 3}
    assert mean_split([plain.snapshot(), sharing.snapshot()], final) == Split(30, 10, 8)
    assert split_held(plain.snapshot(), final) == split_blocks(sharing.snapshot(), final) == Split(15, 5, 4)


def test_what_is_held_is_split_by_what_became_of_it(tiny):
    results = {
        r.rung.name: r for r in ladder.run_ladder(tiny, requests_of((3, 5)), kv_cache_memory_bytes=BUDGET)
    }
    # one request: 3 tokens in memory after the first step, 7 after the fifth and last
    steps, used, later = 5, 3 + 4 + 5 + 6 + 7, 4 + 3 + 2 + 1 + 0
    assert results["naive"].split == Split(used, 0, 0)
    assert results["contiguous-max"].split == Split(used, later, steps * 64 - used - later)
    assert results["contiguous-oracle"].split == Split(used, later, steps * 8 - used - later)
    assert results["paged"].split == Split(used, later, steps * 16 - used - later)
    assert results["recompute"].split == Split()
    assert results["recompute"].split.share("used") is None
    figures = results["contiguous-oracle"].to_json()
    assert figures["utilisation"] == pytest.approx(used / (steps * 8))
    assert figures["utilisation"] + figures["reserved_for_later"] + figures["internal_waste"] == 1
    assert figures["kv_held_bytes"] == 8 * bytes_per_token(tiny)
    assert figures["kv_used_bytes"] == 5 * bytes_per_token(tiny)


def test_the_picture_of_the_split_in_the_module_is_true():
    snapshot = ContiguousManager(16, 1, 16)
    snapshot.expect(4, 3, 4)
    snapshot.allocate(4, 5)
    assert split_held(snapshot.snapshot(), {4: 7}) == Split(5, 2, 9)


def test_a_workload_longer_than_the_context_is_refused_before_anything_runs(tiny):
    with pytest.raises(RequestTooLong, match=r"Request 2 has 3 tokens and max_tokens=1022.*1024"):
        next(ladder.run_ladder(tiny, requests_of((1, 1), (3, 1022))))


def test_a_budget_too_small_for_a_request_or_a_block_is_refused(tiny):
    slot = bytes_per_token(tiny)
    for slots, rung in ((37, "naive"), (40, "contiguous-max"), (63, "contiguous-max")):
        with pytest.raises(RequestTooLong, match=rf"may need 38 tokens.* {slots} slots the rung '{rung}'"):
            next(ladder.run_ladder(tiny, WORKLOAD, kv_cache_memory_bytes=slots * slot))
    with pytest.raises(InvalidOption, match="a block takes"):
        next(ladder.run_ladder(tiny, WORKLOAD, kv_cache_memory_bytes=3 * slot, rungs=["paged"]))


def test_a_dtype_too_coarse_to_compare_tokens_is_refused():
    model = load_model("random:tiny-llama", dtype="bfloat16", device="cpu")
    with pytest.raises(InvalidOption, match="bfloat16"):
        next(ladder.run_ladder(model, WORKLOAD))


def test_a_request_as_long_as_the_context_is_taken(tiny):
    (result,) = ladder.run_ladder(tiny, requests_of((1020, 4)), rungs=["paged"])
    assert len(result.outputs[0]) == 4
    (result,) = ladder.run_ladder(tiny, requests_of((6, 4)), rungs=["paged"], max_model_len=10)
    with pytest.raises(RequestTooLong, match="more than the 9"):
        next(ladder.run_ladder(tiny, requests_of((6, 4)), rungs=["paged"], max_model_len=9))


def test_the_ladder_goes_on_past_end_of_sequence_tokens(tiny):
    model = copy.copy(tiny)
    model.config = replace(tiny.config, eos_token_ids=tuple(range(307)))
    (result,) = ladder.run_ladder(model, WORKLOAD, rungs=["naive"])
    assert [len(tokens) for tokens in result.outputs] == [w.max_tokens for w in WORKLOAD]


def test_the_fullest_step_has_the_most_requests_and_of_those_the_most_tokens(tiny):
    (result,) = ladder.run_ladder(tiny, requests_of((30, 3), (4, 12), (5, 9), (40, 2)), rungs=["continuous"])
    most = max(result.in_flight)
    full = [record for record in result.records if len(record.step.scheduled) == most]
    assert result.fullest in full
    assert result.fullest.snapshot.used == max(record.snapshot.used for record in full)
    assert result.to_json()["in_flight_most"] == most


def test_the_time_to_first_token_counts_from_arrival(tiny):
    (result,) = ladder.run_ladder(tiny, WORKLOAD, rungs=["contiguous-max"])
    first = result.records[0].step
    waited = [record.step for record in result.records if record.step.scheduled[0][1] == 0]
    ends = [step.end - first.start for step in waited]
    assert len(ends) == len(WORKLOAD), "one after the other"
    mean = 1e3 * sum(ends) / len(ends)
    assert result.latency["ttft_ms"]["mean"] == pytest.approx(mean, rel=0.05)
    assert result.latency["seconds"] == pytest.approx(result.records[-1].step.end - first.start, rel=0.05)


def test_a_name_may_stand_for_several_rungs_and_an_unknown_one_is_refused():
    assert [r.name for r in ladder.check_rungs(["contiguous"])] == [
        "contiguous-max",
        "contiguous-pow2",
        "contiguous-oracle",
    ]
    assert [r.name for r in ladder.check_rungs(["paged", "naive", "paged"])] == ["naive", "paged"]
    with pytest.raises(InvalidOption, match=r"'nave'.*contiguous-pow2"):
        ladder.check_rungs(["naive", "nave"])


class ForgetfulStore(NaiveStore):
    """Loses the oldest key and value: fluent, fast and wrong."""

    def attend(self, layer, q, k, v, batch):
        for key, (keys, values) in self._kv.items():
            if key[1] == layer and len(keys) > 1:
                self._kv[key] = torch.cat((keys[1:2], keys[1:])), torch.cat((values[1:2], values[1:]))
        return super().attend(layer, q, k, v, batch)


def test_the_ladder_tells_a_memory_that_forgets(tiny, monkeypatch):
    monkeypatch.setattr(engine_parts, "NaiveStore", ForgetfulStore)
    results = list(ladder.run_ladder(tiny, requests_of((1, 1), (40, 12)), rungs=("recompute", "naive")))
    assert results[1].same_tokens.startswith("NO, request 1 from token")


def test_verdicts_on_many_requests_count_ties_and_name_the_first_that_differs():
    yes, tie, no = Comparison(), Comparison(3, 0.1, 0.2), Comparison(4, 0.3, 0.2)
    assert verdict_of_many([yes, yes]) == "yes"
    assert verdict_of_many([yes, tie]) == "yes, 1 tie"
    assert verdict_of_many([tie, yes, tie]) == "yes, 2 ties"
    assert verdict_of_many([yes, tie, no, no]) == "NO, request 2 from token 5"


def test_the_ladders_requests_are_passages_that_begin_where_a_word_does():
    requests = default_requests(ByteTokenizer(), 25)
    assert len(requests) == 25
    assert default_requests(ByteTokenizer(), 20) == requests[:20]
    for request in requests:
        text = bytes(request.token_ids).decode()
        assert f" {text}" in f" {TEXT} {TEXT}"
    assert len({r.prompt_token_ids for r in requests}) == 25


def test_the_ladders_own_requests_begin_alike_and_some_ask_for_samples():
    requests = ladder_requests(ByteTokenizer(), 30)
    assert ladder_requests(ByteTokenizer(), 12) == requests[:12]
    system = {r.token_ids[:20] for r in requests}
    assert system == {tuple(SYSTEM.encode()[:20])}
    assert len({r.token_ids for r in requests}) == 30
    assert [(r.n, r.seed) for r in requests[:12] if r.temperature] == [(4, 0), (4, 40), (4, 80)]
    assert all(bytes(r.token_ids[20:]).decode() in f" {TEXT} {TEXT}" for r in requests)


def test_the_time_of_a_step_is_taken_at_the_length_asked_for(tiny):
    lengths = []

    class Noting(RecomputeStore):
        def attend(self, layer, q, k, v, batch):
            lengths.append(batch.slices[0].seq_len)
            return super().attend(layer, q, k, v, batch)

    assert time_step(tiny, Noting, PROMPT, 33) > 0
    assert set(lengths) == {33, 34, 35}
    assert time_step(tiny, NaiveStore, PROMPT, 1) > 0


def calls_of_a_step(num_running: int, num_blocks: int) -> int:
    """Function calls, of Python and of C, that a scheduling step makes."""
    scheduler = running_scheduler(num_running, num_blocks, steps=40)
    events: list[str] = []
    sys.setprofile(lambda frame, event, argument: events.append(event))
    for _ in range(16):  # so that each request crosses the end of a block once
        scheduler_step(scheduler)
    sys.setprofile(None)
    return events.count("call") + events.count("c_call")


def test_a_scheduling_step_is_linear_in_running_requests_and_flat_in_the_size_of_the_pool():
    few, many = calls_of_a_step(8, 2**10), calls_of_a_step(128, 2**10)
    assert many == pytest.approx(16 * few, rel=0.1)
    assert calls_of_a_step(8, 2**16) == few


def test_the_doctor_finds_nothing_wrong_here(smollm2_source):
    findings = {finding.what: finding for finding in doctor.examine()}
    assert not [f for f in findings.values() if f.status == "fault"]
    assert str(smollm2_source.path) in findings["model file"].found
    assert "right answer" in findings["Triton interpreter"].found
    assert findings["torch"].found == torch.__version__


def test_the_doctor_says_what_is_missing_for_the_kernels_in_c(monkeypatch):
    """Nothing is broken without them: the engine is slower."""
    from minivllm.kernels import c_linear

    def missing() -> None:
        raise InvalidOption("attention='c' is not possible: there is no C compiler. Install one.")

    monkeypatch.setattr(c_linear, "library", missing)
    finding = doctor._kernels()
    assert (finding.what, finding.status) == ("C kernels", "note")
    assert "there is no C compiler" in finding.found


def test_the_doctor_does_not_download(home):
    finding = doctor._model_file()
    assert (finding.status, home.exists()) == ("note", False)
    assert "minivllm pull" in finding.found


def test_the_doctor_says_when_the_model_file_is_damaged_or_the_folder_is_none(home):
    from minivllm.model import hub

    home.write_text("a file")
    assert "is a file" in doctor._model_file().found
    home.unlink()
    path = home / "models" / hub.DEFAULT_MODEL / hub.SMOLLM2.file_name
    path.parent.mkdir(parents=True)
    path.write_bytes(b"GGUF, half of it")
    finding = doctor._model_file()
    assert (finding.status, "damaged" in finding.found) == ("fault", True)
    with pytest.raises(InvalidModelFile):
        hub.find_default()


@pytest.mark.parametrize(
    ("done", "said"),
    [
        (SimpleNamespace(returncode=0, stdout="0.25\n", stderr=""), "wrong answer here (off by 2.5e-01)"),
        (SimpleNamespace(returncode=0, stdout="inf\n", stderr=""), "wrong answer"),
        (SimpleNamespace(returncode=0, stdout="nan\n", stderr=""), "wrong answer"),
        (
            SimpleNamespace(returncode=1, stdout="", stderr="Traceback\nRuntimeError: no driver\n"),
            "no driver",
        ),
        (SimpleNamespace(returncode=-11, stdout="", stderr=""), "no message"),
    ],
    ids=range(5),
)
def test_the_doctor_blames_the_environment_when_the_kernel_fails(monkeypatch, done, said):
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: done)
    finding = doctor._interpreter()
    assert finding.status == "fault"
    assert said in finding.found
    assert " here" in finding.found


def test_the_doctor_names_a_package_that_is_missing(monkeypatch):
    assert doctor._package("no-such-package").status == "fault"
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(
        doctor, "version", lambda name: (_ for _ in ()).throw(doctor.PackageNotFoundError(name))
    )
    assert doctor._package("triton").status == "note"
    assert doctor._interpreter().status == "note"
