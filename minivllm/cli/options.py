"""Above the chapters: options that several commands share, and the bar that shows a download."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click

DTYPES = ("auto", "float32", "float64", "bfloat16", "float16")


class FiniteRange(click.FloatRange):
    """A number within limits, and no NaN, which every comparison lets through."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number. Raises click.BadParameter."""
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not possible: it must be a finite number.", param, ctx)
        return number


def model_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--model, --dtype and --device."""
    for option in (
        click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N."),
        click.option(
            "--dtype", type=click.Choice(DTYPES), default="auto", show_default=True, help="Precision."
        ),
        click.option(
            "--model",
            default="smollm2-135m",
            show_default=True,
            help="smollm2-135m, a hub id, a folder, a .gguf file, or random:PRESET.",
        ),
    ):
        command = option(command)
    return command


@contextmanager
def download_bar() -> Iterator[Callable[[str, int, int | None], None]]:
    """A function for `hub.resolve(progress=...)` that draws a bar on standard error once bytes arrive."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True))
    tasks: dict[str, Any] = {}

    def report(description: str, done: int, total: int | None) -> None:
        bar.start()
        if description not in tasks:
            tasks[description] = bar.add_task(description, total=total)
        bar.update(tasks[description], completed=done, total=total)

    try:
        yield report
    finally:
        if tasks:
            bar.stop()
