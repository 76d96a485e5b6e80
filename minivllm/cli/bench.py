"""Above the chapters: `minivllm bench`, one file of requests run through this engine or another one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from minivllm.cli.options import download_bar, model_options
from minivllm.lab.bench.options import ENGINES, BenchOptions, check_options, run_bench

if TYPE_CHECKING:
    from minivllm.lab.bench.result import BenchResult


@click.command()
@click.option("--requests", "file", required=True, help="JSON lines, as `minivllm workload` writes them.")
@click.option("--engine", type=click.Choice(list(ENGINES)), default="minivllm", show_default=True)
@model_options
@click.option("--cache", default=None, help="KV memory: recompute, naive, contiguous or paged.")
@click.option("--scheduler", default=None, help="static or continuous.")
@click.option("--attention", default=None, help="Kernels of paged attention: torch.")
@click.option("--kv-cache-memory-bytes", type=int, default=None, help="Memory for keys and values.")
@click.option("--block-size", type=int, default=None, help="Tokens in a block.")
@click.option("--num-blocks", type=int, default=None, help="Blocks, instead of a number of bytes.")
@click.option("--reservation", default=None, help="Contiguous memory: max, pow2 or oracle.")
@click.option("--max-num-seqs", type=int, default=None, help="Most requests at once; 64.")
@click.option("--max-model-len", type=int, default=None, help="Most tokens of prompt and output together.")
@click.option(
    "--all-at-once", is_flag=True, help="Ignore arrival times: every request is there at the start."
)
@click.option("--save-tokens", default=None, help="Write the output token ids here, one JSON list a line.")
def bench(file: str, engine: str, all_at_once: bool, save_tokens: str | None, **chosen: Any) -> None:
    """Run a file of requests through an ENGINE, greedily and past end-of-sequence tokens, and measure it.

    The figures go to standard error as tables and, as one JSON object, to the last line of standard output.
    """
    from rich.console import Console

    from minivllm.lab.workload import read_workload
    from minivllm.model.hub import resolve

    options = BenchOptions(**chosen)
    check_options(engine, options)
    if save_tokens is not None:
        path = Path(save_tokens).absolute()
        if not save_tokens or path.is_dir() or not path.parent.is_dir():
            raise click.ClickException(
                f"--save-tokens {save_tokens!r}: name a file in a folder that is there."
            )
    requests = read_workload(file)
    if all_at_once:
        requests = [replace(request, arrival=0.0) for request in requests]
    with download_bar() as progress:
        resolve(options.model, progress=progress)
    console = Console(stderr=True)
    console.print(
        f"{engine}: loading the model, then {len(requests)} requests", markup=False, highlight=False
    )
    with _token_bar(console) as report:
        result = run_bench(engine, requests, options, report)
    summary = result.summary()
    _print_summary(console, summary)
    try:
        if save_tokens is not None:
            _save(result, Path(save_tokens))
    finally:  # the figures are not lost with the file
        click.echo(json.dumps(summary, allow_nan=False))


@contextmanager
def _token_bar(console: Any) -> Iterator[Callable[[int, int], None]]:
    """A function that draws output tokens so far and in all, once the first has come, on a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("output tokens"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=console, disable=not console.is_terminal)
    task = bar.add_task("", total=None)

    def report(done: int, total: int) -> None:
        bar.start()
        bar.update(task, completed=done, total=total)

    try:
        yield report
    finally:
        bar.stop()


def _print_summary(console: Any, found: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table("", "mean", "p50", "p90", "p99", title="Latency, in milliseconds")
    for name in ("ttft", "tpot", "itl"):
        figures = found[f"{name}_ms"].values()
        table.add_row(name.upper(), *("-" if value is None else f"{value:,.1f}" for value in figures))
    speed = "-" if found["tok_s"] is None else f"{found['tok_s']:,.1f} tokens/s"
    memory = found["peak_memory_bytes"]
    lines = (
        f"{found['requests']} requests, {found['prompt_tokens']:,} prompt tokens, "
        f"{found['output_tokens']:,} output tokens in {found['seconds'] or 0:.1f} s: {speed}",
        f"{found['model']}, {found['dtype']}, {found['device']}",
        f"peak memory: {memory / 2**20:,.0f} MiB ({found['peak_memory_kind']})" if memory else "",
    )
    for line in filter(None, lines):
        console.print(line, markup=False, highlight=False)
    console.print(table)


def _save(result: BenchResult, path: Path) -> None:
    try:
        result.save_tokens(path)
    except OSError as error:
        raise click.ClickException(
            f"{path} cannot be written: {error.strerror}. Give --save-tokens a file in a folder with room."
        ) from error
