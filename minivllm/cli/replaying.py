"""Above the chapters: what `bench` and `workload` share: a file or trace taken as requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from minivllm.lab.replay import FORMATS, Replay, ReplayOptions


def replay_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--format, --speedup and --scale-lengths."""
    for option in (
        click.option(
            "--scale-lengths",
            type=float,
            default=None,
            metavar="F",
            help="Trace: multiply every length by F.",
        ),
        click.option("--speedup", type=float, default=None, metavar="F", help="Divide arrival times by F."),
        click.option(
            "--format",
            type=click.Choice(FORMATS),
            default="auto",
            show_default=True,
            help="Of the file; azure and mooncake are traces. auto looks at its first line.",
        ),
    ):
        command = option(command)
    return command


def describe_replay(path: str, format: str, replay: Replay, options: ReplayOptions) -> str:
    """One line: what was taken of the file, and all that was left out or changed."""
    taken, found = len(replay.requests), replay.num_in_file
    said = [f"{taken:,} of {found:,} requests" if taken < found else f"{taken:,} requests"]
    for count, what in (
        (replay.prompts_cut, f"prompts cut to {options.max_in} tokens"),
        (replay.outputs_cut, f"outputs cut to {options.max_out} tokens"),
        (replay.lengths_raised, "lengths raised from 0 to 1"),
    ):
        if count:
            said.append(f"{count:,} {what}")
    return f"{path} ({format}): {', '.join(said)}"
