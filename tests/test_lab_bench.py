"""Benchmarks: the same tokens from every engine, figures that add up, and refusals by name.

Nothing here looks at how long anything takes.
"""

from __future__ import annotations

import json
import math
import os
import sys
import threading
from dataclasses import replace
from importlib.machinery import ModuleSpec
from itertools import accumulate, pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm import cli
from minivllm.decoding.generate import generate
from minivllm.errors import InvalidModel, InvalidOption, InvalidPrompt, MinivllmError, RequestTooLong
from minivllm.lab.bench import hf_model
from minivllm.lab.bench.figures import parse_goodput, parse_percentiles
from minivllm.lab.bench.minivllm_engine import replay
from minivllm.lab.bench.options import ENGINES, BenchOptions, engine_options, run_bench
from minivllm.lab.bench.result import BenchResult, RequestRecord, new_records
from minivllm.lab.workload import WorkloadRequest, make_workload, poisson_arrivals, write_workload
from minivllm.memory.naive_store import NaiveStore
from minivllm.model.hub import ModelSource
from minivllm.model.loader import load_model
from minivllm.outputs import RequestMetrics
from minivllm.params import SamplingParams

VOCAB = 97
HF_ENGINES = ("transformers", "transformers-continuous")
REQUESTS = make_workload(5, seed=1, mean_in=9, mean_out=6, max_in=30, max_out=14, vocab_size=VOCAB)


def ids_of(request: WorkloadRequest) -> tuple[int, ...]:
    return request.prompt_token_ids or ()


