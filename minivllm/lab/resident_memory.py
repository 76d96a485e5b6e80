"""Above the chapters: where a process's memory goes: code, weights, pool, and what steps need beside them.

    python -m minivllm.lab.resident_memory

Resident memory, which the system has really given, is read after each stage, in a process of its own:

    code        Python, PyTorch, and what a first run of a tiny model loads
    weights     the model, its tokenizer, the engine
    pool        all of it has been written to, so that every page is there
    workspace   what is left of the peak of a run with full batches; beside it stands a bound, from the
                options, of what is allocated at once; the C library may keep freed pieces beside that
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import click
import psutil

from minivllm.cli.options import DTYPES
from minivllm.errors import MinivllmError

if TYPE_CHECKING:
    from minivllm.llm import LLM

TINY = "random:tiny-llama"
CLEAR_REFS = Path("/proc/self/clear_refs")  # Linux


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--model", default="smollm2-135m", show_default=True, help="As for `minivllm generate`.")
@click.option("--dtype", type=click.Choice(DTYPES), default="auto", show_default=True, help="Precision.")
@click.option("--attention", default=None, help="Kernels of paged attention: torch, c.")
@click.option("--enforce-eager", is_flag=True, help="The plain decoder, its weights as they are.")
@click.option(
    "--kv-cache-memory-bytes", type=click.IntRange(1), default=2**29, show_default=True, help="Of the pool."
)
@click.option("--max-model-len", type=click.IntRange(2), default=512, show_default=True)
@click.option("--max-num-seqs", type=click.IntRange(1), default=16, show_default=True)
@click.option("--max-num-batched-tokens", type=click.IntRange(1), default=512, show_default=True)
@click.option(
    "--prompt-len", type=click.IntRange(1), default=256, show_default=True, help="Of each of max-num-seqs."
)
@click.option("--max-tokens", type=click.IntRange(1), default=8, show_default=True, help="Output of each.")
def main(model: str, dtype: str, prompt_len: int, max_tokens: int, **options: Any) -> None:
    """Print as JSON lines, and as a table on standard error, how a process's memory divides:
    code + weights + pool + workspace = peak.

    It is about a CPU; every request of the run is there at once and sampled.
    """
    rows = {}
    try:
        for row in stages(model, dtype, options, prompt_len, max_tokens):
            click.echo(json.dumps(row))
            rows[row["stage"]] = row
    except MinivllmError as error:
        raise click.ClickException(str(error)) from error
    _print(rows)


def stages(
    model: str, dtype: str, options: Mapping[str, Any], prompt_len: int, max_tokens: int
) -> Iterator[dict[str, Any]]:
    """A row for each stage, and one for the peak. bytes: what it added; held_bytes: what its tensors are.

    options: those of `LLM`. Raises what `LLM` raises, and RequestTooLong.
    """
    from minivllm.lab import ladder
    from minivllm.lab.held import held_bytes
    from minivllm.lab.workspace_bound import workspace_parts
    from minivllm.llm import LLM
    from minivllm.memory.paged_store import PagedStore

    kernels = {name: options[name] for name in ("attention", "enforce_eager")}
    with LLM(TINY, dtype=dtype, device="cpu", num_blocks=64, **kernels) as llm:
        _run(llm, 2, 20, 2)
    code = _resident()
    yield {"stage": "code", "bytes": code}
    with LLM(model, dtype=dtype, device="cpu", **options) as llm:
        engine = llm.engine
        assert isinstance(engine.store, PagedStore)
        weights = _resident() - code
        held = held_bytes(engine.model, engine.forward, without=[engine.store])
        yield {"stage": "weights", "bytes": weights, "held_bytes": held}
        engine.store.kv.zero_()
        pool = _resident() - code - weights
        yield {"stage": "pool", "bytes": pool, "held_bytes": engine.store.kv.nbytes}
        forgotten = forget_peak()
        full = _run(llm, llm.args.max_num_seqs, prompt_len, max_tokens)
        peak, parts = _peak(), workspace_parts(engine.model, llm.args)
        about = ladder.about(engine.model, model) | {"attention": llm.args.attention}
    workspace = peak - code - weights - pool
    yield {"stage": "workspace", "bytes": workspace, "bound_bytes": sum(parts.values()), "bounds": parts}
    since = "the pool was there" if forgotten else "the process began, so loading the model is part of it"
    yield {"stage": "peak", "bytes": peak, "since": since, **full, **about}


def _run(llm: LLM, num_seqs: int, prompt_len: int, max_tokens: int) -> dict[str, int]:
    """Run so many requests at once; how full the batches were."""
    from minivllm.lab.workload import ids_for
    from minivllm.params import SamplingParams

    sizes, running = [0], [0]

    def note(step: Any) -> None:
        sizes.append(sum(part.num_new_tokens for part in step.scheduled))
        running.append(len(step.scheduled))

    llm.engine.on_step = note
    ids, random = ids_for(llm.engine.model.config.vocab_size), Random(0)
    prompts = [{"prompt_token_ids": random.choices(ids, k=prompt_len)} for _ in range(num_seqs)]
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=0, max_tokens=max_tokens, ignore_eos=True)
    llm.generate(prompts, params, use_tqdm=False)
    return {"largest_step": max(sizes), "most_running": max(running)}


def forget_peak() -> bool:
    """Let the peak of this process begin anew; False where the system has no such thing."""
    try:
        CLEAR_REFS.write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def _resident() -> int:
    """Bytes that this process has now, without what only waits to be collected."""
    gc.collect()
    return int(psutil.Process().memory_info().rss)


def _peak() -> int:
    """Most bytes that it had at once, since it began or since its peak was forgotten."""
    import torch

    from minivllm.lab.bench.result import peak_memory

    found = peak_memory(torch.device("cpu"))
    return int(found["peak_memory_bytes"]) if found else _resident()


def _print(rows: Mapping[str, Mapping[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    from minivllm.lab.segments import format_bytes

    peak, parts = (
        rows["peak"],
        ", ".join(f"{name} {format_bytes(size)}" for name, size in rows["workspace"]["bounds"].items()),
    )
    table = Table(
        "", "resident", "counted", title=f"{peak['model']}, {peak['dtype']}, attention {peak['attention']}"
    )
    for name, row in rows.items():
        counted = row.get("held_bytes")
        if name == "workspace":
            counted = row["bound_bytes"]
        bound = "at most " if name == "workspace" else ""
        resident = f"{'= ' if name == 'peak' else ''}{format_bytes(row['bytes'])}"
        table.add_row(name, resident, "" if counted is None else bound + format_bytes(counted))
    console = Console(stderr=True)
    console.print(table)
    console.print(
        f"The bound of what is allocated at once: {parts}. The C library may keep freed pieces beside that. "
        f"The peak: since {peak['since']}.",
        highlight=False,
    )


if __name__ == "__main__":
    main()
