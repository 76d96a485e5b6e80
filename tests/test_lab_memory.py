"""Memory: what a model holds, what a step takes beside the pool, and the bound that its options give.

Bytes are counted as PyTorch takes them and gives them back; what the system has given is asked only in a
process of its own, and there only about the pool, which is far larger than anything else.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from minivllm.engine_args import EngineArgs
from minivllm.errors import InvalidOption
from minivllm.lab.held import held_bytes
from minivllm.lab.resident_memory import main
from minivllm.lab.workspace import Allocations
from minivllm.lab.workspace_bound import workspace_bytes, workspace_parts
from minivllm.llm import LLM
from minivllm.model.decoder import Decoder
from minivllm.model.loader import load_model
from minivllm.model.presets import PRESETS
from minivllm.model.tokenizer import ByteTokenizer
from minivllm.model.weights import load_weights, random_weights
from minivllm.params import SamplingParams

# Narrow layers and many words: the logits and what is sampled from them are by far the widest.
WIDE_VOCABULARY = replace(PRESETS["tiny-llama"], vocab_size=20_011)
SHAPES = {
    "wide-vocabulary": WIDE_VOCABULARY,
    "wide-mlp": replace(PRESETS["tiny-llama"], intermediate_size=2_000),
    "wide-rows": replace(PRESETS["tiny-llama"], hidden_size=900),
    "norms-of-heads": PRESETS["tiny-qwen3"],
    "one-kv-head": PRESETS["tiny-qwen2"],
}
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1, top_p=0.9, seed=3, max_tokens=4, ignore_eos=True)
FLAT = replace(SAMPLED, temperature=100)  # all rows are sorted


def make(config: Any, dtype: str = "float32", **options: Any) -> LLM:
    decoder = Decoder(config, getattr(torch, dtype))
    load_weights(decoder, random_weights(decoder, seed=0))
    chosen = {"max_num_seqs": 6, "max_model_len": 110, **options}
    try:
        return LLM(decoder, tokenizer=ByteTokenizer(), **chosen)
    except InvalidOption as error:
        if "C compiler" in str(error):
            pytest.skip("there is no C compiler")
        raise


def generate(llm: LLM, params: SamplingParams, num_requests: int = 7, length: int = 100) -> list[list[int]]:
    vocab = llm.engine.model.config.vocab_size
    prompts = [[(7 * i + j) % vocab for j in range(length - i)] for i in range(num_requests)]
    return [list(out.outputs[0].token_ids) for out in llm.generate(prompts, params, use_tqdm=False)]


# --- what is taken ---


def test_what_is_taken_and_given_back_is_listed_in_order():
    with Allocations() as seen:
        a = torch.zeros(1000)
        b = torch.zeros(500, dtype=torch.float64)
        del a
        c = torch.zeros(3000, dtype=torch.int8)
        del b, c
    assert seen.events == [4000, 4000, -4000, 3000, -4000, -3000]
    assert seen.taken == [4000, 4000, 3000]
    assert seen.peak == 8000


def test_memory_from_before_does_not_count():
    before = torch.zeros(1000)
    with Allocations() as seen:
        del before
        kept = torch.zeros(10)
    assert seen.events == [40]
    assert seen.peak == 40
    assert kept.sum() == 0


@pytest.mark.parametrize("attention", ["reference", "torch", "c"])
def test_the_pool_is_taken_once(attention):
    pool = 1_000 * 16 * 672  # tiny-llama has 672 bytes a token in float32
    with Allocations() as seen, make(WIDE_VOCABULARY, num_blocks=1_000, attention=attention) as llm:
        address = llm.engine.store.kv.data_ptr()  # type: ignore[attr-defined]
        generate(llm, SAMPLED)
        generate(llm, GREEDY, num_requests=3)
        assert llm.engine.store.kv.data_ptr() == address  # type: ignore[attr-defined]
    assert [size for size in seen.taken if size >= pool] == [pool]


@pytest.mark.parametrize("attention", ["reference", "torch", "c"])
def test_a_step_takes_nothing_that_grows_with_the_pool(attention):
    found = {}
    for num_blocks in (70, 5_000):
        with make(WIDE_VOCABULARY, num_blocks=num_blocks, attention=attention) as llm:
            with Allocations() as seen:
                tokens = generate(llm, SAMPLED)
            found[num_blocks] = tokens, seen.events
    assert found[70] == found[5_000]
    assert len(found[70][1]) > 100


# --- the bound ---

OPTIONS: dict[str, dict[str, Any]] = {
    "torch": {"attention": "torch"},
    "c": {"attention": "c"},
    "reference": {"attention": "reference"},
    "eager": {"enforce_eager": True},
    "small-budget": {"max_num_batched_tokens": 64},
    "whole-prompts": {"scheduler": "continuous"},
    "contiguous": {"cache": "contiguous"},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
@pytest.mark.parametrize("shape", ["wide-vocabulary", "wide-mlp", "norms-of-heads"])
def test_a_run_stays_below_the_bound(shape, options):
    with make(SHAPES[shape], kv_cache_memory_bytes=2**21, **options) as llm:
        bound = workspace_bytes(llm.engine.model, llm.args)
        with Allocations() as seen:
            generate(llm, SAMPLED)
            generate(llm, FLAT)
    assert seen.peak <= bound


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize("shape", list(SHAPES))
def test_a_run_in_another_dtype_stays_below_the_bound(shape, dtype):
    with make(SHAPES[shape], dtype, kv_cache_memory_bytes=2**21) as llm:
        bound = workspace_bytes(llm.engine.model, llm.args)
        with Allocations() as seen:
            generate(llm, SAMPLED)
            generate(llm, FLAT)
    assert seen.peak <= bound


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_a_run_with_penalties_and_a_greedy_row_beside_them_stays_below_the_bound(dtype):
    """Every copy of the logits that there can be: what penalties made of them, and of that the drawn rows."""
    params = [replace(FLAT, presence_penalty=1.0)] * 5 + [GREEDY]
    prompts = [[7 * i + j for j in range(90)] for i in range(6)]
    with make(WIDE_VOCABULARY, dtype, kv_cache_memory_bytes=2**21) as llm:
        bound = workspace_bytes(llm.engine.model, llm.args)
        with Allocations() as seen:
            llm.generate(prompts, params, use_tqdm=False)
    assert 20_011 * 6 * 8 < seen.peak <= bound


@pytest.mark.parametrize("shape", ["wide-vocabulary", "wide-mlp", "wide-rows"])
def test_the_bound_is_not_far_above_what_the_widest_part_takes(shape):
    with make(SHAPES[shape], kv_cache_memory_bytes=2**21, attention="c") as llm:
        bound = workspace_bytes(llm.engine.model, llm.args)
        with Allocations() as seen:
            generate(llm, FLAT)
    assert bound < 4 * seen.peak


def test_the_bound_comes_from_the_options_alone():
    model = load_model("random:tiny-llama", dtype="float32", device="cpu")
    base = EngineArgs(num_blocks=500, max_num_seqs=8, max_model_len=300, max_num_batched_tokens=256)

    def bound(**changes: Any) -> int:
        return workspace_bytes(model, replace(base, **changes))

    assert bound() == sum(workspace_parts(model, base).values()) == bound(num_blocks=50_000)
    for name in ("max_num_seqs", "max_model_len", "max_num_batched_tokens"):
        assert bound(**{name: getattr(base, name) + 50}) > bound(), name
    # a pool of 2 blocks holds no more than 32 tokens, in one step or in one sequence
    assert bound(num_blocks=2) == bound(num_blocks=2, max_model_len=32, max_num_batched_tokens=32)
    more = bound(attention="reference", max_model_len=600) - bound(attention="reference")
    assert more > 256 * 300 * 6 * 4, "the scores"


def test_the_parts_of_the_bound_are_those_of_its_formula():
    """tiny-llama: hidden 60, inner 112, (6 + 2 + 2) x 14 queries, keys and values, 307 words."""
    model = load_model("random:tiny-llama", dtype="float32", device="cpu")
    args = EngineArgs(num_blocks=500, max_num_seqs=8, max_model_len=300, max_num_batched_tokens=256)
    parts = workspace_parts(model, args)
    assert parts["activations"] == 4 * 256 * (2 * 60 + 10 * 14 + 112) * 4
    assert parts["logits"] == 8 * 307 * (2 * 4 + 2 * 4 + 10 * 8)  # all eight rows fit into MAX_SORTED
    many = replace(args, max_num_seqs=5_000)
    assert workspace_parts(model, many)["logits"] == 307 * 5_000 * (2 * 4 + 2 * 4 + 3 * 8)
    assert set(parts) == {"batch", "activations", "attention", "logits"}


# --- what is held ---


def test_what_a_model_holds_is_its_parameters_each_once():
    model = load_model("random:tiny-llama", dtype="float32", device="cpu")
    expected = sum(p.nbytes for p in model.parameters()) + model.inv_freq.nbytes
    assert held_bytes(model) == held_bytes(model, model, [model.layers, {"head": model.lm_head}]) == expected
    tied = load_model("random:tiny-qwen2", dtype="float32", device="cpu")
    assert tied.lm_head.weight.data_ptr() == tied.embed_tokens.weight.data_ptr()
    every = sum(p.nbytes for p in tied.parameters()) - tied.lm_head.weight.nbytes
    assert held_bytes(tied) == every + tied.inv_freq.nbytes


def test_views_and_shared_memory_count_once_and_as_a_whole():
    whole = torch.zeros(100)
    assert held_bytes([whole[:3], whole[50:]], {"again": whole}) == 400
    assert held_bytes([whole, torch.zeros(7)]) == 428
    assert held_bytes() == held_bytes(None, 5, "text", [1.0]) == 0
    assert held_bytes(whole, without=[[whole]]) == 0


def test_packed_weights_and_those_behind_attributes_count():
    module = nn.Linear(8, 3)
    others = {"packed": torch.zeros(5, 4).to_mkldnn(), "more": [torch.zeros(2), (torch.zeros(1),)]}
    vars(module).update(others)
    assert held_bytes(module) == 4 * (8 * 3 + 3 + 5 * 4 + 2 + 1)
    circle: list[Any] = [torch.zeros(1)]
    circle.append(circle)
    assert held_bytes(circle) == 4


def test_an_engines_weights_are_told_from_its_pool():
    with make(PRESETS["tiny-llama"], num_blocks=50, enforce_eager=True) as llm:
        engine = llm.engine
        plain = held_bytes(engine.model)
        assert held_bytes(engine.model, engine.forward, without=[engine.store]) == plain
        pool = engine.store.kv.nbytes  # type: ignore[attr-defined]
        assert held_bytes(engine.model, engine.store) == plain + pool


# --- the command ---

SMALL = "--model random:tiny-llama --dtype float32 --max-num-seqs 3 --prompt-len 40 --max-tokens 3".split()  # noqa: SIM905


def test_the_command_divides_a_process_of_its_own():
    pool = 10_752 * 9_000  # bytes: so many blocks of tiny-llama
    command = [sys.executable, "-m", "minivllm.lab.resident_memory", *SMALL]
    more = ["--kv-cache-memory-bytes", str(pool), "--max-num-batched-tokens", "64"]
    done = subprocess.run([*command, *more], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = {row["stage"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert list(rows) == ["code", "weights", "pool", "workspace", "peak"]
    assert sum(row["bytes"] for row in rows.values()) == 2 * rows["peak"]["bytes"]
    assert rows["pool"]["held_bytes"] == pool
    assert 0.9 * pool < rows["pool"]["bytes"] < 1.1 * pool, "every page of it is there"
    assert rows["peak"]["bytes"] >= rows["code"]["bytes"] + 0.9 * pool
    assert rows["weights"]["held_bytes"] > 500_000
    assert rows["workspace"]["bound_bytes"] == sum(rows["workspace"]["bounds"].values())
    assert (rows["peak"]["largest_step"], rows["peak"]["most_running"]) == (64, 3)
    assert rows["peak"]["model"] == "random:tiny-llama"
    assert "= " in done.stderr
    assert "at most" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dtype", "int8"], "is not one of"),
        (["--max-num-seqs", "0"], "0 is not in the range x>=1"),
        (["--attention", "magic"], "attention='magic' is not possible"),
        (["--prompt-len", "600"], "The prompt has 600 tokens and max_model_len is 512"),
        (["--model", "random:huge"], "huge"),
    ],
    ids=lambda value: "".join(value[:2]).strip("-") if isinstance(value, list) else "",
)
def test_what_cannot_be_is_refused_by_name(arguments, message):
    result = CliRunner().invoke(main, [*SMALL, "--kv-cache-memory-bytes", "1000000", *arguments])
    assert result.exit_code != 0
    assert message in result.output
    assert "Traceback" not in result.output