def quiet(done: int, total: int) -> None:
    """No progress."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A folder with a tiny random Llama, and what it answers to each request alone, token by token.

    Its end-of-sequence token is one that it really chooses, so an engine that stops there is found out.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=3,
        max_position_embeddings=64,
        initializer_range=0.4,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config).double().eval()
    answers = []
    for request in REQUESTS:
        ids = list(ids_of(request))
        for _ in range(request.max_tokens):
            with torch.inference_mode():
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        answers.append(ids[len(ids_of(request)) :])
    eos = max(answers, key=len)[1]
    model.config.eos_token_id = model.generation_config.eos_token_id = eos
    folder = tmp_path_factory.mktemp("tiny")
    model.save_pretrained(folder)
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == eos
    return folder, answers


@pytest.fixture(scope="module")
def results(tiny):
    """One run of each engine of the transformers library: three requests at once at most."""
    found = {}
    for engine in HF_ENGINES:
        seen: list[tuple[int, int]] = []
        options = BenchOptions(str(tiny[0]), "float64", "cpu", max_num_seqs=3)
        result = run_bench(engine, REQUESTS, options, lambda *counts, seen=seen: seen.append(counts))
        found[engine] = result, seen
    return found


@pytest.mark.parametrize("engine", HF_ENGINES)
def test_an_engine_gives_each_request_the_tokens_of_plain_greedy_decoding(engine, results, tiny):
    result, _ = results[engine]
    assert [record.token_ids for record in result.records] == tiny[1]


@pytest.mark.parametrize("engine", HF_ENGINES)
def test_each_token_has_its_time_and_progress_ends_at_the_total(engine, results):
    result, seen = results[engine]
    for record, request in zip(result.records, REQUESTS, strict=True):
        times = record.metrics.token_times
        assert len(times) == request.max_tokens
        assert times[0] > 0
        assert times == sorted(times)
        assert record.num_prompt_tokens == len(ids_of(request))
    total = sum(r.max_tokens for r in REQUESTS)
    assert seen[-1] == (total, total)
    assert all(a <= b for (a, _), (b, _) in pairwise(seen))


def test_static_batches_come_one_after_the_other(results):
    records = results["transformers"][0].records
    first, second = records[:3], records[3:]
    assert len({record.metrics.token_times[0] for record in first}) == 1
    assert max(r.metrics.token_times[-1] for r in first) < min(r.metrics.token_times[0] for r in second)


def test_a_summary_says_what_was_run_where(results):
    for engine in HF_ENGINES:
        found = results[engine][0].summary()
        assert found["engine"] == engine
        assert (found["dtype"], found["options"]["max_num_seqs"]) == ("float64", 3)
        assert found["versions"]["torch"] == torch.__version__
        assert found["versions"]["transformers"]
        assert found["device"].startswith("CPU")
        assert found["peak_memory_bytes"] > 2**20


def test_the_figures_of_a_hand_made_run():
    times = ([0.5, 0.7, 1.0], [2.0], [1.5, 1.6])  # arrivals 0.1, 1.0, 1.0
    records = [
        RequestRecord(n, RequestMetrics(arrival_time=at, token_times=t))
        for n, at, t in zip((4, 5, 6), (0.1, 1.0, 1.0), times, strict=True)
    ]
    found = BenchResult("minivllm", "m", "float32", "CPU", records).summary()
    assert [found[key] for key in ("requests", "prompt_tokens", "output_tokens")] == [3, 15, 6]
    assert (found["seconds"], found["tok_s"]) == (2.0, 3.0)
    # TTFT 400, 1000, 500; p90 of three values lies at 1.8 of the way 0..2, p99 at 1.98
    assert found["ttft_ms"] == pytest.approx({"mean": 633.333, "p50": 500, "p90": 900, "p99": 990}, abs=1e-3)
    # TPOT 250 and 100: the request of one token has none
    assert found["tpot_ms"] == pytest.approx({"mean": 175, "p50": 175, "p90": 235, "p99": 248.5}, abs=1e-3)
    # ITL 200, 300, 100, in one pool
    assert found["itl_ms"] == pytest.approx({"mean": 200, "p50": 200, "p90": 280, "p99": 298}, abs=1e-3)
    # E2EL 900, 1000, 600
    assert found["e2el_ms"] == pytest.approx({"mean": 833.333, "p50": 900, "p90": 980, "p99": 998}, abs=1e-3)
    # three requests, 15 tokens in, in 2 seconds; the last came after one
    assert [found[key] for key in ("req_s", "input_tok_s", "offered_req_s")] == [1.5, 7.5, 3.0]
    assert (found["goodput"], found["cached_tokens"]) == (None, None)


def test_cached_tokens_are_summed_where_an_engine_says_how_many():
    records = [RequestRecord(9, RequestMetrics(token_times=[1.0]), num_cached_tokens=n) for n in (4, 0, None)]
    assert BenchResult("minivllm", "m", "float32", "CPU", records).summary()["cached_tokens"] == 4
    assert BenchResult("minivllm", "m", "float32", "CPU", records[1:]).summary()["cached_tokens"] == 0


# What a request may have been through: when it came, when its first token did, and the gaps after that. Times
# are whole numbers of 1/1024 s, so that sums and differences are exact.
_TICKS = st.integers(0, 200).map(lambda n: n / 1024)
_LIVES = st.lists(st.tuples(_TICKS, st.none() | _TICKS, st.lists(_TICKS, max_size=4)), min_size=1, max_size=9)


def records_of(lives) -> list[RequestRecord]:
    found = []
    for number, (came, waited, gaps) in enumerate(lives, 1):
        times = [] if waited is None else list(accumulate([came + waited, *gaps]))
        found.append(RequestRecord(number, RequestMetrics(arrival_time=came, token_times=times)))
    return found


@settings(deadline=None)
@given(lives=_LIVES, bounds=st.dictionaries(st.sampled_from(["ttft", "tpot", "e2el"]), _TICKS, min_size=1))
def test_goodput_is_that_of_a_plain_model(lives, bounds):
    slo = {key: 1000 * bound for key, bound in bounds.items()}
    found = BenchResult("minivllm", "m", "float32", "CPU", records_of(lives)).summary(slo=slo)
    good, missed = 0, dict.fromkeys(bounds, 0)
    for _, waited, gaps in lives:
        latency = {"ttft": waited, "tpot": sum(gaps) / (len(gaps) or 1), "e2el": (waited or 0) + sum(gaps)}
        above = [key for key, bound in bounds.items() if waited is None or latency[key] > bound]
        good += not above
        for key in above:
            missed[key] += 1
    got = found["goodput"]
    assert (got["slo_ms"], got["good"], got["missed"]) == (slo, good, missed)
    assert max(missed.values()) <= len(lives) - good <= sum(missed.values())
    if seconds := duration(lives):
        assert got["req_s"] == round(good / seconds, 4)
        assert got["req_s"] <= found["req_s"]
    json.dumps(found, allow_nan=False)


def test_a_latency_at_its_bound_is_kept_and_one_token_never_misses_tpot():
    lives = [(0.0, 0.5, [0.25, 0.25]), (0.5, 0.5, []), (0.0, 0.5, [0.25, 0.3])]
    result = BenchResult("minivllm", "m", "float32", "CPU", records_of(lives))
    assert result.summary(slo={"ttft": 500.0, "tpot": 250.0})["goodput"] == {
        "slo_ms": {"ttft": 500.0, "tpot": 250.0},
        "good": 2,
        "missed": {"ttft": 0, "tpot": 1},
        "req_s": round(2 / 1.05, 4),
    }
    assert result.summary(slo={"tpot": 0.0})["goodput"]["good"] == 1  # vLLM counts its TPOT as 0
    assert result.summary(slo={"ttft": 499.9})["goodput"]["good"] == 0


@settings(deadline=None)
@given(
    lives=_LIVES,
    percentiles=st.lists(
        st.integers(0, 100) | st.floats(0, 100, allow_subnormal=False), min_size=1, max_size=4
    ),
)
def test_percentiles_are_those_of_a_plain_model_and_rates_add_up(lives, percentiles):
    records = records_of(lives)
    found = BenchResult("minivllm", "m", "float32", "CPU", records).summary(percentiles)
    latencies = {
        "ttft_ms": [waited for _, waited, _ in lives if waited is not None],
        "tpot_ms": [sum(gaps) / len(gaps) for _, waited, gaps in lives if waited is not None and gaps],
        "itl_ms": [gap for _, waited, gaps in lives if waited is not None for gap in gaps],
        "e2el_ms": [waited + sum(gaps) for _, waited, gaps in lives if waited is not None],
    }
    for name, values in latencies.items():
        assert list(found[name]) == ["mean", *dict.fromkeys(f"p{percent}" for percent in percentiles)]
        for percent in percentiles:
            expected = (
                None if not values else pytest.approx(1000 * between(sorted(values), percent), abs=1e-3)
            )
            assert found[name][f"p{percent}"] == expected
    seconds, last = duration(lives), max(came for came, _, _ in lives)
    if seconds:
        assert found["req_s"] == round(len(latencies["ttft_ms"]) / seconds, 4)
        assert found["input_tok_s"] == round(found["prompt_tokens"] / seconds, 2)
        assert found["tok_s"] == round(found["output_tokens"] / seconds, 2)
    if last and None not in [waited for _, waited, _ in lives]:
        assert found["req_s"] <= found["offered_req_s"]
    assert (found["offered_req_s"] is None) == (last == 0)


def duration(lives) -> float:
    """When the last token came; 0 without any."""
    return max((came + waited + sum(gaps) for came, waited, gaps in lives if waited is not None), default=0.0)


def between(values: list[float], percent: float) -> float:
    """The value at this share of the way from the smallest to the largest, on straight lines."""
    place = (len(values) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(values) - 1)
    return values[below] + (place - below) * (values[above] - values[below])


def test_percentiles_and_bounds_are_read_as_they_are_written_and_refused_by_name():
    assert parse_percentiles("50, 99.9,0,100.0") == (50, 99.9, 0, 100)
    assert [str(p) for p in parse_percentiles("90.0,99.90")] == ["90", "99.9"]
    for text in ("", "50,", "101", "-1", "nan", "p50", "50;90"):
        with pytest.raises(InvalidOption, match=f"^percentiles='{text}'.*no number from 0 to 100"):
            parse_percentiles(text)
    with pytest.raises(InvalidOption, match="twice"):
        parse_percentiles("50,50.0")
    assert parse_goodput(["ttft:500 e2el:5e3", "tpot:0"]) == {"ttft": 500.0, "e2el": 5000.0, "tpot": 0.0}
    assert parse_goodput([]) == {}
    for pair in ("ttft", "ttft:", ":5", "itl:5", "TTFT:5", "ttft:-1", "ttft:nan", "ttft:inf", "ttft:5:6"):
        with pytest.raises(InvalidOption, match=f"^goodput='{pair}' is not possible.*as in ttft:500"):
            parse_goodput([pair])
    with pytest.raises(InvalidOption, match="ttft has a bound already"):
        parse_goodput(["ttft:500", "ttft:500"])


def test_where_nothing_was_measured_the_figure_is_null():
    for tokens in ([], [0.5]):
        records = [RequestRecord(3, RequestMetrics(token_times=tokens))]
        found = BenchResult("minivllm", "m", "float32", "CPU", records).summary()
        assert json.loads(json.dumps(found, allow_nan=False)) == found
        assert set(found["tpot_ms"].values()) == set(found["itl_ms"].values()) == {None}
        assert found["peak_memory_bytes"] is None
    nothing = BenchResult("minivllm", "m", "float32", "CPU", []).summary()
    assert (nothing["seconds"], nothing["tok_s"], nothing["ttft_ms"]["p99"]) == (None, None, None)


# --- this engine ---


def test_this_engine_gives_the_same_tokens_and_waits_for_arrivals():
    decoder = load_model("random:tiny-llama", dtype="float64")
    late = [
        replace(request, arrival=at) for request, at in zip(REQUESTS, (0.02, 0, 0.3, 0, 0.01), strict=True)
    ]
    options = BenchOptions("random:tiny-llama", "float64", block_size=4, num_blocks=40, max_num_seqs=2)
    result = run_bench("minivllm", late, options, quiet)
    for record, request in zip(result.records, late, strict=True):
        params = SamplingParams(temperature=0, max_tokens=request.max_tokens, ignore_eos=True)
        assert record.token_ids == list(generate(decoder, NaiveStore(), ids_of(request), params))
        assert len(record.metrics.token_times) == request.max_tokens
        assert record.metrics.arrival_time == request.arrival
        assert record.metrics.token_times[0] > request.arrival
    found = result.summary()
    assert found["options"]["block_size"] == 4
    assert found["options"]["scheduler"] == "chunked"


class ClockedEngine:
    """As much of this engine as the replay uses, on a clock of its own: a step takes `step_seconds` and gives
    each request a token. It keeps when each request was added, and every sleep."""

    def __init__(self, step_seconds: float):
        self.now, self.step_seconds = 1000.0, step_seconds
        self.added: dict[int, float] = {}
        self.sleeps: list[tuple[float, float]] = []
        self.looks = 0
        self.begun: list[float] = []  # when each step began
        self.under_way: dict[int, tuple[int, list[float]]] = {}

    def clock(self) -> float:
        self.looks += 1
        self.now += 1e-6  # time goes on while it is looked at
        return self.now

    def sleep(self, seconds: float) -> None:
        assert not self.under_way, "a sleep while there is work"
        self.sleeps.append((self.now, seconds))
        self.now += seconds

    def add_request(self, prompt, params):
        (number,) = prompt["prompt_token_ids"]
        self.added[number] = self.now
        self.under_way[number + 100] = (params.max_tokens, [])
        return number + 100

    def has_unfinished_requests(self):
        return bool(self.under_way)

    def abort(self, request_id):
        if request_id not in self.under_way:
            return None
        _, times = self.under_way.pop(request_id)
        metrics = RequestMetrics(arrival_time=self.now, token_times=list(times))
        output = SimpleNamespace(token_ids=[7] * len(times))
        return SimpleNamespace(outputs=[output], metrics=metrics, num_cached_tokens=request_id)

    def step(self):
        self.begun.append(self.now)
        self.now += self.step_seconds
        outputs = []
        for request_id, (most, times) in list(self.under_way.items()):
            times.append(self.now)
            finished = len(times) == most
            if finished:
                del self.under_way[request_id]
            output = SimpleNamespace(token_ids=[7] * len(times))
            metrics = RequestMetrics(arrival_time=self.now, token_times=list(times))
            outputs.append(
                SimpleNamespace(
                    request_id=request_id,
                    outputs=[output],
                    finished=finished,
                    metrics=metrics,
                    num_cached_tokens=request_id,
                )
            )
        return outputs


@settings(deadline=None)
@given(
    dues=st.lists(st.integers(0, 4000).map(lambda n: n / 100), min_size=1, max_size=12),
    step_seconds=st.sampled_from([0.003, 0.25, 7.0]),
)
def test_requests_are_added_when_due_and_the_wait_counts_from_then(dues, step_seconds):
    requests = [WorkloadRequest((n,), None, n % 3 + 1, due) for n, due in enumerate(dues)]
    engine: Any = ClockedEngine(step_seconds)
    records = new_records([list(ids_of(r)) for r in requests], dues)
    replay(engine, requests, [list(ids_of(r)) for r in requests], records, quiet, engine.clock, engine.sleep)
    start = 1000.0
    for number, (due, record) in enumerate(zip(dues, records, strict=True)):
        late = engine.added[number] - start - due
        assert -1e-5 <= late <= step_seconds + 1e-3  # at the next step's beginning, and not before it is due
        first = record.metrics.token_times[0]
        assert record.metrics.ttft == pytest.approx(first - due)  # from when it was due, late or not
        assert first >= due + step_seconds - 1e-3
        assert len(record.token_ids) == len(record.metrics.token_times) == number % 3 + 1
    for begun, seconds in engine.sleeps:  # to the next request that is due, and no further
        assert seconds > 0
        assert any(begun + seconds - start == pytest.approx(due, abs=1e-4) for due in dues)
    assert len(engine.sleeps) <= 2 * len(set(dues))
    looks = 2 + len(engine.sleeps) + 3 * len(dues)  # the start, each sleep, each step: no busy wait
    assert engine.looks <= looks
    assert list(engine.added) == sorted(range(len(dues)), key=lambda n: dues[n])


@settings(deadline=None)
@given(
    dues=st.lists(st.integers(0, 400).map(lambda n: n / 100), min_size=1, max_size=8),
    until=st.sampled_from([0.0, 0.5, 2.0, 9.0, 40.0]),
)
def test_when_the_time_is_up_no_step_begins_and_what_had_come_is_kept(dues, until):
    requests = [WorkloadRequest((n,), None, 3 * n % 7 + 1, due) for n, due in enumerate(dues)]
    prompts = [list(ids_of(r)) for r in requests]
    engine: Any = ClockedEngine(0.7)
    records = new_records(prompts, dues)
    replay(engine, requests, prompts, records, quiet, engine.clock, engine.sleep, until)
    assert not engine.under_way
    assert all(begun - 1000 < until + 1e-3 for begun in engine.begun)
    for number, record in enumerate(records):
        seen = [b + 0.7 - 1000 for b in engine.begun if b >= engine.added.get(number, math.inf)]
        expected = seen[: requests[number].max_tokens]  # a token in each step from then on
        assert record.metrics.token_times == pytest.approx(expected, abs=1e-4)
        assert record.token_ids == [7] * len(expected)
    for begun, seconds in engine.sleeps:
        assert begun + seconds - 1000 <= until + 1e-3


def test_cached_tokens_are_those_of_each_request():
    fake: Any = ClockedEngine(1.0)
    requests = [WorkloadRequest((n,), None, 2) for n in range(2)]
    records = new_records([[0], [1]])
    replay(fake, requests, [[0], [1]], records, quiet, fake.clock, fake.sleep)
    assert [record.num_cached_tokens for record in records] == [100, 101]


def test_a_prefix_that_the_warm_up_computed_is_not_found():
    prompt = tuple(range(40, 53))
    requests = [WorkloadRequest(prompt, None, 2, arrival) for arrival in (0.0, 0.4)]
    options = BenchOptions("random:tiny-llama", "float64", block_size=4, enable_prefix_caching=True)
    result = run_bench("minivllm", requests, options, quiet)
    assert [record.num_cached_tokens for record in result.records] == [0, 12]


def test_a_request_that_this_engine_refuses_is_named():
    options = BenchOptions("random:tiny-llama", block_size=4, num_blocks=4)
    requests = [WorkloadRequest((1, 2), None, 3), WorkloadRequest(tuple(range(20)), None, 3)]
    with pytest.raises(RequestTooLong, match=r"^Request 2 of the workload: "):
        run_bench("minivllm", requests, options, quiet)


def test_text_prompts_are_encoded_with_the_models_own_tokenizer():
    requests = [WorkloadRequest(None, "héllo", 2)]
    result = run_bench("minivllm", requests, BenchOptions("random:tiny-llama"), quiet)
    assert result.records[0].num_prompt_tokens == 6  # bytes


# --- what is refused ---


@pytest.mark.parametrize("engine", ["minivllm", "transformers"])
def test_samples_are_refused_by_name_before_anything_is_loaded(engine):
    for asked, named in (({"n": 3}, "Request 2 .*n=3"), ({"temperature": 0.5, "seed": 1}, "temperature=0.5")):
        requests = [REQUESTS[0], replace(REQUESTS[1], **asked)]
        with pytest.raises(InvalidOption, match=named):
            run_bench(engine, requests, BenchOptions("no such model"), quiet)


@pytest.mark.parametrize("engine", [*HF_ENGINES, "vllm"])
def test_peers_refuse_arrivals_and_name_the_way_out(engine):
    requests = [replace(REQUESTS[0], arrival=0.5), REQUESTS[1]]
    with pytest.raises(InvalidOption, match=r"1 of 2 arrive later.*--all-at-once ignores arrivals"):
        run_bench(engine, requests, BenchOptions("random:tiny-llama"), quiet)


@pytest.mark.parametrize("engine", HF_ENGINES)
def test_peers_refuse_random_weights_and_prompts_that_do_not_fit(engine, tiny):
    with pytest.raises(InvalidOption, match="'random:tiny-llama' is not possible with this engine"):
        run_bench(engine, REQUESTS, BenchOptions("random:tiny-llama"), quiet)
    options = BenchOptions(str(tiny[0]))
    with pytest.raises(InvalidPrompt, match=r"Request 2 has the token id 97; expected ids from 0 to 96"):
        run_bench(engine, [REQUESTS[0], WorkloadRequest((3, VOCAB), None, 1)], options, quiet)
    with pytest.raises(RequestTooLong, match=r"Request 1 needs 60 \+ 5 tokens; this model has room for 64"):
        run_bench(engine, [WorkloadRequest((1,) * 60, None, 5)], options, quiet)


def test_an_engine_refuses_options_that_it_cannot_have_by_name():
    refused: list[tuple[str, str, Any]] = [
        ("transformers", "cache", "paged"),
        ("transformers", "kv_cache_memory_bytes", 2**20),
        ("transformers-continuous", "scheduler", "static"),
        ("transformers-continuous", "max_model_len", 9),
        ("vllm", "reservation", "max"),
    ]
    for engine, name, value in refused:
        with pytest.raises(
            InvalidOption, match=f"^{name}={value!r} is not possible with the engine '{engine}'"
        ):
            run_bench(engine, REQUESTS, BenchOptions(**{name: value}), quiet)
    with pytest.raises(InvalidOption, match=r"engine='sglang'.*minivllm, transformers"):
        run_bench("sglang", REQUESTS, BenchOptions(), quiet)
    bad: list[Any] = [0, -1, True, 1.5]
    for value in bad:
        with pytest.raises(InvalidOption, match=r"^max_num_seqs="):
            BenchOptions(max_num_seqs=value)


def test_a_budget_below_one_block_is_refused(tiny):
    options = BenchOptions(str(tiny[0]), kv_cache_memory_bytes=100)
    with pytest.raises(InvalidOption, match="kv_cache_memory_bytes=100 is not possible"):
        run_bench("transformers-continuous", REQUESTS, options, quiet)


def test_a_budget_in_bytes_gives_continuous_batching_the_same_tokens(tiny):
    options = BenchOptions(str(tiny[0]), "float64", kv_cache_memory_bytes=2**20, block_size=16)
    result = run_bench("transformers-continuous", REQUESTS, options, quiet)
    assert [record.token_ids for record in result.records] == tiny[1]


def test_an_error_in_the_thread_of_continuous_batching_is_told_and_no_thread_is_left(tiny, monkeypatch):
    from transformers import LlamaForCausalLM

    def broken(*args, **kwargs):
        raise RuntimeError("the bench broke this on purpose")

    before = threading.active_count()
    monkeypatch.setattr(LlamaForCausalLM, "forward", broken)
    with pytest.raises(MinivllmError, match="stopped early: the bench broke this on purpose"):
        run_bench("transformers-continuous", REQUESTS, BenchOptions(str(tiny[0])), quiet)
    assert threading.active_count() == before


def test_a_folder_that_transformers_cannot_load_is_refused(tiny, tmp_path):
    (tmp_path / "config.json").write_text((tiny[0] / "config.json").read_text())
    with pytest.raises(InvalidModel, match="cannot load"):
        run_bench("transformers", REQUESTS, BenchOptions(str(tmp_path)), quiet)


# --- vLLM, and the folder that it reads ---


def test_without_vllm_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr("minivllm.lab.bench.vllm_engine.find_spec", lambda name: None)
    with pytest.raises(InvalidOption, match=r"not installed in this environment.*pip install vllm"):
        run_bench("vllm", REQUESTS, BenchOptions("random:tiny-llama"), quiet)


class FakeEngine:
    """As much of vLLM's engine as the loop uses; a request's tokens are its prompt's first, counted up."""

    def __init__(self):
        self.under_way = {}

    def add_request(self, request_id, prompt, params):
        self.under_way[request_id] = (prompt["prompt_token_ids"][0], params.max_tokens, [])

    def has_unfinished_requests(self):
        return bool(self.under_way)

    def step(self):
        outputs = []
        for request_id, (first, most, ids) in list(self.under_way.items()):
            ids.append(first + len(ids))
            outputs.append(SimpleNamespace(request_id=request_id, outputs=[SimpleNamespace(token_ids=ids)]))
            if len(ids) == most:
                del self.under_way[request_id]
        return outputs


