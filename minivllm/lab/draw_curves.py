"""Above the chapters: pictures of the measured curves, from the JSON that their commands write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from minivllm.lab.draw_panels import Panel, draw_panels

# isort: split
# Below draw.py, which says what to do where matplotlib is missing.
from matplotlib.figure import Figure


def draw_chunked_prefill(found: Mapping[str, Any]) -> Figure:
    """Above, the gaps between the tokens of those who decode; below, the throughput, both by the budget of a
    step. Level lines: whole prompts. found: what `minivllm.lab.chunked_prefill` writes."""
    rows = found.get("rows", ())
    budgets = {row["max_num_batched_tokens"]: row for row in rows if row["max_num_batched_tokens"]}
    whole = next((row for row in rows if not row["max_num_batched_tokens"]), None)
    load = found["load"]
    itl = {name: {n: row["itl_ms"][name] for n, row in budgets.items() if row["itl_ms"][name] is not None}
           for name in ("p99", "p50")}  # fmt: skip
    rate = {n: row["tok_s"] for n, row in budgets.items() if row["tok_s"]}
    panels = [
        Panel(
            f"Gaps between tokens of {load['num_decodes']} requests",
            "token budget of a step",
            "ITL (ms)",
            itl,
            {"whole prompts, p99": whole["itl_ms"]["p99"]} if whole and whole["itl_ms"]["p99"] else {},
        ),
        Panel(
            "Throughput",
            "token budget of a step",
            "prompt and output tokens/s",
            {"tokens/s": rate},
            {"whole prompts": whole["tok_s"]} if whole and whole["tok_s"] else {},
            log="x",
            note=f"a prompt of {load['prompt_len']} tokens every {load['interval']:g} s"
            + ("; they piled up" if any(row["queue_grew"] for row in rows) else ""),
        ),
    ]
    return draw_panels(panels, title(found))


def title(found: Mapping[str, Any]) -> str:
    """Model, dtype, kernels, machine and date."""
    attention = f"attention {found['attention']}"
    return ", ".join((found["model"], found["dtype"], attention, found["device"], found["date"]))


def draw_growth(found: Mapping[str, Any]) -> Figure:
    """The time of a decode step by running requests, with the tokens per second; by context; by blocks in the
    pool. found: what `minivllm.lab.growth` writes."""
    running, context, pool = (found.get(f"by_{name}", []) for name in ("running", "context", "pool"))
    nothing: dict[str, Any] = {}
    first, second, third = (next(iter(rows), nothing) for rows in (running, context, pool))
    panels = [
        Panel(
            "By running requests",
            f"running requests, {first.get('context', '-')} tokens each",
            "milliseconds",
            {
                "step": _line(running, "running", "step_ms"),
                "of it on the host": _line(running, "running", "host_ms"),
            },
            second={"output tokens/s": _line(running, "running", "tok_s")},
            ylabel2="output tokens/s",
            note=_left_out(running, "running"),
        ),
        Panel(
            "By context",
            f"tokens of context, {second.get('running', '-')} requests",
            "milliseconds",
            {
                "step": _line(context, "context", "step_ms"),
                "of it on the host": _line(context, "context", "host_ms"),
            },
            note=_left_out(context, "context"),
        ),
        Panel(
            "By blocks in the pool",
            f"blocks in the pool, {third.get('running', '-')} requests, {found['pool_model']}",
            "milliseconds",
            {
                "step": _line(pool, "num_blocks", "step_ms"),
                "of it on the host": _line(pool, "num_blocks", "host_ms"),
                "the scheduler alone": _line(pool, "num_blocks", "schedule_ms"),
            },
            note=_left_out(pool, "num_blocks"),
        ),
    ]
    return draw_panels(panels, title(found))


def _line(rows: Sequence[Mapping[str, Any]], x: str, y: str) -> dict[float, float]:
    return {row[x]: row[y] for row in rows if row.get(y) is not None}


def _left_out(rows: Sequence[Mapping[str, Any]], x: str) -> str:
    missing = ", ".join(f"{row[x]:,}" for row in rows if "skipped" in row)
    return f"left out: {missing}" if missing else ""
