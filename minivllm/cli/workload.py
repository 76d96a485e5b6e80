"""Above the chapters: `minivllm workload`, which makes a file of requests for `minivllm bench`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from minivllm.cli.replaying import describe_replay, replay_options

if TYPE_CHECKING:
    from minivllm.lab.workload import WorkloadRequest


@click.command()
@click.option("--n", type=int, default=None, show_default="64, or all of a trace", help="Requests.")
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed gives the same file.")
@click.option(
    "--mean-in", type=float, default=None, show_default="160", help="Mean length of a prompt, in tokens."
)
@click.option(
    "--mean-out", type=float, default=None, show_default="128", help="Mean number of output tokens."
)
@click.option("--max-in", type=int, default=None, show_default="768; a trace: none", help="Longest prompt.")
@click.option(
    "--max-out", type=int, default=None, show_default="512; a trace: none", help="Most output tokens."
)
@click.option("--rate", type=float, default=None, help="Requests a second; without it all arrive at once.")
@click.option("--vocab-size", type=int, default=49152, show_default=True, help="The model's vocabulary.")
@click.option("--trace", default=None, help="Take arrivals and lengths from this trace instead.")
@replay_options
@click.option("--out", default="-", show_default=True, help='File to write; "-" is standard output.')
def workload(trace: str | None, out: str, **chosen: Any) -> None:
    """Make N requests with log-normal lengths, one JSON object a line, the same each time.

    A prompt is random token ids. `minivllm bench --requests FILE` runs them. With --trace, requests come when
    those of the trace did (or at --rate), and are as long, up to --max-in and --max-out.
    """
    from minivllm.lab.workload import make_workload, write_workload

    format = chosen.pop("format")
    given = {name: value for name, value in chosen.items() if value is not None}
    if trace is not None:
        requests = _from_trace(trace, format, given)
    elif format != "auto" or not given.keys().isdisjoint(("speedup", "scale_lengths")):
        raise click.ClickException("--format, --speedup and --scale-lengths need --trace FILE.")
    else:
        requests = make_workload(**{"n": 64, **given})
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
    click.echo(f"{len(requests)} requests, {num_in:,} prompt tokens, {num_out:,} output tokens", err=True)


def _from_trace(trace: str, format: str, given: dict[str, Any]) -> list[WorkloadRequest]:
    from minivllm.lab.replay import ReplayOptions, make_replay, read_request_file

    for name in ("mean_in", "mean_out"):
        if name in given:
            spelled = name.replace("_", "-")
            raise click.ClickException(f"--{spelled} does not go with --trace, which has its own lengths.")
    vocab_size = given.pop("vocab_size")
    options = ReplayOptions(**given)
    file = read_request_file(trace, format)
    replay = make_replay(file, options, vocab_size)
    click.echo(describe_replay(trace, file.format, replay, options), err=True)
    return replay.requests