@pytest.fixture
def fake_vllm(monkeypatch):
    made = []
    module: Any = ModuleType("vllm")
    module.__spec__ = ModuleSpec("vllm", None)
    module.__version__ = "0.0"
    module.SamplingParams = SimpleNamespace

    def llm(**arguments):
        made.append(arguments)
        return SimpleNamespace(llm_engine=FakeEngine())

    module.LLM = llm
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    return made


def test_vllm_is_told_the_options_and_each_token_gets_its_time(fake_vllm, tiny):
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "7"
    options = BenchOptions(str(tiny[0]), "bfloat16", max_model_len=60, num_blocks=9)
    result = run_bench("vllm", REQUESTS, options, quiet)
    for record, request in zip(result.records, REQUESTS, strict=True):
        first = ids_of(request)[0]
        assert record.token_ids == list(range(first, first + request.max_tokens))
        assert len(record.metrics.token_times) == request.max_tokens
    (arguments,) = fake_vllm
    assert (arguments["model"], arguments["dtype"]) == (str(tiny[0]), "bfloat16")
    assert (arguments["max_num_seqs"], arguments["max_model_len"]) == (64, 60)
    assert (arguments["num_gpu_blocks_override"], "block_size" in arguments) == (9, False)
    assert os.environ["VLLM_CPU_KVCACHE_SPACE"] == "7"  # what the user has set stays
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert result.summary()["versions"]["vllm"] == "0.0"
    with pytest.raises(InvalidOption, match="dtype='float64'"):
        run_bench("vllm", REQUESTS, BenchOptions(str(tiny[0]), "float64"), quiet)


