"""Above the chapters: the whole engine: output tokens a second, and steps with CUDA graphs and without.

Beside it the transformers library's continuous batching, on the same requests and weights. The model has the
shape of Qwen3-0.6B in bfloat16, with weights from a seed. Requests have 100 to 1,024 tokens in and out,
evenly spread, and run past end-of-sequence tokens.

Tokens are compared in float32. In bfloat16 those that are the same are only counted: a graph cuts the keys
into as many parts as the longest context needs, so its last bits are others.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any, TypeAlias

from minivllm import SamplingParams
from minivllm.lab.gpu_check.beside import transformers_rate
from minivllm.lab.gpu_check.here import Here, Item, Row, release
from minivllm.lab.gpu_check.processes import last_words
from minivllm.lab.same_tokens import compare_tokens, verdict_of_many
from minivllm.lab.workload import WorkloadRequest, ids_for
from minivllm.llm import LLM
from minivllm.memory.paged import num_blocks_for
from minivllm.memory.paged_store import PagedStore
from minivllm.model.decoder import Decoder
from minivllm.model.graphs import DecodeGraphs
from minivllm.model.loader import load_model
from minivllm.model.tokenizer import load_tokenizer

MODEL, SMALL = "random:qwen3-0.6b", "random:tiny-qwen3"
BATCHES = (1, 8, 64)
PROMPT_LEN, NUM_STEPS, NOT_COUNTED = 128, 64, 8  # the first steps of a batch are not counted
TARGET_BATCH, TARGET = 8, 1.5
FOR_TRANSFORMERS = 60.0  # seconds at most
Tokens: TypeAlias = list[list[int]]


def shares(here: Here) -> list[Here]:
    """One process."""
    return [here]


def run(here: Here) -> Iterator[Item]:
    """Without graphs, with them, what differs, then Transformers."""
    name, dtype = here.pick((MODEL, "bfloat16"), (SMALL, "float32"))
    model = load_model(name, dtype=dtype, device=here.device)
    work = requests(model.config.vocab_size, *here.pick((256, 100, 1024), (2, 2, 4)))
    steps: list[dict[int, tuple[float, Tokens]]] = []
    answers: list[Tokens] = []
    for graphs in (False, True):
        with engine(model, name, graphs, here) as llm:
            batches = here.pick(BATCHES, (1, 2))
            steps.append({n: decode_steps(llm, prompts(model, n, here), here) for n in batches})
            row, tokens = throughput(llm, work, here)
        answers.append(tokens)
        release(here)
        yield "throughput", {"engine": "minivllm", "graphs": graphs, **row}
    for batch in steps[0]:
        (slow, expected), (fast, got) = (found[batch] for found in steps)
        ms = {"ms_without": 1e3 * slow, "ms_with": 1e3 * fast, "speedup": slow / fast}
        shown = ms if here.gpu else {"miniature_ms": 1e3 * slow}
        yield "steps", {"batch": batch, **shown, "identical": num_same(expected, got)}
        if batch == TARGET_BATCH:
            yield from here.target("decode step at batch 8: speedup by CUDA graphs", slow / fast, TARGET)
    yield "graphs", {"dtype": dtype, "requests": len(work), "identical": num_same(*answers)}
    yield "graphs", same_tokens(model if dtype == "float32" else None, name, here)
    release(here)
    try:
        allowed = min(FOR_TRANSFORMERS, max(10.0, here.left()))
        yield "throughput", transformers_rate(model, work, here, allowed)
    except Exception as error:  # another library's fault is none of this engine
        yield "left_out", {"what": "transformers-continuous", "why": last_words(error)}


def requests(vocab_size: int, num: int, least: int, most: int) -> list[WorkloadRequest]:
    """Requests of least to most tokens in and out, evenly spread, from a seed."""
    random, ids = Random(0), ids_for(vocab_size)
    lengths = [(random.randint(least, most), random.randint(least, most)) for _ in range(num)]
    return [
        WorkloadRequest(tuple(random.randrange(ids.start, ids.stop) for _ in range(prompt)), None, output)
        for prompt, output in lengths
    ]


def prompts(model: Decoder, num: int, here: Here) -> list[list[int]]:
    """Prompts of one length, all different."""
    vocab_size, length = model.config.vocab_size, here.pick(PROMPT_LEN, 3)
    return [[(31 * i + 7 * j + 5) % vocab_size for j in range(length)] for i in range(num)]


def engine(model: Decoder, name: str, graphs: bool, here: Here) -> LLM:
    """The engine with this project's kernels where they can run."""
    options: Any = {"max_num_batched_tokens": 8192} if here.gpu else {"num_blocks": 32}
    llm = LLM(
        model,
        tokenizer=load_tokenizer(name),
        attention="triton" if here.triton else "torch",
        enforce_eager=not graphs,
        max_num_seqs=here.pick(256, 4),
        max_model_len=here.pick(2048, 64),
        **options,
    )
    store = llm.engine.store
    if graphs and not here.gpu and isinstance(store, PagedStore):
        # In a miniature a recording is a run that is done again: padding and rows are those of a graph.
        llm.engine.forward = DecodeGraphs(model, store, 4, num_blocks_for(64, 16), lambda run: run)
    return llm


