"""Above the chapters: the command line. A command's code is loaded when it runs."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import click

from minivllm import __version__
from minivllm.errors import MinivllmError

_COMMANDS = ("pull", "generate", "ladder", "doctor")


class _Commands(click.Group):
    """Commands by name, each in the module of its name, and the project's errors as messages."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        return getattr(import_module(f"minivllm.cli.{cmd_name}"), cmd_name)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except MinivllmError as error:
            raise click.ClickException(str(error)) from error


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def main() -> None:
    """A small engine that serves language models, built one idea at a time."""
