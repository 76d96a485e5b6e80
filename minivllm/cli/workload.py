"""Above the chapters: `minivllm workload`, which makes a file of requests for `minivllm bench`."""

from __future__ import annotations

import sys
from pathlib import Path

import click


@click.command()
@click.option("--n", type=int, default=64, show_default=True, help="Requests.")
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed gives the same file.")
@click.option(
    "--mean-in", type=float, default=160, show_default=True, help="Mean length of a prompt, in tokens."
)
@click.option("--mean-out", type=float, default=128, show_default=True, help="Mean number of output tokens.")
@click.option("--max-in", type=int, default=768, show_default=True, help="Longest prompt.")
@click.option("--max-out", type=int, default=512, show_default=True, help="Most output tokens.")
@click.option("--rate", type=float, default=None, help="Requests a second; without it all arrive at once.")
@click.option("--vocab-size", type=int, default=49152, show_default=True, help="The model's vocabulary.")
@click.option("--out", default="-", show_default=True, help='File to write; "-" is standard output.')
def workload(
    n: int,
    seed: int,
    mean_in: float,
    mean_out: float,
    max_in: int,
    max_out: int,
    rate: float | None,
    vocab_size: int,
    out: str,
) -> None:
    """Make N requests with log-normal lengths, one JSON object a line, the same each time.

    A prompt is random token ids. `minivllm bench --requests FILE` runs them.
    """
    from minivllm.lab.workload import make_workload, write_workload

    requests = make_workload(n, seed, mean_in, mean_out, max_in, max_out, rate, vocab_size)
    if out == "-":
        write_workload(sys.stdout, requests)
    else:
        try:
            write_workload(Path(out), requests)
        except (OSError, ValueError) as error:
            reason = (isinstance(error, OSError) and error.strerror) or str(error)
            raise click.ClickException(
                f"{out} cannot be written: {reason}. Give --out a file in a folder that exists and has room."
            ) from error
    num_in = sum(len(r.prompt_token_ids or ()) for r in requests)
    num_out = sum(r.max_tokens for r in requests)
    click.echo(f"{n} requests, {num_in:,} prompt tokens, {num_out:,} output tokens", err=True)
