"""Above the chapters: `minivllm bench`, one file of requests run through this engine or another one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from minivllm.cli.options import download_bar, model_options
from minivllm.cli.replaying import describe_replay, replay_options
from minivllm.lab.bench.options import (
    ENGINES,
    BenchOptions,
    check_options,
    config_of,
    engine_options,
    run_bench,
)

if TYPE_CHECKING:
    from minivllm.lab.bench.result import BenchResult


class _Bench(click.Command):
    """Reads `--goodput ttft:500 tpot:50`, as vLLM spells it: click gives an option one value, so its name is
    repeated before each further one."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        spread: list[str] = []
        many = False
        for argument in args:
            if argument.startswith("-"):
                many = argument.split("=")[0] == "--goodput"
            elif many and spread[-1] != "--goodput":
                spread.append("--goodput")
            spread.append(argument)
        return super().parse_args(ctx, spread)


def _engine_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """An option for each that `BenchOptions` has."""
    for option in reversed(engine_options()):
        name = option.name.replace("_", "-")
        kind, help = option.metadata["kind"], option.metadata["help"]
        spelled = f"--{name}/--no-{name}" if kind is bool else f"--{name}"
        command = click.option(spelled, type=kind, default=None, help=help)(command)
    return command


@click.command(cls=_Bench)
@click.option("--requests", "file", required=True, help="From `minivllm workload`, or a trace.")
@replay_options
@click.option("--n", type=int, default=None, help="Only the first N requests.")
@click.option(
    "--rate", type=float, default=None, help="Poisson arrivals, so many a second; inf: all at once."
)
@click.option("--max-in", type=int, default=None, help="Trace: cut longer prompts to so many tokens.")
@click.option("--max-out", type=int, default=None, help="Trace: cut longer outputs to so many tokens.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of --rate and a trace's prompts.")
@click.option(
    "--all-at-once", is_flag=True, help="Ignore arrival times: every request is there at the start."
)
@click.option("--engine", type=click.Choice(list(ENGINES)), default="minivllm", show_default=True)
@model_options
@_engine_options
@click.option("--percentiles", default="50,90,99", show_default=True, help="Of the latencies.")
@click.option(
    "--goodput",
    multiple=True,
    metavar="KEY:MS...",
    help="Bounds in milliseconds, for ttft, tpot, e2el: count the requests a second that keep all.",
)
@click.option("--save-tokens", default=None, help="Write the output token ids here, one JSON list a line.")
def bench(
    file: str,
    format: str,
    engine: str,
    all_at_once: bool,
    percentiles: str,
    goodput: tuple[str, ...],
    save_tokens: str | None,
    **chosen: Any,
) -> None:
    """Run a file of requests through an ENGINE, greedily and past end-of-sequence tokens, and measure it.

    The figures go to standard error as tables and, as one JSON object, to the last line of standard output.
    """
    from rich.console import Console

    from minivllm.lab.bench.figures import parse_goodput, parse_percentiles
    from minivllm.lab.replay import ReplayOptions, make_replay, read_request_file
    from minivllm.model.hub import resolve

    replaying = ReplayOptions(**{f.name: chosen.pop(f.name) for f in fields(ReplayOptions)})
    options = BenchOptions(**chosen)
    check_options(engine, options)
    if all_at_once and (replaying.rate or replaying.speedup):
        raise click.ClickException(
            "--all-at-once does not go with --rate or --speedup: leave one of them out."
        )
    percents, slo = parse_percentiles(percentiles), parse_goodput(goodput)
    if save_tokens is not None:
        path = Path(save_tokens).absolute()
        if not save_tokens or path.is_dir() or not path.parent.is_dir():
            raise click.ClickException(
                f"--save-tokens {save_tokens!r}: name a file in a folder that is there."
            )
    found = read_request_file(file, format)
    with download_bar() as progress:
        source = resolve(options.model, progress=progress)
    replay = make_replay(found, replaying, config_of(source).vocab_size)
    requests = replay.requests
    if all_at_once:
        requests = [replace(request, arrival=0.0) for request in requests]
    console = Console(stderr=True)
    for line in (
        describe_replay(file, found.format, replay, replaying),
        f"{engine}: loading the model",
    ):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    with _token_bar(console) as report:
        result = run_bench(engine, requests, options, report)
    summary = result.summary(percents, slo)
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

    table = Table("", *found["ttft_ms"], title="Latency, in milliseconds")
    for name in ("ttft", "tpot", "itl", "e2el"):
        figures = found[f"{name}_ms"].values()
        table.add_row(name.upper(), *("-" if value is None else f"{value:,.1f}" for value in figures))
    for line in filter(None, _lines(found)):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(table)


def _lines(found: dict[str, Any]) -> Iterator[str]:
    """What stands above the table."""
    speed = "-" if found["tok_s"] is None else f"{found['tok_s']:,.1f} tokens/s"
    yield (
        f"{found['requests']} requests, {found['prompt_tokens']:,} prompt tokens, "
        f"{found['output_tokens']:,} output tokens in {found['seconds'] or 0:.1f} s: {speed}"
    )
    if found["req_s"] is not None:
        offered = "all at once" if found["offered_req_s"] is None else f"{found['offered_req_s']:,.2f}"
        yield (
            f"requests/s: arrived {offered}, finished {found['req_s']:,.2f}; "
            f"prompt tokens/s: {found['input_tok_s']:,.1f}"
        )
    if found["cached_tokens"] is not None:
        yield f"prompt tokens from the prefix cache: {found['cached_tokens']:,}"
    if (kept := found["goodput"]) is not None:
        bounds = " ".join(f"{key}:{bound:g}" for key, bound in kept["slo_ms"].items())
        missed = ", ".join(f"{key} {count}" for key, count in kept["missed"].items())
        good = f"{kept['good']} of {found['requests']} requests kept {bounds}; missed: {missed}"
        yield f"goodput: {kept['req_s'] or 0:,.2f} requests/s ({good})"
    yield f"{found['model']}, {found['dtype']}, {found['device']}"
    if found["peak_memory_bytes"]:
        yield f"peak memory: {found['peak_memory_bytes'] / 2**20:,.0f} MiB ({found['peak_memory_kind']})"


def _save(result: BenchResult, path: Path) -> None:
    try:
        result.save_tokens(path)
    except OSError as error:
        raise click.ClickException(
            f"{path} cannot be written: {error.strerror}. Give --save-tokens a file in a folder with room."
        ) from error
