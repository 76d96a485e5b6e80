"""Above the chapters: what the commands of `minivllm course` share: progress, and paths to show."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from minivllm.course.clone import Clone
    from minivllm.course.progress import Progress


def progress_of(clone: Clone) -> Progress:
    """The reader's progress in a clone; a damaged file that it sets aside is said on standard error."""
    from minivllm.course.progress import Progress

    return Progress(clone.my, tell=lambda text: click.echo(f"Note: {text}", err=True))


def shown(path: Path) -> str:
    """A path as one would type it: from the current folder where it lies below, else in full."""
    try:
        return str(path.relative_to(os.getcwd()))
    except (ValueError, OSError):
        return str(path)
