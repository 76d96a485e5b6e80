"""Above the chapters: what the commands that measure curves share: options, progress, the file, the picture.

A curve is a list of rows, one for each point. The file is written anew after every point, so a run that is
interrupted keeps what it has; the picture is drawn from the file's contents alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from minivllm.cli.options import download_bar, model_options
from minivllm.errors import InvalidOption
from minivllm.lab.workload import write_whole

if TYPE_CHECKING:
    from minivllm.model.decoder import Decoder
    from minivllm.model.tokenizer import Tokenizer

QUICK_MODEL = "random:tiny-llama"


def curve_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--out, --quick, --attention, --model, --dtype and --device."""
    for option in (
        click.option("--attention", default=None, help="Kernels of paged attention: torch, c, triton, ..."),
        model_options,
        click.option("--quick", is_flag=True, help=f"In miniature, with {QUICK_MODEL}: times say little."),
        click.option(
            "--out",
            required=True,
            type=click.Path(file_okay=False, path_type=Path),
            help="The folder for results and picture.",
        ),
    ):
        command = option(command)
    return command


def in_miniature(chosen: Mapping[str, Any], small: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the command that runs, with small values for those that nobody set."""
    source = click.get_current_context().get_parameter_source
    unset = (ParameterSource.DEFAULT, ParameterSource.DEFAULT_MAP)
    return {name: small[name] if name in small and source(name) in unset else v for name, v in chosen.items()}


def whole_numbers(text: str, option: str) -> list[int]:
    """[64, 128] of "64,128". Raises click.BadParameter for what is no whole number from 1 on, or stands
    there twice."""
    parts = [part.strip() for part in text.split(",")]
    found = [int(part) for part in parts if part.isdecimal() and int(part) >= 1]
    if len(found) < len(parts) or len(set(found)) < len(found):
        raise click.BadParameter(
            f"{text!r} is not possible: give whole numbers from 1 on, each once, with commas between them.",
            param_hint=option,
        )
    return found


def load_model(model: str, dtype: str = "auto", device: str = "auto") -> tuple[Decoder, Tokenizer]:
    """The model and its tokenizer, loaded once for all points."""
    from minivllm.model import loader
    from minivllm.model.hub import resolve
    from minivllm.model.tokenizer import load_tokenizer

    with download_bar() as progress:
        source = resolve(model, progress=progress)
    return loader.load_model(source, dtype=dtype, device=device), load_tokenizer(source)


def about(decoder: Decoder, model: str) -> dict[str, Any]:
    """What a measurement must say of itself: model, dtype, device, versions, date."""
    from minivllm.lab import ladder

    return dict(ladder.about(decoder, model))


class Results:
    """The file NAME.json in a folder, and NAME.png beside it. `found` is what the file holds.

    Raises InvalidOption where they cannot be written.
    """

    def __init__(self, folder: Path, name: str, found: dict[str, Any]):
        self.path, self.found = folder / f"{name}.json", found
        self._begin = time.monotonic()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.write()  # where that cannot be, now is the time to say so
            if (picture := self.path.with_suffix(".png")).is_dir():
                raise IsADirectoryError(f"{picture} is a folder")
        except OSError as error:
            raise InvalidOption(
                f"--out {folder} is not possible: {name}.json and .png cannot be written there ({error}). "
                "Name a folder that may be written to, or that may be made."
            ) from error

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._begin

    def add(self, curve: str, row: Mapping[str, Any]) -> None:
        """One more point of a curve."""
        self.found.setdefault(curve, []).append(dict(row))
        self.write()

    def write(self) -> None:
        """Write all that is known so far. Raises OSError."""
        from minivllm.lab.gpu_check.check import as_text

        self.found["seconds"] = self.elapsed
        write_whole(self.path, as_text(self.found))

    def say(self, line: str) -> None:
        """A line of progress on standard error, with the time since the start."""
        click.echo(f"[{self.elapsed:6.1f} s] {line}", err=True)

    def draw(self, function: str) -> None:
        """The picture, by a function of `draw_curves`; without matplotlib there is none, and that is said."""
        try:
            figure = getattr(import_module("minivllm.lab.draw_curves"), function)(self.found)
        except InvalidOption as error:
            self.say(f"no picture: {error}")
            return
        figure.savefig(self.path.with_suffix(".png"), dpi=160)
