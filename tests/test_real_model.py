"""The real model against Transformers on the same GGUF file: tokens and logits, in float32."""

from __future__ import annotations

import pytest
import torch
from oracle import hf_beam_search, hf_greedy

from minivllm.decoding.beam_search import beam_search
from minivllm.decoding.generate import generate
from minivllm.decoding.parallel import parallel_sample
from minivllm.engine_args import EngineArgs
from minivllm.lab.ladder import Rung, run_rung
from minivllm.lab.same_tokens import compare_tokens
from minivllm.lab.workload import WorkloadRequest
from minivllm.memory.buddy import BuddyAllocator
from minivllm.memory.naive_store import NaiveStore
from minivllm.memory.sharing import SharingManager
from minivllm.memory.sharing_store import SharingStore
from minivllm.memory.size import bytes_per_token
from minivllm.memory.store import RecomputeStore
from minivllm.model.batch import Batch
from minivllm.params import BeamSearchParams, SamplingParams

# 1 to 600, and around multiples of 16
LENGTHS = (1, 2, 3, 5, 8, 13, 15, 16, 17, 25, 31, 32, 33, 47, 48, 49, 63, 64, 65, 96, 127, 128, 129, 255, 600)
TEXT = """A library lends books. Each reader has a card, and the card lists the books that the reader
has at home. When a book comes back, the librarian strikes it from the card and puts it on the shelf, where
the next reader may find it. Some books are asked for every day; of those the library keeps several copies.
def fibonacci(n):
    a, b = 0, 1
    for _ in range(n):
        a, b = b, a + b
    return a
Question: What is the capital of France? Answer: Paris. Question: What is 17 times 3? Answer: 51.
Es war einmal ein Müller, der hatte drei Söhne, eine Mühle, einen Esel und einen Kater. 東京は日本の首都です。
The train left at 07:45 and arrived at 09:10, ten minutes late; the ticket had cost 23.50 euros.
"""
MAX_TOKENS = 64

pytestmark = pytest.mark.xdist_group("real model")


@pytest.fixture(scope="module")
def theirs(smollm2_source):
    """Transformers' model from the same file, every weight unpacked."""
    from transformers import AutoModelForCausalLM

    try:
        from transformers import GgufConfig

        options = {"quantization_config": GgufConfig(dequantize=True)}
    except ImportError:  # before it could do anything else
        options = {}
    path = smollm2_source.path
    return AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=torch.float32, **options
    ).eval()


@pytest.fixture(scope="module")
def prompts(smollm2_tokenizer) -> list[list[int]]:
    """One prompt of each length, each beginning at another place of the text."""
    ids = smollm2_tokenizer.encode(TEXT) * 4
    return [ids[7 * i : 7 * i + n] for i, n in enumerate(LENGTHS)]


@torch.inference_mode()
def greedy_together(model, prompts: list[list[int]], max_tokens: int) -> tuple[list[list[int]], torch.Tensor]:
    """All prompts in one batch, step by step: the tokens, and the logits [prompt, step, vocab]."""
    store, tokens, logits = NaiveStore(), [list(p) for p in prompts], []
    for step in range(max_tokens):
        new = [(i, t if step == 0 else t[-1:], 0 if step == 0 else len(t) - 1) for i, t in enumerate(tokens)]
        logits.append(model(Batch.pack(new), store))
        for t, best in zip(tokens, logits[-1].argmax(dim=-1).tolist(), strict=True):
            t.append(best)
    outputs = [t[len(p) :] for t, p in zip(tokens, prompts, strict=True)]
    return outputs, torch.stack(logits, dim=1)


def test_tokens_and_logits_are_those_of_transformers(smollm2, theirs, prompts):
    """Transformers reads each prompt with our tokens behind it; at each place its best token must be our
    next one. By induction its greedy `generate` then gives the same tokens."""
    outputs, logits = greedy_together(smollm2, prompts, MAX_TOKENS)
    largest = 0.0
    for prompt, output, ours in zip(prompts, outputs, logits, strict=True):
        with torch.inference_mode():
            expected = theirs(torch.tensor([prompt + output[:-1]]), logits_to_keep=MAX_TOKENS).logits[0]
        assert expected.argmax(dim=-1).tolist() == output, f"prompt of {len(prompt)} tokens"
        largest = max(largest, (expected - ours).abs().max().item())
    assert largest < 1e-3


@pytest.mark.parametrize("which", [0, 8, 13])
def test_the_loop_gives_the_tokens_of_transformers_generate(smollm2, theirs, prompts, which):
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    assert list(generate(smollm2, NaiveStore(), prompts[which], params)) == hf_greedy(
        theirs, prompts[which], 20
    )


