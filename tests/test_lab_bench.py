"""Benchmarks: the same tokens from every engine, figures that add up, and refusals by name.

Nothing here looks at how long anything takes.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from dataclasses import replace
from importlib.machinery import ModuleSpec
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from minivllm import cli
from minivllm.decoding.generate import generate
from minivllm.errors import InvalidModel, InvalidOption, InvalidPrompt, MinivllmError, RequestTooLong
from minivllm.lab.bench import hf_model
from minivllm.lab.bench.options import ENGINES, BenchOptions, run_bench
from minivllm.lab.bench.result import BenchResult, RequestRecord
from minivllm.lab.workload import WorkloadRequest, make_workload, write_workload
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
    assert found["options"]["scheduler"] == "continuous"


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
    ("arguments", "named"),
    [
        (["--requests", "no-such-file"], "no-such-file"),
        (["--engine", "transformers", "--cache", "paged"], "cache='paged' is not possible with the engine"),
        (["--engine", "vllm", "--reservation", "max"], "reservation='max'"),
        (["--model", "no-such-model"], "no-such-model"),
        (["--max-num-seqs", "0"], "max_num_seqs=0"),
        (["--cache", "naive", "--block-size", "8"], "block_size=8"),
        (["--scheduler", "best"], "scheduler='best'"),
        (["--save-tokens", "no-such-folder/t.jsonl"], "no-such-folder"),
    ],
    ids=range(8),
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
