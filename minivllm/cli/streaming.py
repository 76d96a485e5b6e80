"""Above the chapters: text on the screen while it comes, and how fast it came."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING

import click

from minivllm.cli.options import download_bar

if TYPE_CHECKING:
    from minivllm.llm import LLM
    from minivllm.outputs import RequestOutput


def fetch(model: str) -> None:
    """See that the model is on disk, with a bar while it is downloaded."""
    from minivllm.model.hub import resolve

    with download_bar() as progress:
        resolve(model, progress=progress)


def show(
    pieces: Generator[str, None, RequestOutput], note: Callable[[str], None] = lambda piece: None
) -> RequestOutput:
    """Print the pieces of a stream as they come, and end the line; returns the stream's output.

    note is called with each piece that was printed.
    """
    while True:
        try:
            piece = next(pieces)
        except StopIteration as end:
            click.echo()
            return end.value
        click.echo(piece, nl=False)
        note(piece)


def speed(output: RequestOutput) -> str:
    """How many tokens there were, how fast they came, and whether the answer was cut off."""
    metrics, answer = output.metrics, output.outputs[0]
    words = f"{len(output.prompt_token_ids)} prompt tokens, {len(answer.token_ids)} generated"
    if metrics.ttft is not None:
        words += f", the first after {metrics.ttft:.2f} s"
    if metrics.tpot:
        words += f", then {1 / metrics.tpot:.1f} tokens/s"
    return f"{words}; cut off at the most tokens allowed" if answer.finish_reason == "length" else words


def where(llm: LLM) -> str:
    """Dtype and device of the model."""
    model = llm.engine.model
    return f"{str(model.dtype).removeprefix('torch.')}, {model.device}"
