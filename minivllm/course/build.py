"""Above the chapters: the exercise notebooks and their solutions, built from one source.

solutions/ch03_paging.py  ->  solutions/ch03_paging.ipynb   with the answers, taken from the package
                          ->  exercises/ch03_paging.ipynb   with stubs in their place

python -m minivllm.course.build [FOLDER]
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import click

from minivllm.course.answers import answer_source, stub_source
from minivllm.course.manifest import Exercise, exercise
from minivllm.course.notebook import Cell, notebook, parse
from minivllm.errors import InvalidOption

PLACE = re.compile(r"^(?P<indent> *)\.\.\.$", re.MULTILINE)


def build(root: Path) -> Iterator[Path]:
    """Build both notebooks of every source in root/solutions; yields their paths."""
    import nbformat

    for source in sorted(root.glob("solutions/ch*.py")):
        for folder, make in (("solutions", answer_source), ("exercises", stub_source)):
            path = root / folder / f"{source.stem}.ipynb"
            text = nbformat.writes(notebook(cells(source.read_text(encoding="utf-8"), make))) + "\n"
            path.parent.mkdir(exist_ok=True)
            if not path.exists() or path.read_text(encoding="utf-8") != text:
                path.write_text(text, encoding="utf-8")
            yield path


def cells(source: str, make: Callable[[Exercise], str]) -> list[Cell]:
    """The cells of a source, with what `make` gives of each exercise in the place of its `...`.

    Raises InvalidOption for an exercise without its place or its check.
    """
    found = parse(source)
    filled = [_filled(cell, make) for cell in found]
    checks = {cell.name: cell.text for cell in found if cell.kind == "check"}
    for cell in found:
        if cell.kind == "exercise" and f'course.check("{cell.name}"' not in checks.get(cell.name, ""):
            raise InvalidOption(
                f"Exercise {cell.name} has no check: it needs one cell `# %% [check {cell.name}]` with "
                f'`course.check("{cell.name}", ...)`.'
            )
    return filled


def _filled(cell: Cell, make: Callable[[Exercise], str]) -> Cell:
    if cell.kind != "exercise":
        return cell
    places = list(PLACE.finditer(cell.text))
    if len(places) != 1:
        raise InvalidOption(
            f"The cell of exercise {cell.name} has {len(places)} lines of `...`; one is needed."
        )
    place, text = places[0], make(exercise(str(cell.name)))
    filled = textwrap.indent(text, place["indent"])
    return replace(cell, text=cell.text[: place.start()] + filled + cell.text[place.end() :])


@click.command()
@click.argument("root", type=click.Path(path_type=Path, exists=True, file_okay=False), default=".")
def main(root: Path) -> None:
    """Build the notebooks of the exercises and their solutions in ROOT."""
    for path in build(root):
        click.echo(str(path))


if __name__ == "__main__":
    main()
