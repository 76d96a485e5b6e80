"""`LLM(attention="torch")`, fast attention in PyTorch: the reference's tokens, in any dtype."""

from __future__ import annotations

import pytest

from minivllm import LLM, SamplingParams
from minivllm.kernels import torch_paged
from minivllm.model.loader import load_model
from minivllm.model.tokenizer import ByteTokenizer

PROMPTS = [[5] * 3, list(range(40, 59)), [7, 8, 9, 10, 11], list(range(90, 121)), [*range(40, 52), 3]]


def tokens(model, attention: str, **options) -> list[list[list[int]]]:
    llm = LLM(model, tokenizer=ByteTokenizer(), attention=attention, **options)
    params = [SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)] * 4
    params.append(SamplingParams(n=3, temperature=1.0, seed=4, max_tokens=20, ignore_eos=True))
    return [[list(o.token_ids) for o in output.outputs] for output in llm.generate(PROMPTS, params)]


@pytest.mark.parametrize(
    "preset, dtype", [("tiny-llama", "float64"), ("tiny-qwen2", "float32"), ("tiny-qwen3", "float32")]
)
def test_the_tokens_are_those_of_the_reference(preset, dtype, monkeypatch):
    """Chunks with history, decodes beside them, shared blocks that are copied, preemption, swapping. A step
    is planned once, for all layers."""
    model = load_model(f"random:{preset}", dtype=dtype, device="cpu", seed=3)
    plans, attended = [], []
    prepare, attend = torch_paged.prepare, torch_paged.paged_attention

    def preparing(*args):
        plans.append(prepare(*args))
        return plans[-1]

    def attending(*args, plan):
        attended.append(plan)
        return attend(*args, plan=plan)

    monkeypatch.setattr(torch_paged, "prepare", preparing)
    monkeypatch.setattr(torch_paged, "paged_attention", attending)
    for more in ({}, {"prefix_cache": "hash"}, {"preemption": "swap", "swap_space": 2**20}):
        options = {"block_size": 5, "num_blocks": 27, "max_num_batched_tokens": 16, "max_num_seqs": 6, **more}
        expected = tokens(model, "reference", **options)
        assert not plans
        assert tokens(model, "torch", **options) == expected
        assert len(plans) > 10
        assert attended == [plan for plan in plans for _ in range(model.config.num_hidden_layers)]
        plans.clear()
        attended.clear()


def test_the_real_models_text_is_that_of_the_reference(smollm2, smollm2_tokenizer):
    prompts = ["The capital of France is", "Once upon a time there was a small engine that", "1, 2, 3, 4,"]
    params = SamplingParams(temperature=0, max_tokens=24)
    texts = []
    for attention in ("reference", "torch"):
        llm = LLM(smollm2, tokenizer=smollm2_tokenizer, attention=attention, num_blocks=64)
        texts.append([output.outputs[0].text for output in llm.generate(prompts, params)])
    assert texts[0] == texts[1]