def test_a_gguf_file_is_converted_once_and_half_a_folder_is_never_left(home, tmp_path, monkeypatch):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"weights")
    source = ModelSource(str(file), "gguf", file)
    calls = []

    def convert(source, folder):
        calls.append(folder)
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        if len(calls) == 1:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(hf_model, "_convert", convert)
    with pytest.raises(OSError, match="No space"):
        hf_model.hf_folder(source)
    assert list((home / "hf").iterdir()) == []
    folder = hf_model.hf_folder(source)
    assert hf_model.hf_folder(source) == folder
    assert len(calls) == 2
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    file.write_bytes(b"other weights")
    assert hf_model.hf_folder(source) != folder
    with pytest.raises(InvalidOption, match="random"):
        hf_model.hf_folder(ModelSource("random:tiny-llama", "random", preset="tiny-llama"))


# --- the command ---


@pytest.fixture
def workload_file(tmp_path):
    write_workload(tmp_path / "w.jsonl", [replace(REQUESTS[0], arrival=0.01), *REQUESTS[1:]])
    return str(tmp_path / "w.jsonl")


def run(*arguments: str):
    return CliRunner().invoke(cli.main, ["bench", *arguments])


def test_the_command_prints_tables_and_ends_with_json(workload_file, tmp_path):
    saved = str(tmp_path / "tokens.jsonl")
    options = ("--model", "random:tiny-llama", "--cache", "naive", "--save-tokens", saved)
    done = run("--requests", workload_file, *options)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["engine"], found["requests"], found["options"]["cache"]) == ("minivllm", 5, "naive")
    assert found["output_tokens"] == sum(r.max_tokens for r in REQUESTS)
    assert all(
        word in done.stderr for word in ("TTFT", "TPOT", "ITL", "p99", "tokens/s", "random:tiny-llama")
    )
    with open(saved) as file:
        assert [len(json.loads(line)) for line in file] == [r.max_tokens for r in REQUESTS]


