"""The whole engine on the Triton kernels in the interpreter. `test_llm_triton.py` runs this."""

from __future__ import annotations

import pytest

from minivllm import LLM, SamplingParams
from minivllm.errors import InvalidOption
from minivllm.kernels import triton_attention
from minivllm.model.loader import load_model
from minivllm.model.tokenizer import ByteTokenizer

PROMPTS = [[5] * 3, list(range(40, 59)), [7, 8, 9, 10, 11], list(range(90, 121)), [*range(40, 52), 3]]


def tokens(model, attention: str, **options) -> list[list[list[int]]]:
    llm = LLM(model, tokenizer=ByteTokenizer(), attention=attention, **options)
    params = [SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)] * 4
    params.append(SamplingParams(n=3, temperature=1.0, seed=4, max_tokens=6, ignore_eos=True))
    return [[list(o.token_ids) for o in output.outputs] for output in llm.generate(PROMPTS, params)]


def test_the_tokens_are_those_of_the_reference(monkeypatch):
    """Chunks with history, decodes beside them, shared blocks that are copied, preemption."""
    model = load_model("random:tiny-qwen2", dtype="float32", device="cpu", seed=3)
    options = {"block_size": 5, "num_blocks": 19, "max_num_batched_tokens": 16, "max_num_seqs": 6}
    expected = tokens(model, "reference", **options)
    launches, launch = [], triton_attention.paged_attention_kernel

    class Counting:
        def __getitem__(self, grid):
            launches.append(grid)
            return launch[grid]

    monkeypatch.setattr(triton_attention, "paged_attention_kernel", Counting())
    assert tokens(model, "triton", **options) == expected
    assert len(launches) > 10
    assert tokens(model, "triton-grouped", **options) == expected


def test_a_model_in_a_dtype_that_the_kernels_do_not_have_is_refused_at_the_door():
    model = load_model("random:tiny-llama", dtype="float64", device="cpu")
    for name in ("triton", "triton-naive", "triton-tiled", "triton-grouped"):
        with pytest.raises(InvalidOption, match=rf"attention='{name}'.*float64.*bfloat16"):
            LLM(model, tokenizer=ByteTokenizer(), attention=name)


def test_on_a_cpu_the_default_is_not_triton():
    model = load_model("random:tiny-llama", dtype="float32", device="cpu")
    assert LLM(model, tokenizer=ByteTokenizer()).args.attention in ("c", "torch")
