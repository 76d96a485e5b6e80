"""Above the chapters: run the lab notebooks and store what they show, in a form that stays.

    python -m minivllm.course.run [--root FOLDER] [ch03_paging ...]

notebooks/ch03_paging.py  ->  notebooks/ch03_paging.ipynb            with outputs
                          ->  book/figures/ch03_paging-NAME.png      each named figure, for the text

Stored again, a notebook differs only in what was measured: counts are in order, nothing tells of folders, and
what a static page cannot show is left out. A cell that fails or warns stops the run, and its notebook stays
as it was.
"""

from __future__ import annotations

import base64
import os
import re
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from minivllm.course.notebook import notebook, parse
from minivllm.errors import InvalidOption, MinivllmError
from minivllm.model.hub import cache_home

CELL_SECONDS = 600
PNG_BYTES = 150_000
KEPT = (
    "text/plain",
    "image/png",
)  # of all that a cell may show; the rest needs a running kernel or a network
ADDRESS = re.compile(r"\bat 0x[0-9a-f]{6,}")


class NotebookFailed(MinivllmError):
    """A cell failed, or showed what must not be stored."""


def run_notebooks(root: Path, names: Sequence[str] = ()) -> Iterator[Path]:
    """Run every source in root/notebooks, or those named; yields each notebook once it is stored."""
    import nbformat

    sources = {path.stem: path for path in sorted(root.glob("notebooks/ch*.py"))}
    unknown = [name for name in names if name not in sources]
    if unknown:
        raise InvalidOption(f"There is no notebook {', '.join(unknown)}; there are {', '.join(sources)}.")
    for name in names or sources:
        ran = executed(sources[name].read_text(encoding="utf-8"), root, name)
        figures = root / "book" / "figures"
        figures.mkdir(parents=True, exist_ok=True)
        for old in figures.glob(f"{name}-*.png"):
            old.unlink()
        for cell in ran.cells:
            about = cell.metadata.get("minivllm", {})
            if about.get("kind") == "figure":
                (figures / f"{name}-{about['name']}.png").write_bytes(png_of(cell))
        path = sources[name].with_suffix(".ipynb")
        path.write_text(nbformat.writes(ran) + "\n", encoding="utf-8")
        yield path


def executed(source: str, root: Path, name: str) -> Any:
    """The notebook of a source, run in root/notebooks, in its stable form. Raises NotebookFailed."""
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    nb = notebook(parse(source))
    client = NotebookClient(
        nb,
        timeout=CELL_SECONDS,
        kernel_name="python3",
        resources={"metadata": {"path": str(root / "notebooks")}},
        record_timing=False,
    )
    try:
        client.execute()
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        raise NotebookFailed(f"{name}: {error}") from None
    return stable(nb, name, forbidden_names(root))


def forbidden_names(root: Path) -> tuple[str, ...]:
    """What no output may name: folders of this machine, and the machine."""
    python = (sys.prefix, sys.base_prefix, sys.exec_prefix)
    folders = [root.resolve(), Path.home(), *map(Path, python), Path(tempfile.gettempdir()), cache_home()]
    paths = dict.fromkeys(str(folder) for folder in folders if len(folder.parts) > 1)
    host = socket.gethostname()
    return (*paths, *([host] if len(host) > 3 else []))


def stable(nb: Any, name: str, forbidden: Sequence[str]) -> Any:
    """A notebook that has run, in the form in which it is stored. Raises NotebookFailed."""
    count = 0
    nb.metadata.pop("widgets", None)
    nb.metadata.language_info = {"name": "python"}
    for cell in nb.cells:
        if cell.cell_type != "code":
            continue
        count += 1
        cell.execution_count = count
        widget = cell.metadata.get("minivllm", {}).get("kind") == "widget"
        where = f"{name}, cell {count} ({cell.source.splitlines()[0][:60]!r})"
        cell.outputs = _joined(_stored(output, where) for output in ([] if widget else cell.outputs))
        if cell.metadata.get("minivllm", {}).get("kind") == "compare" and not cell.outputs:
            raise NotebookFailed(f"{where} is to be compared, and shows nothing.")
        for output in cell.outputs:
            if "execution_count" in output:
                output.execution_count = count
            _refuse_what_does_not_last(output, where, forbidden)
        if cell.metadata.get("minivllm", {}).get("kind") == "figure":
            _check_figure(cell, where)
    return nb


def _stored(output: Any, where: str) -> Any:
    if output.output_type == "stream" and output.name == "stderr":
        raise NotebookFailed(
            f"{where} writes to stderr: {output.text.strip()[:300]!r}. Mend what it warns of."
        )
    if "data" in output:
        output.data = {kind: value for kind, value in output.data.items() if kind in KEPT}
        if "image/png" in output.data:
            output.data["text/plain"] = "<Figure>"
        output.metadata = {}
    return output


def _joined(outputs: Any) -> list[Any]:
    """Neighbouring pieces of printed text as one: where they were cut is chance."""
    joined: list[Any] = []
    for output in outputs:
        if output.output_type == "stream" and joined and joined[-1].output_type == "stream":
            joined[-1].text += output.text
        elif output.output_type == "stream" or output.get("data"):
            joined.append(output)
    return joined


def _refuse_what_does_not_last(output: Any, where: str, forbidden: Sequence[str]) -> None:
    text = output.get("text") or output.get("data", {}).get("text/plain", "")
    for name in forbidden:
        if os.sep in name and name in text:
            raise NotebookFailed(f"{where} shows the path {name}, which other machines do not have.")
        if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text):
            raise NotebookFailed(f"{where} shows {name}, the name of this machine.")
    if ADDRESS.search(text):
        raise NotebookFailed(f"{where} shows an address in memory: {ADDRESS.search(text)[0]!r}.")  # type: ignore[index]


def _check_figure(cell: Any, where: str) -> None:
    images = [output for output in cell.outputs if "image/png" in output.get("data", {})]
    if len(images) != 1:
        raise NotebookFailed(f"{where} shows {len(images)} figures; a figure cell ends with one.")
    size = len(png_of(cell))
    if size > PNG_BYTES:
        raise NotebookFailed(f"{where}: its picture has {size:,} bytes; at most {PNG_BYTES:,} are stored.")


def png_of(cell: Any) -> bytes:
    """The picture of a figure cell that has run."""
    for output in cell.outputs:
        if "image/png" in output.get("data", {}):
            return base64.b64decode(output.data["image/png"])
    raise NotebookFailed(f"The cell {cell.source.splitlines()[0][:60]!r} shows no picture.")


@click.command()
@click.argument("names", nargs=-1)
@click.option("--root", type=click.Path(path_type=Path, exists=True, file_okay=False), default=".")
def main(names: tuple[str, ...], root: Path) -> None:
    """Run the lab notebooks NAMES, or all, and store them with their outputs."""
    try:
        for path in run_notebooks(root, names):
            click.echo(str(path))
    except MinivllmError as error:
        raise click.ClickException(str(error)) from None


if __name__ == "__main__":
    main()