def test_the_command_runs_a_peer_on_all_requests_at_once(workload_file, tiny):
    options = ("--engine", "transformers", "--model", str(tiny[0]), "--dtype", "float32", "--device", "cpu")
    refused = run("--requests", workload_file, *options)
    assert (refused.exit_code, "--all-at-once" in refused.stderr) == (1, True)
    done = run("--requests", workload_file, *options, "--all-at-once")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout.splitlines()[-1])["engine"] == "transformers"


@pytest.mark.parametrize(
    "spelled",
    [
        ["--goodput", "ttft:60000", "tpot:0", "e2el:60000.5"],
        ["--goodput", "ttft:60000 tpot:0", "--goodput", "e2el:60000.5"],
        ["--goodput=ttft:60000", "tpot:0", "e2el:60000.5"],
    ],
    ids=("as vLLM spells it", "repeated", "equals sign"),
)
def test_the_command_counts_goodput_and_takes_percentiles_and_a_rate(spelled, workload_file):
    options = ("--model", "random:tiny-llama", "--rate", "200", "--n", "4", "--percentiles", "25,99.9")
    done = run("--requests", workload_file, *spelled, *options)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout.splitlines()[-1])
    several = sum(r.max_tokens > 1 for r in REQUESTS[:4])
    assert several > 0
    assert found["goodput"] == {
        "slo_ms": {"ttft": 60000.0, "tpot": 0.0, "e2el": 60000.5},
        "good": 4 - several,
        "missed": {"ttft": 0, "tpot": several, "e2el": 0},
        "req_s": pytest.approx((4 - several) / found["seconds"], abs=1e-2),
    }
    assert list(found["e2el_ms"]) == ["mean", "p25", "p99.9"]
    assert found["requests"] == 4
    last = poisson_arrivals(4, 200.0, seed=0)[-1]
    assert found["offered_req_s"] == pytest.approx(4 / last, abs=1e-3)
    assert f"{4 - several} of 4 requests kept ttft:60000 tpot:0 e2el:60000.5" in done.stderr
    assert f"missed: ttft 0, tpot {several}, e2el 0" in done.stderr
    assert "requests/s: arrived" in done.stderr


