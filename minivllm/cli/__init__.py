"""Above the chapters: the command line. A command's code is loaded when it runs."""

from __future__ import annotations

import errno
import sys
from importlib import import_module
from io import TextIOWrapper
from typing import Any

import click

from minivllm import __version__
from minivllm.errors import MinivllmError

_COMMANDS = ("pull", "generate", "chat", "ladder", "workload", "bench", "doctor", "course")


class _Commands(click.Group):
    """Commands by name, each in the module of its name, and the project's errors as messages."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        return getattr(import_module(f"minivllm.cli.{cmd_name}"), cmd_name)

    def invoke(self, ctx: click.Context) -> Any:
        for stream, errors in (
            (sys.stdout, "replace"),
            (sys.stderr, "replace"),
            (sys.stdin, "surrogateescape"),
        ):
            if isinstance(stream, TextIOWrapper):
                stream.reconfigure(
                    errors=errors
                )  # "?" where it must; a byte that is no text is refused later
        try:
            return super().invoke(ctx)
        except MinivllmError as error:
            raise click.ClickException(str(error)) from error
        except OSError as error:
            if error.errno == errno.EPIPE:  # click ends quietly when nobody reads on
                raise
            raise click.ClickException(str(error)) from error


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def main() -> None:
    """A small engine that serves language models, built one idea at a time."""