@pytest.mark.full
def test_every_prompt_gives_the_tokens_of_transformers_generate(smollm2, theirs, prompts):
    outputs, _ = greedy_together(smollm2, prompts, MAX_TOKENS)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output == hf_greedy(theirs, prompt, MAX_TOKENS), f"prompt of {len(prompt)} tokens"


def test_recomputing_and_caching_give_the_same_tokens(smollm2, prompts):
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    for prompt in (prompts[3], prompts[8]):
        runs = [list(generate(smollm2, store, prompt, params)) for store in (RecomputeStore(), NaiveStore())]
        assert runs[0] == runs[1]


@pytest.mark.parametrize(
    "options",
    [
        {"cache": "naive", "scheduler": "static"},
        {"cache": "contiguous", "reservation": "pow2"},
        {"cache": "paged", "block_size": 3},
        {"cache": "paged", "block_size": 16, "scheduler": "static"},
    ],
    ids=lambda o: "-".join(map(str, o.values())),
)
def test_a_tight_memory_full_of_real_requests_gives_the_tokens_of_the_loop(smollm2, prompts, options):
    """The least memory that holds the longest request, so requests wait and, with paging, are preempted."""
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    workload = [WorkloadRequest(tuple(prompts[i]), None, 8) for i in (3, 8, 5, 2)]
    expected = [list(generate(smollm2, NaiveStore(), list(w.token_ids), params)) for w in workload]
    longest = max(len(w.token_ids) for w in workload) + 7
    slots = {"contiguous": BuddyAllocator.run_length(longest)}.get(options["cache"], -(-longest // 16) * 16)
    args = EngineArgs(**options, kv_cache_memory_bytes=slots * bytes_per_token(smollm2), max_model_len=2048)
    result = run_rung(smollm2, Rung("tight", 0, {}), args, workload)
    verdicts = [
        compare_tokens(smollm2, w.token_ids, a, b).verdict
        for w, a, b in zip(workload, expected, result.outputs, strict=True)
    ]
    assert verdicts == ["yes"] * 4


def test_chunks_of_a_real_prompt_give_the_logits_of_the_whole(smollm2, prompts):
    prompt = prompts[-2]
    with torch.inference_mode():
        whole = smollm2(Batch.pack([(0, prompt, 0)]), NaiveStore())
        store = NaiveStore()
        for start in range(0, len(prompt), 37):
            chunk = smollm2(Batch.pack([(0, prompt[start : start + 37], start)]), store)
    assert (whole - chunk).abs().max() < 1e-3
    assert whole.argmax() == chunk.argmax()


def test_a_known_question_gets_its_answer(smollm2, smollm2_tokenizer):
    prompt = smollm2_tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}]
    )
    params = SamplingParams(temperature=0, max_tokens=12)
    assert "Paris" in smollm2_tokenizer.decode(list(generate(smollm2, NaiveStore(), prompt, params)))


@pytest.fixture
def question(smollm2_tokenizer) -> list[int]:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    return smollm2_tokenizer.apply_chat_template(messages)


@pytest.fixture
def shared_memory(smollm2):
    """Blocks of 16 that can be shared, its two halves."""
    return SharingStore(smollm2.config, 40, 16), SharingManager(40, 16, bytes_per_token(smollm2))


def test_four_beams_are_those_of_transformers(smollm2, theirs, question, shared_memory):
    store, manager = shared_memory
    params = BeamSearchParams(beam_width=4, max_tokens=10)
    found, report = beam_search(smollm2, store, manager, question, params)
    eos = smollm2.config.eos_token_ids
    expected = hf_beam_search(theirs, question, beam_width=4, max_tokens=10, eos_token_ids=eos, exact=False)
    assert [h.token_ids for h in found] == [tokens for tokens, _ in expected]
    assert [h.score for h in found] == pytest.approx([score for _, score in expected], abs=1e-4)
    assert {h.finish_reason for h in found} == {"stop", "length"}
    assert report.num_blocks < report.num_blocks_without_sharing


def test_samples_of_one_prompt_are_those_of_the_loop(smollm2, question, shared_memory):
    store, manager = shared_memory
    params = SamplingParams(n=3, seed=5, max_tokens=5)
    outputs, report = parallel_sample(smollm2, store, manager, question, params)
    for i, tokens in enumerate(outputs):
        alone = SamplingParams(seed=5 + i, max_tokens=5)
        assert tokens == list(generate(smollm2, NaiveStore(), question, alone))
    assert report.num_blocks < report.num_blocks_without_sharing