def test_each_engine_option_is_an_option_of_the_command():
    shown = run("--help").stdout
    names = [option.name for option in engine_options()]
    assert names == list(ENGINES["minivllm"].options)
    assert {"cache", "num_blocks", "max_num_seqs"} <= set(names)
    assert not {"model", "dtype", "device"} & set(names)
    for name in names:
        assert f"--{name.replace('_', '-')} " in shown


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--goodput", "itl:5"], "goodput='itl:5'"),
        (["--goodput", "ttft:5", "tpot"], "goodput='tpot'"),
        (["--percentiles", "101"], "percentiles='101'"),
        (["--n", "6"], "n=6 is not possible: it must be at most 5"),
        (["--rate", "0"], "rate=0.0"),
        (["--max-in", "5"], "max_in=5 is not possible with requests that have their prompts"),
        (["--requests", "no-such-file"], "no-such-file"),
        (["--engine", "transformers", "--cache", "paged"], "cache='paged' is not possible with the engine"),
        (["--engine", "vllm", "--reservation", "max"], "reservation='max'"),
        (["--model", "no-such-model"], "no-such-model"),
        (["--max-num-seqs", "0"], "max_num_seqs=0"),
        (["--cache", "naive", "--block-size", "8"], "block_size=8"),
        (["--scheduler", "best"], "scheduler='best'"),
        (["--save-tokens", "no-such-folder/t.jsonl"], "no-such-folder"),
    ],
    ids=range(14),
)
def test_a_wrong_argument_is_an_error_of_one_line(arguments, named, workload_file):
    base = ("--requests", workload_file, "--model", "random:tiny-llama")
    done = run(*base, *arguments)
    assert done.exit_code == 1
    assert done.stderr.splitlines()[-1].startswith("Error: ")
    assert named in done.stderr
    assert "Traceback" not in done.output


def test_every_engine_has_a_module_that_runs_it():
    from importlib import import_module

    for engine in ENGINES.values():
        assert callable(import_module(f"minivllm.lab.bench.{engine.module}").run)


def test_help_loads_neither_torch_nor_numpy():
    import subprocess

    code = (
        "import sys\nfrom minivllm.cli.bench import bench\n"
        "try: bench(['--help'])\nfinally: print(*sorted(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "--all-at-once" in done.stdout
    assert not {"torch", "transformers", "numpy", "rich"} & set(done.stdout.split("\n")[-2].split())