def decode_steps(llm: LLM, batch: Tokens, here: Here) -> tuple[float, Tokens]:
    """Seconds of a step that gives each of these prompts one more token, the median; and all tokens."""
    num_steps, skipped = here.pick((NUM_STEPS, NOT_COUNTED), (2, 1))
    params = SamplingParams(temperature=0, max_tokens=num_steps, ignore_eos=True)
    ids = [llm.add_request({"prompt_token_ids": prompt}, params) for prompt in batch]
    seconds, tokens = [], dict[int, list[int]]()
    while llm.has_unfinished_requests():
        begin = time.perf_counter()
        outputs = llm.step()
        if len(outputs) == len(batch):
            seconds.append(time.perf_counter() - begin)
        tokens |= {output.request_id: list(output.outputs[0].token_ids) for output in outputs}
    return statistics.median(seconds[skipped:]), [tokens[i] for i in ids]


def same_tokens(model: Decoder | None, name: str, here: Here) -> Row:
    """In float32: the tokens with graphs are those without, ties counted. model: one in float32, or None."""
    model = model or load_model(name, dtype="float32", device=here.device)
    batch, found = prompts(model, here.pick(TARGET_BATCH, 1), here), []
    for graphs in (False, True):
        with engine(model, name, graphs, here) as llm:
            found.append(decode_steps(llm, batch, here)[1])
        release(here)
    pairs = zip(batch, *found, strict=True)
    verdict = verdict_of_many(compare_tokens(model, p, a, b) for p, a, b in pairs)
    row: Row = {"dtype": "float32", "requests": len(batch), "identical": num_same(*found)}
    return {**row, "same_tokens": verdict, "ok": verdict.startswith("yes")}


def num_same(expected: Tokens, got: Tokens) -> int:
    """How many requests have the same tokens."""
    return sum(a == b for a, b in zip(expected, got, strict=True))


def throughput(llm: LLM, work: Sequence[WorkloadRequest], here: Here) -> tuple[Row, Tokens]:
    """All requests at once, to the last token; what compiles does so before."""
    given = [{"prompt_token_ids": list(r.token_ids)} for r in work]
    params = [SamplingParams(temperature=0, max_tokens=r.max_tokens, ignore_eos=True) for r in work]
    few = [SamplingParams(temperature=0, max_tokens=here.pick(3, 1), ignore_eos=True)] * len(work)
    llm.generate(given, few, use_tqdm=False)
    begin = time.perf_counter()
    outputs = llm.generate(given, params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    num_tokens = sum(r.max_tokens for r in work)
    row: Row = {"requests": len(work), "output_tokens": num_tokens, "complete": True}
    row |= here.timing(seconds, tok_s=num_tokens / seconds)
    return row, [list(output.outputs[0].token_ids) for output in outputs]
