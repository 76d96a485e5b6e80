"""Above the chapters: the three curves of how a step grows: which points there are, and which have room."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm.lab.curves import Results, about, load_model
from minivllm.lab.growth_points import blocks_needed, decode_point, fill_pool
from minivllm.lab.scheduling_cost import step_seconds
from minivllm.lab.segments import format_bytes

if TYPE_CHECKING:
    import torch

    from minivllm.model.decoder import Decoder
    from minivllm.model.tokenizer import Tokenizer

NAME = "growth"
BLOCK_SIZE = 16
# A million blocks of a real model do not fit: SmolLM2's in float32 are 703 GiB. This model's are 2 GiB.
POOL_MODEL, POOL_SEQS, POOL_CONTEXT = "random:tiny-qwen2", 64, 64
LEAST_POOL = 1024  # blocks, so that all these requests have room
BYTES_OF_BOOKS = 200  # for each block, in Python: at least what its entries in lists take


@dataclass(frozen=True)
class Plan:
    """The points. running: numbers of requests, each with `context` tokens. contexts: of num_seqs requests.
    pools: numbers of blocks. num_steps: timed at each point. memory: most bytes of a pool; None: on a CPU
    half of what is free, on CUDA four fifths. minutes: a point that would begin later is left out."""

    running: Sequence[int]
    contexts: Sequence[int]
    pools: Sequence[int]
    context: int = 128
    num_seqs: int = 8
    num_steps: int = 5
    memory: int | None = None
    minutes: float = 6.0
    attention: str | None = None

    def steps(self) -> Iterator[tuple[str, int, int]]:
        """The points of the first two curves: (curve, requests, tokens of each)."""
        yield from (("by_running", n, self.context) for n in self.running)
        yield from (("by_context", self.num_seqs, n) for n in self.contexts)


def measure_growth(folder: Path, source: Mapping[str, str], plan: Plan) -> dict[str, Any]:
    """Measure every point; returns what the file holds. Raises MinivllmError, OSError."""
    decoder, tokenizer = load_model(**source)
    found = about(decoder, source["model"]) | {
        "num_steps": plan.num_steps,
        "block_size": BLOCK_SIZE,
        "pool_model": POOL_MODEL,
    }
    results = Results(folder, NAME, found)
    _by_load(results, plan, decoder, tokenizer)
    _by_pool(results, plan, decoder.dtype, decoder.device)
    results.draw("draw_growth")
    return results.found


def _by_load(results: Results, plan: Plan, decoder: Decoder, tokenizer: Tokenizer) -> None:
    """The first two curves, with one pool for all points: as large as the largest that fits needs it."""
    from minivllm.llm import LLM
    from minivllm.memory.size import bytes_per_token

    unit, longest = BLOCK_SIZE * bytes_per_token(decoder), decoder.config.max_position_embeddings
    room = (plan.memory or _room(decoder.device)) // unit

    def why_not(num_seqs: int, context: int) -> str | None:
        needed = blocks_needed(num_seqs, context, BLOCK_SIZE)
        if context > longest:
            return f"the model's longest context is {longest}"
        if needed > room:
            return f"needs {format_bytes(needed * unit)} of memory; {format_bytes(room * unit)} may be taken"
        return None

    points = [(curve, n, context, why_not(n, context)) for curve, n, context in plan.steps()]
    fitting = [(n, context) for _, n, context, reason in points if reason is None] or [(1, plan.context)]
    num_blocks = max(blocks_needed(n, context, BLOCK_SIZE) for n, context in fitting)
    most = max(n for n, _ in fitting)
    size: dict[str, Any] = {"num_blocks": num_blocks, "block_size": BLOCK_SIZE, "max_num_seqs": most}
    with LLM(decoder, tokenizer=tokenizer, attention=plan.attention, watermark=0.0, **size) as llm:
        results.found["attention"] = llm.args.attention
        fill_pool(llm, num_blocks)
        for curve, n, context, reason in points:
            reason = reason or _too_late(results, plan)
            row = {"skipped": reason} if reason else decode_point(llm, n, context, plan.num_steps)
            results.add(curve, {"running": n, "context": context, **row})
            results.say(f"{n} requests of {context} tokens: {_told(row)}")


def _by_pool(results: Results, plan: Plan, dtype: torch.dtype, device: torch.device) -> None:
    """The third curve. schedule_ms: the scheduler and its books alone, without a tensor; that a pool has no
    room for its tensor does not matter to them."""
    import torch

    from minivllm.llm import LLM
    from minivllm.memory.size import bytes_per_token

    decoder, tokenizer = load_model(POOL_MODEL, str(dtype).removeprefix("torch."), str(device))
    unit = BLOCK_SIZE * bytes_per_token(decoder)
    room = plan.memory or _room(device)
    used = blocks_needed(POOL_SEQS, POOL_CONTEXT, BLOCK_SIZE)
    for n in plan.pools:
        row: dict[str, Any] = {"num_blocks": n, "running": POOL_SEQS, "context": POOL_CONTEXT}
        free = _room(torch.device("cpu"))
        reason = _too_late(results, plan)
        if n * BYTES_OF_BOOKS > free:
            books = format_bytes(n * BYTES_OF_BOOKS)
            reason = f"its books need {books} of memory; {format_bytes(free)} may be taken"
        else:
            row["schedule_ms"] = 1e3 * step_seconds(POOL_SEQS, n)
        if n * unit > room:
            reason = reason or f"needs {format_bytes(n * unit)} of memory; {format_bytes(room)} may be taken"
        if reason:
            row["skipped"] = reason
        else:
            with LLM(decoder, tokenizer=tokenizer, num_blocks=n, block_size=BLOCK_SIZE, watermark=0.0) as llm:
                fill_pool(llm, used)
                row |= decode_point(llm, POOL_SEQS, POOL_CONTEXT, plan.num_steps)
        results.add("by_pool", row)
        results.say(f"{n:,} blocks: {_told(row)}")


def _room(device: torch.device) -> int:
    """Bytes that a pool may take."""
    import psutil
    import torch

    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] * 4 // 5
    return psutil.virtual_memory().available // 2


def _too_late(results: Results, plan: Plan) -> str | None:
    return f"{plan.minutes:g} minutes were over" if results.elapsed >= 60 * plan.minutes else None


def _told(row: Mapping[str, Any]) -> str:
    return f"left out: {row['skipped']}" if "skipped" in row else f"{row['step_ms']:.1f} ms a step"
