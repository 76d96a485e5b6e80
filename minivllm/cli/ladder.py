"""Above the chapters: `minivllm ladder`, one workload run up the rungs of the book."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from minivllm.cli.options import download_bar, model_options

if TYPE_CHECKING:
    from rich.table import Table

    from minivllm.lab.ladder import RungResult

_BAR_WIDTH = 18


@click.command()
@model_options
@click.option("--rungs", default=None, help="Only these, separated by commas. All by default.")
@click.option(
    "--max-tokens",
    type=click.IntRange(1),
    default=32,
    show_default=True,
    help="Tokens that each rung generates.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
def ladder(model: str, dtype: str, device: str, rungs: str | None, max_tokens: int, as_json: bool) -> None:
    """Run one workload up the ladder of ideas: the tokens stay the same, memory and time change.

    The dtype is float32 unless you choose another, so that tokens can be compared exactly.
    """
    from rich.console import Console

    from minivllm.lab import ladder as lab
    from minivllm.model.hub import resolve
    from minivllm.model.loader import load_model
    from minivllm.model.tokenizer import load_tokenizer

    names = tuple(lab.RUNGS) if rungs is None else tuple(name.strip() for name in rungs.split(","))
    lab.check_rungs(names)
    with download_bar() as progress:
        source = resolve(model, progress=progress)
    console = Console(stderr=as_json)
    if not console.is_terminal:
        click.echo("loading the model, then running the rungs; each takes seconds", err=True)
    with console.status("loading the model") as status:
        tokenizer = load_tokenizer(source)
        prompt = tokenizer.encode(lab.PROMPT)
        decoder = load_model(source, dtype="float32" if dtype == "auto" else dtype, device=device)
        room = decoder.config.max_position_embeddings
        lengths = [n for n in lab.LENGTHS if n <= room]
        results = []
        run = lab.run_ladder(
            decoder,
            prompt,
            rungs=names,
            max_tokens=max_tokens,
            lengths=lengths,
            max_model_len=min(2048, room),
            report=status.update,
        )
        for result in run:
            results.append(result)
            if not console.is_terminal:  # nobody sees the spinner there
                click.echo(f"{result.name}: done", err=True)
    about = lab.about(decoder, model)
    if as_json:
        workload = {"prompt_tokens": len(prompt), "max_tokens": max_tokens}
        click.echo(json.dumps({**about, **workload, "rungs": [r.to_json() for r in results]}))
        _refuse_different_tokens(results)
        return
    heading = f"\n{model}, {about['dtype']}, {about['device']} ({about['versions']}, {about['date']})"
    console.print(heading, markup=False)
    console.print(f"One request: a prompt of {len(prompt)} tokens, {max_tokens} generated greedily.\n")
    console.print(tokenizer.decode(prompt), end="", markup=False, highlight=False)
    console.print(tokenizer.decode(results[0].token_ids), style="bold", markup=False, highlight=False)
    console.print()
    console.print(workload_table(results))
    console.print(length_table(results))
    _refuse_different_tokens(results)


def _refuse_different_tokens(results: list[RungResult]) -> None:
    if not all(r.same_tokens.startswith(("(", "yes", "tie")) for r in results):
        raise click.ClickException("The rungs gave different tokens: that is a fault in this program.")


def workload_table(results: list[RungResult]) -> Table:
    """One line a rung: were the tokens the same, what memory was held, how fast it went."""
    from rich.table import Table

    table = Table(
        title="The ladder", caption="TTFT: time to first token. TPOT: time per output token after it."
    )
    table.add_column("rung")
    table.add_column("chapter", justify="right")
    table.add_column("same tokens")
    for name in ("KV held", "tok/s", "TTFT", "TPOT"):
        table.add_column(name, justify="right", no_wrap=True)
    for r in results:
        held = f"{r.kv_bytes / 2**20:.2f} MiB" if r.kv_bytes else "0"
        row = [r.name, str(r.chapter), r.same_tokens, held, f"{r.tok_s:.1f}", _ms(r.ttft), _ms(r.tpot)]
        table.add_row(*row)
    return table


def length_table(results: list[RungResult]) -> Table:
    """Time for one more token, at several lengths: a bar for each, all to one scale."""
    from rich.table import Table

    table = Table(title="Time for one more token, by length of the sequence so far")
    table.add_column("length", justify="right", no_wrap=True)
    for r in results:
        table.add_column(r.name, justify="right", no_wrap=True)
        table.add_column("", width=_BAR_WIDTH)
    longest = max((s for r in results for s in r.step_seconds.values()), default=1.0)
    for length in results[0].step_seconds if results else ():
        row: list[Any] = [str(length)]
        for r in results:
            seconds = r.step_seconds[length]
            row += [_ms(seconds), "█" * max(1, round(_BAR_WIDTH * seconds / longest))]
        table.add_row(*row)
    return table


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f} ms" if seconds >= 0.01 else f"{seconds * 1e3:.1f} ms"
