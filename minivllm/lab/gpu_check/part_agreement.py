"""Above the chapters: the engine's tokens with these kernels, beside those that recomputing everything gives.

In float32 the tokens are the same, or a tie is proven in float64 (`lab/same_tokens.py`). In half precision a
tie is too common for that. There the model is forced along the same tokens with every kernel, and what counts
is how far its logits are from those in float32, beside how far the reference's are.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import torch
from torch import Tensor

from minivllm import SamplingParams
from minivllm.errors import MinivllmError
from minivllm.lab.gpu_check.here import Here, Item, Row, release
from minivllm.lab.same_tokens import compare_tokens, verdict_of_many
from minivllm.lab.workload import ids_for
from minivllm.llm import LLM
from minivllm.memory.paged import PagedManager, num_blocks_for
from minivllm.memory.paged_store import PagedBatch, PagedStore
from minivllm.model.batch import Batch
from minivllm.model.decoder import Decoder
from minivllm.model.hub import DEFAULT_MODEL, find_default
from minivllm.model.loader import load_model
from minivllm.model.tokenizer import load_tokenizer

TINY = ("random:tiny-llama", "random:tiny-qwen2", "random:tiny-qwen3")
BLOCK_SIZE = 16


def shares(here: Here) -> list[Here]:
    """One process."""
    return [here]


def run(here: Here) -> Iterator[Item]:
    """Greedy tokens in float32, then logits in half precision."""
    models = list(here.pick(TINY, TINY[1:2]))
    if here.gpu and _default_is_here():
        models.append(DEFAULT_MODEL)
    for model in models:
        yield from greedy(model, here, here.pick((8, 150, 40), (2, 4, 2)))
    model, sizes = here.pick(("random:qwen3-0.6b", (4, 300, 64)), ("random:tiny-qwen3", (2, 8, 2)))
    for dtype in here.pick(("bfloat16", "float16"), ("float16",)):
        yield from forced(model, dtype, here, sizes)


def greedy(name: str, here: Here, sizes: tuple[int, int, int]) -> Iterator[Item]:
    """Rows of one model. sizes: prompts, most tokens of one, tokens generated."""
    model, tokenizer = load_model(name, dtype="float32", device=here.device), load_tokenizer(name)
    prompts = _prompts(model, *sizes[:2], least=1)
    params = SamplingParams(temperature=0, max_tokens=sizes[2], ignore_eos=True)
    longest = sizes[1] + sizes[2]
    options: list[tuple[str, Any]] = [("recompute", {"cache": "recompute"})]
    options += [
        (way, {"attention": way, "num_blocks": 2 * sizes[0] * longest // BLOCK_SIZE}) for way in here.names()
    ]
    expected: list[list[int]] = []
    for way, chosen in options:
        with LLM(model, tokenizer=tokenizer, max_model_len=longest, **chosen) as llm:
            answers = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        tokens = [list(answer.outputs[0].token_ids) for answer in answers]
        if way == "recompute":
            expected = tokens
            continue
        pairs = zip(prompts, expected, tokens, strict=True)
        verdict = verdict_of_many(compare_tokens(model, p, a, b) for p, a, b in pairs)
        same = sum(a == b for a, b in zip(expected, tokens, strict=True))
        row = {"model": name, "dtype": "float32", "kernels": way, "requests": len(prompts), "identical": same}
        yield "greedy", {**row, "same_tokens": verdict, "ok": verdict.startswith("yes")}


@torch.inference_mode()
def forced(name: str, dtype: str, here: Here, sizes: tuple[int, int, int]) -> Iterator[Item]:
    """Rows of one model in one dtype. sizes: sequences of random tokens, most tokens of
    one, how many of its last are decoded one at a time."""
    model = load_model(name, dtype=dtype, device=here.device)
    sequences = _prompts(model, *sizes[:2], least=sizes[2])
    wide = copy.deepcopy(model).float()
    wide.dtype = torch.float32
    exact = forced_logits(wide, "reference", sequences, sizes[2])
    del wide
    release(here)
    expected = forced_logits(model, "reference", sequences, sizes[2])
    torch_error = _distance(expected, exact)
    for way in here.names():
        if dtype not in here.dtypes(way):
            continue
        logits = forced_logits(model, way, sequences, sizes[2])
        best, own = expected.argmax(dim=-1, keepdim=True), logits.argmax(dim=-1, keepdim=True)
        gaps = (expected.gather(-1, best) - expected.gather(-1, own))[best != own]
        error = _distance(logits, exact)
        row: Row = {"model": name, "dtype": dtype, "kernels": way, "positions": best.numel()}
        row |= {
            "argmax_agrees": 1 - gaps.numel() / best.numel(),
            "largest_gap": gaps.max().item() if len(gaps) else None,
        }
        yield "forced", {**row, "error": error, "torch_error": torch_error, "ok": error <= 2 * torch_error}


def forced_logits(model: Decoder, attention: str, sequences: Sequence[list[int]], num_steps: int) -> Tensor:
    """Logits [num_steps, sequences, vocab_size]: most tokens at once, then the last ones one at a time."""
    num_blocks = sum(num_blocks_for(len(tokens), BLOCK_SIZE) for tokens in sequences)
    manager = PagedManager(num_blocks, BLOCK_SIZE, 1)
    store = PagedStore(model.config, num_blocks, BLOCK_SIZE, model.dtype, model.device, attention)
    done, found = [0] * len(sequences), []
    for left in range(num_steps - 1, -1, -1):
        new = [(i, tokens[done[i] : len(tokens) - left], done[i]) for i, tokens in enumerate(sequences)]
        for i, tokens, computed in new:
            done[i] = computed + len(tokens)
            manager.allocate(i, done[i])
        found.append(model(PagedBatch.place(Batch.pack(new, model.device), manager), store).float())
    return torch.stack(found)


def _distance(logits: Tensor, exact: Tensor) -> float:
    """By the size of the logits, in the Euclidean norm."""
    return ((logits - exact).norm() / exact.norm()).item()


def _prompts(model: Decoder, num: int, longest: int, least: int) -> list[list[int]]:
    """Random tokens; the lengths differ, and the last is the longest."""
    random, ids = Random(0), ids_for(model.config.vocab_size)
    lengths = [random.randint(least, longest) for _ in range(num - 1)] + [longest]
    return [[random.randrange(ids.start, ids.stop) for _ in range(n)] for n in lengths]


def _default_is_here() -> bool:
    try:
        return find_default() is not None
    except (MinivllmError, OSError):
        return False
