"""Above the chapters: `minivllm ladder`, one workload run up the rungs of the book."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from minivllm.cli.options import download_bar, model_options

if TYPE_CHECKING:
    from rich.table import Table

    from minivllm.lab.ladder import RungResult
    from minivllm.lab.workload import WorkloadRequest
    from minivllm.model.hub import ModelSource
    from minivllm.model.tokenizer import Tokenizer


@click.command()
@model_options
@click.option(
    "--rungs",
    default=None,
    help="Only these, separated by commas: recompute, naive, contiguous-max, contiguous-pow2, "
    "contiguous-oracle (contiguous: all three), paged, sharing, prefix, continuous, chunked; on "
    "a GPU also triton, graphs. The others are compared with the first.",
)
@click.option(
    "--requests",
    default=None,
    metavar="N|FILE",
    help="So many of the ladder's own requests (12), or a file as `minivllm workload` writes it.",
)
@click.option(
    "--kv-cache-memory-bytes",
    type=click.IntRange(1),
    default=None,
    help="Memory for keys and values of each rung. By default too little for all requests at once.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
@click.option("--plot", type=click.Path(path_type=Path), default=None, help="Draw pictures into this folder.")
def ladder(
    model: str,
    dtype: str,
    device: str,
    rungs: str | None,
    requests: str | None,
    kv_cache_memory_bytes: int | None,
    as_json: bool,
    plot: Path | None,
) -> None:
    """Run one workload up the ladder of ideas: the tokens stay the same, memory and time change.

    The dtype is float32 unless you choose another, so that tokens can be compared exactly.
    """
    from rich.console import Console

    from minivllm.lab import ladder as lab
    from minivllm.lab.ladder_workload import default_budget
    from minivllm.model.hub import resolve
    from minivllm.model.loader import load_model
    from minivllm.model.tokenizer import load_tokenizer

    names = None if rungs is None else tuple(name.strip() for name in rungs.split(","))
    lab.check_rungs(names or ())
    if plot is not None:
        _prepare(plot)
    with download_bar() as progress:
        source = resolve(model, progress=progress)
    console = Console(stderr=as_json)
    tokenizer = load_tokenizer(source)
    workload = _workload(requests, tokenizer, source)
    if not console.is_terminal:
        click.echo("loading the model, then running the rungs", err=True)
    with console.status("loading the model") as status:
        decoder = load_model(source, dtype="float32" if dtype == "auto" else dtype, device=device)
        budget = kv_cache_memory_bytes or default_budget(decoder, workload)
        results = []
        for result in lab.run_ladder(
            decoder, workload, rungs=names, kv_cache_memory_bytes=budget, report=status.update
        ):
            results.append(result)
            if not console.is_terminal:  # nobody sees the spinner there
                click.echo(f"{result.rung.name}: done in {result.latency['seconds']:.1f} s", err=True)
    about = {
        **lab.about(decoder, model),
        "requests": len(workload),
        "prompt_tokens": sum(len(r.token_ids) for r in workload),
        "sequences": sum(r.n for r in workload),
        "output_tokens": sum(r.n * r.max_tokens for r in workload),
        "kv_cache_memory_bytes": budget,
        "max_model_len": min(lab.MAX_MODEL_LEN, decoder.config.max_position_embeddings),
    }
    if as_json:
        click.echo(json.dumps({**about, "rungs": [r.to_json() for r in results]}))
    else:
        _print(console, about, workload, tokenizer, results)
        left_out = [name for name in lab.RUNGS if name not in lab.rungs_of(decoder.device)]
        if left_out and names is None:
            console.print(f"Not run, since they need a GPU: {', '.join(left_out)}.", highlight=False)
    if plot is not None:
        from minivllm.lab.plot_ladder import plot_ladder

        for path in plot_ladder(results, plot):
            click.echo(str(path), err=True)
    if not all(r.same_tokens.startswith(("(", "yes")) for r in results):
        raise click.ClickException("The rungs gave different tokens: that is a fault in this program.")


def _prepare(folder: Path) -> None:
    """Look before the minutes of work whether the pictures can be drawn and kept."""
    from minivllm.lab import draw_memory_map  # noqa: F401

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise click.ClickException(
            f"--plot {folder}: no folder can be made there ({error.strerror})."
        ) from error


def _workload(asked: str | None, tokenizer: Tokenizer, source: ModelSource) -> list[WorkloadRequest]:
    from dataclasses import replace

    from minivllm.errors import InvalidRequestFile
    from minivllm.lab.bench.options import config_of, encode_prompts
    from minivllm.lab.ladder_workload import NUM_LADDER_REQUESTS, ladder_requests
    from minivllm.lab.workload import read_workload

    if asked is None or asked.isdecimal():
        n = NUM_LADDER_REQUESTS if asked is None else int(asked)
        if n < 1:
            raise click.UsageError(f"--requests {asked}: at least 1 is needed.")
        return ladder_requests(tokenizer, n)
    found = read_workload(asked)
    late = sum(r.arrival > 0 for r in found)
    if late:
        raise InvalidRequestFile(
            f"{asked}: {late} of {len(found)} requests arrive later than at the start, and the ladder takes "
            "all requests at once. Make the file without --rate."
        )
    prompts = encode_prompts(found, source, config_of(source))
    return [replace(r, prompt_token_ids=tuple(p), prompt=None) for r, p in zip(found, prompts, strict=True)]


def _print(
    console: Any,
    about: dict[str, Any],
    workload: Sequence[WorkloadRequest],
    tokenizer: Tokenizer,
    results: list[RungResult],
) -> None:
    from minivllm.lab.segments import format_bytes

    slots = results[0].records[0].snapshot.num_slots
    console.print(
        f"\n{about['model']}, {about['dtype']}, {about['device']} ({about['versions']}, {about['date']})\n"
        f"{about['requests']} requests at once for {about['sequences']} sequences: {about['prompt_tokens']} "
        f"tokens of prompt, {about['output_tokens']} to generate. Memory for keys and values: {slots:,} "
        f"tokens ({format_bytes(about['kv_cache_memory_bytes'])}). Longest context: "
        f"{about['max_model_len']:,}.\n",
        markup=False,
        highlight=False,
    )
    shown = max(range(len(workload)), key=lambda i: workload[i].max_tokens)
    first = sum(r.n for r in workload[:shown])  # of its sequences
    prompt, answer = workload[shown].token_ids, results[0].outputs[first]
    console.print(f"Request {shown}, and what the model wrote after it:", markup=False, highlight=False)
    console.print(f"  {tokenizer.decode(prompt)!r}", markup=False, highlight=False)
    console.print(f"  {tokenizer.decode(answer)!r}", style="bold", markup=False, highlight=False)
    console.print()
    console.print(memory_table(results))
    console.print(work_table(results))
    console.print(time_table(results))


def memory_table(results: list[RungResult]) -> Table:
    """One line a rung: were the tokens the same, what memory was held and for what, how many ran at once."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from minivllm.lab.segments import format_bytes

    table = Table(
        title="The ladder: memory",
        caption="Same: the tokens, against the first rung. KV held: memory that no other request could take, "
        "the mean over the steps, and its shares: used by a token, used later, never used. In flight: "
        "sequences that ran at once (a request for 4 samples is 4), the mean and the most. Preempted: how "
        "often a request lost its memory.",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("rung", no_wrap=True)
    table.add_column("same", min_width=4)
    for name in ("KV held", "used", "later", "never", "in flight", "preempted"):
        table.add_column(name, justify="right", no_wrap=True)
    for r in results:
        figures = r.to_json()
        shares = (figures["utilisation"], figures["reserved_for_later"], figures["internal_waste"])
        table.add_row(
            r.rung.name,
            "-" if r.same_tokens == "(reference)" else r.same_tokens,
            format_bytes(round(r.held_bytes)) if r.held_bytes else "0",
            *("-" if share is None else f"{share:.0%}" for share in shares),
            f"{figures['in_flight_mean']:.1f} / {figures['in_flight_most']}",
            str(r.num_preemptions),
        )
    return table


def work_table(results: list[RungResult]) -> Table:
    """One line a rung: what the model had to compute, and what it found or copied instead."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(
        title="The ladder: work",
        caption="Computed: tokens that went through the model, in all and in the largest step. Prefix hits: "
        "prompt tokens found in memory, of all. Copied: blocks, before a sequence wrote where others read.",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("rung", no_wrap=True)
    for name in ("steps", "computed", "largest step", "prefix hits", "copied"):
        table.add_column(name, justify="right", no_wrap=True)
    for r in results:
        table.add_row(
            r.rung.name,
            str(len(r.records)),
            f"{sum(r.computed):,}",
            f"{max(r.computed):,}",
            "-" if r.prefix_hit_rate is None else f"{r.prefix_hit_rate:.0%}",
            str(r.num_copied_blocks),
        )
    return table


def time_table(results: list[RungResult]) -> Table:
    """One line a rung: how fast it went."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(
        title="The ladder: time",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        caption="tok/s: output tokens. TTFT: time to first token, from arrival; TPOT: time per output token "
        "after it; both are means. ITL p99: 99 of 100 gaps between a request's tokens are shorter.",
    )
    table.add_column("rung", no_wrap=True)
    table.add_column("chapter", justify="right")
    for name in ("seconds", "tok/s", "TTFT", "TPOT", "ITL p99"):
        table.add_column(name, justify="right", no_wrap=True)
    for r in results:
        found = r.latency
        table.add_row(
            r.rung.name,
            str(r.rung.chapter),
            f"{found['seconds']:.1f}",
            f"{found['tok_s']:.1f}",
            _ms(found["ttft_ms"]["mean"]),
            _ms(found["tpot_ms"]["mean"]),
            _ms(found["itl_ms"]["p99"]),
        )
    return table


def _ms(milliseconds: float | None) -> str:
    if milliseconds is None:
        return "-"
    return f"{milliseconds:,.0f} ms" if milliseconds >= 10 else f"{milliseconds:.1f} ms"
