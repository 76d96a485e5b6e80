"""`LLM(attention="c")`: the reference's tokens; refused where there is no compiler."""

from __future__ import annotations

import interpreting
import pytest

from minivllm import LLM, SamplingParams
from minivllm.errors import InvalidOption
from minivllm.kernels import c_build, c_paged
from minivllm.model.loader import load_model
from minivllm.model.packed import PackedRows
from minivllm.model.tokenizer import ByteTokenizer

PROMPTS = [[5] * 3, list(range(40, 59)), [7, 8, 9, 10, 11], list(range(90, 121)), [*range(40, 52), 3]]


@pytest.fixture(autouse=True)
def compiler():
    try:
        c_build.find_compiler()
    except InvalidOption:
        pytest.skip("there is no C compiler")


def tokens(model, attention: str, **options) -> list[list[list[int]]]:
    llm = LLM(model, tokenizer=ByteTokenizer(), attention=attention, **options)
    params = [SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)] * 4
    params.append(SamplingParams(n=3, temperature=1.0, seed=4, max_tokens=20, ignore_eos=True))
    return [[list(o.token_ids) for o in output.outputs] for output in llm.generate(PROMPTS, params)]


@pytest.mark.parametrize("preset", ["tiny-llama", "tiny-qwen2", "tiny-qwen3"])
def test_the_tokens_are_those_of_the_reference(preset, monkeypatch):
    """Chunks with history, decodes beside them, shared blocks that are copied, preemption, swapping."""
    model = load_model(f"random:{preset}", dtype="float32", device="cpu", seed=3)
    calls, attend = [], c_paged.paged_attention

    def counting(*args, **options):
        calls.append(1)
        return attend(*args, **options)

    monkeypatch.setattr(c_paged, "paged_attention", counting)
    for more in ({}, {"prefix_cache": "hash"}, {"preemption": "swap", "swap_space": 2**20}):
        options = {"block_size": 5, "num_blocks": 27, "max_num_batched_tokens": 16, "max_num_seqs": 6, **more}
        expected = tokens(model, "reference", **options)
        assert not calls
        assert tokens(model, "c", **options) == expected
        assert len(calls) > 10
        calls.clear()


def test_the_real_models_text_is_that_of_the_reference(smollm2, smollm2_tokenizer):
    prompts = ["The capital of France is", "Once upon a time there was a small engine that", "1, 2, 3, 4,"]
    params = SamplingParams(temperature=0, max_tokens=24)
    texts = []
    for attention in ("reference", "c"):
        llm = LLM(smollm2, tokenizer=smollm2_tokenizer, attention=attention, num_blocks=64)
        texts.append([output.outputs[0].text for output in llm.generate(prompts, params)])
    assert texts[0] == texts[1]


def test_a_dtype_that_the_kernels_do_not_have_is_refused_at_the_door():
    model = load_model("random:tiny-llama", dtype="float64", device="cpu")
    with pytest.raises(InvalidOption, match=r"attention='c'.*float64.*bfloat16"):
        LLM(model, tokenizer=ByteTokenizer(), attention="c")


def test_without_a_compiler_it_is_refused_before_a_model_is_loaded(tmp_path):
    code = (
        "from minivllm import LLM, errors\n"
        "try:\n    LLM('no-such-model', attention='c')\n"
        "except errors.InvalidOption as error:\n    print(error)"
    )
    done = interpreting.run("-c", code, PATH=str(tmp_path), CC="")
    assert "attention='c' is not possible: there is no C compiler" in done.stdout, done.stderr
    assert "attention='torch'" in done.stdout


def test_an_engine_keeps_a_callers_decoder_and_lets_go_of_weights_that_it_loaded():
    model = load_model("random:tiny-llama", dtype="float32", device="cpu")
    LLM(model, tokenizer=ByteTokenizer())
    assert not any(isinstance(module, PackedRows) for module in model.modules())
    own = LLM("random:tiny-llama", dtype="float32", device="cpu")
    assert own.args.enforce_eager or any(isinstance(m, PackedRows) for m in own.engine.model.modules())
