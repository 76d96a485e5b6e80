"""Above the chapters: the numbers of the notebooks of chapters 1 to 3, with the shape of Llama-2-7B.

Each notebook looks for one file of such numbers: what was measured, and its value. The runs have fewer
requests than the notebooks themselves on a GPU, so that all of it takes about a minute.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch

from minivllm.engine_args import EngineArgs
from minivllm.lab.compaction_run import run_and_compact
from minivllm.lab.gpu_check.here import Here, Item, release, wait
from minivllm.lab.ladder import RUNGS, Rung, run_rung
from minivllm.lab.paging_cost import time_attention, time_decode
from minivllm.lab.step_time import time_step
from minivllm.lab.workload import WorkloadRequest, make_workload
from minivllm.memory.naive_store import NaiveStore
from minivllm.memory.size import bytes_per_token
from minivllm.memory.store import RecomputeStore
from minivllm.model.decoder import Decoder
from minivllm.model.loader import load_model

MODEL, SMALL = "random:llama-2-7b", "random:tiny-llama"
FILES = ("ch01_step_time", "ch02_contiguous", "ch03_paging")
SCHEMES_2 = ("naive", "contiguous-max", "contiguous-pow2", "contiguous-oracle")
SCHEMES_3 = ("contiguous-max", "contiguous-pow2", "contiguous-oracle", "paged")


def shares(here: Here) -> list[Here]:
    """One process."""
    return [here]


def run(here: Here) -> Iterator[Item]:
    """What is quick first. Every row: what, and its value; in a miniature no value that is a time."""
    name, dtype = here.pick((MODEL, "float16"), (SMALL, "float32"))
    model = load_model(name, dtype=dtype, device=here.device)
    about = [("model", name), ("dtype", dtype)]
    for file in FILES:
        yield from (_row(file, *pair) for pair in about)
    yield from step_times(model, here)
    yield from indirection(model, here)
    yield from compaction(model, here)
    for file, schemes, scheduler in (
        ("ch02_contiguous", SCHEMES_2, "static"),
        ("ch03_paging", SCHEMES_3, "continuous"),
    ):
        yield from same_requests(model, file, schemes, scheduler, here)


def step_times(model: Decoder, here: Here) -> Iterator[Item]:
    """Chapter 1: one more token by its position; and what joining one row to every tensor takes."""
    prompt, lengths = list(range(200)), here.pick((1, 128, 256, 512, 1024, 2048), (1, 6))
    time_step(model, RecomputeStore, prompt, here.pick(64, 2))
    for way, store in (("recompute", RecomputeStore), ("naive cache", NaiveStore)):
        for n in lengths:
            yield _time("ch01_step_time", f"{way}, token {n:,}", time_step(model, store, prompt, n), here)
    for n in lengths[1:]:
        yield _time("ch01_step_time", f"joining alone, token {n:,}", join_seconds(model, n, here), here)


@torch.inference_mode()
def join_seconds(model: Decoder, n: int, here: Here) -> float:
    """Seconds to join a row to a tensor of n rows, for keys and values of every layer: the best of 5."""
    shape = (model.config.num_key_value_heads, model.config.head_dim)
    options: Any = {"dtype": model.dtype, "device": model.device}
    kept = [torch.zeros((n, *shape), **options) for _ in range(2 * model.config.num_hidden_layers)]
    new, best = torch.zeros((1, *shape), **options), float("inf")
    for _ in range(5):
        wait(here)
        begin = time.perf_counter()
        for old in kept:
            torch.cat((old, new))
        wait(here)
        best = min(best, time.perf_counter() - begin)
    return best


def indirection(model: Decoder, here: Here) -> Iterator[Item]:
    """Chapter 3: slices of contiguous memory beside blocks, one layer's attention and a whole step."""
    config = model.config
    for batch, n in here.pick(((32, 64), (32, 512), (8, 2048)), ((2, 9),)):
        for size in here.pick((None, 1, 16, 128), (None, 4)):
            seconds = time_attention(
                [n] * batch,
                size,
                num_heads=config.num_attention_heads,
                num_kv_heads=config.num_key_value_heads,
                head_dim=config.head_dim,
                dtype=model.dtype,
                device=model.device,
            )
            where = f"blocks of {size}" if size else "contiguous"
            yield _time("ch03_paging", f"attention of a layer, {batch} x {n:,}, {where}", seconds, here)
    for n in here.pick((64, 512), (9,)):
        for size, where in ((None, "contiguous"), (16, "blocks of 16")):
            yield _time("ch03_paging", f"a step, 8 x {n}, {where}", time_decode(model, [n] * 8, size), here)


def compaction(model: Decoder, here: Here) -> Iterator[Item]:
    """Chapter 2: the notebook's crowd, on a GPU eight times as long; a compaction beside a step."""
    times = here.pick(8, 1)
    sizes = [(11, 20), (16, 3)] * 4 + [(40, 8)]  # prompt, output
    crowd = [WorkloadRequest(tuple(range(times * p)), None, times * o) for p, o in sizes]
    found = run_and_compact(model, crowd, num_slots=256 * times, after_step=3 * times + 1)
    yield _row("ch02_contiguous", "compaction, bytes moved", found.moved_bytes)
    yield _time("ch02_contiguous", "compaction", found.move_seconds, here)
    yield _time("ch02_contiguous", "a step of that run", found.step_seconds, here)


def same_requests(
    model: Decoder, file: str, schemes: tuple[str, ...], scheduler: str, here: Here
) -> Iterator[Item]:
    """Chapters 2 and 3: the same requests in the same memory, by its kind."""
    lengths = {"mean_in": 160, "mean_out": 64, "max_in": 512, "max_out": 128}
    lengths = here.pick(lengths, {"mean_in": 6, "mean_out": 3, "max_in": 9, "max_out": 4})
    work = make_workload(here.pick(32, 3), vocab_size=model.config.vocab_size, **lengths)
    num_slots, max_model_len = here.pick((16_384, 2048), (128, 32))
    yield _row(file, "requests", len(work))
    yield _row(file, "slots", num_slots)
    for scheme in schemes:
        options: Any = {**RUNGS[scheme].options, "scheduler": scheduler}
        if options["cache"] == "paged":
            options["attention"] = "reference"  # as in chapter 3: gathered
        budget = num_slots * bytes_per_token(model)
        args = EngineArgs(**options, kv_cache_memory_bytes=budget, max_model_len=max_model_len)
        found = run_rung(model, Rung(scheme, 0, options), args, work)
        yield _row(file, f"{scheme}, at once, most", max(found.in_flight))
        yield _row(file, f"{scheme}, used of held", found.split.share("used"))
        seconds = found.latency["seconds"]
        yield _time(file, f"{scheme}, a step", seconds / len(found.records), here)
        if here.gpu:
            yield _row(file, f"{scheme}, output tok/s", found.latency["tok_s"])
        release(here)


def _row(file: str, what: str, value: object) -> Item:
    return file, {"what": what, "value": value}


def _time(file: str, what: str, seconds: float, here: Here) -> Item:
    return _row(file, f"{what}, {'ms' if here.gpu else 'miniature_ms'}", 1e3 * seconds)
