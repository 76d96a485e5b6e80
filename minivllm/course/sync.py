"""Above the chapters: what in the book is made: quoted code and outputs, bibliography, interview index.

    <!-- code: minivllm/memory/blocks.py#BlockPool.allocate -->     a class, function or constant
    <!-- output: notebooks/ch03_paging.ipynb#block-sizes -->        what a named cell printed when it ran
    <!-- cell: notebooks/ch03_paging.ipynb#loop -->                 the code of a named cell

The fence below such a line is filled. So a chapter reads the same as plain Markdown and on the site, and what
it quotes is what runs. book/references.md is made from references.bib, book/interview.md from the chapters.

    python -m minivllm.course.sync [--root FOLDER]
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from minivllm.course.interview import interview_markdown
from minivllm.course.references import references_markdown
from minivllm.errors import InvalidOption, MinivllmError

MARK = re.compile(r"^<!-- (?P<kind>code|output|cell): (?P<path>[^#\s]+)#(?P<name>\S+) -->$", re.MULTILINE)
FENCE = re.compile(r"\n(?P<open>```[a-z]+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


def sync(root: Path) -> Iterator[tuple[Path, str]]:
    """(page of root/book, what is to stand in it), for all of them. Changes nothing."""
    book = root / "book"
    made = {book / "interview.md": interview_markdown(root)}
    if (bibliography := book / "references.bib").exists():
        made[book / "references.md"] = references_markdown(bibliography.read_text(encoding="utf-8"))
    for path in sorted(set(book.glob("*.md")) - made.keys()):
        yield path, filled(path.read_text(encoding="utf-8"), root, path.name)
    yield from made.items()


def filled(text: str, root: Path, where: str) -> str:
    """A chapter's text with its fences filled. Raises InvalidOption, with the line, where one cannot be."""
    parts, at = [], 0
    for mark in MARK.finditer(text):
        line = f"{where}, line {text.count(chr(10), 0, mark.start()) + 1}"
        fence = FENCE.match(text, mark.end())
        if fence is None:
            raise InvalidOption(f"{line}: below {mark[0]} there must be a fence, such as ```python and ```.")
        quote = {"code": code, "output": output, "cell": cell}[mark["kind"]]
        try:
            quoted = quote(root / mark["path"], mark["name"])
        except (InvalidOption, OSError, SyntaxError) as error:
            raise InvalidOption(f"{line}: {mark[0]} cannot be filled: {error}") from None
        parts += [text[at : fence.start("text")], quoted + "\n"]
        at = fence.end("text")
    return "".join([*parts, text[at:]])


def code(path: Path, symbol: str) -> str:
    """The source of a class, function, method or constant, without its indentation. Raises InvalidOption."""
    source = path.read_text(encoding="utf-8")
    node: ast.AST = ast.parse(source)
    for name in symbol.split("."):
        found = [child for child in getattr(node, "body", []) if name in _names(child)]
        if not found:
            raise InvalidOption(f"{path.name} has no {symbol}.")
        node = found[-1]
    assert isinstance(node, ast.stmt)
    first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
    return textwrap.dedent("\n".join(source.splitlines()[first - 1 : node.end_lineno]))


def _names(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def cell(path: Path, name: str) -> str:
    """The code of the cell of this name. Raises InvalidOption."""
    return str(_named(path, name).source).removeprefix(f"# [{name}]\n")


def output(path: Path, name: str) -> str:
    """What the cell of this name printed, below its name, as the text refers to it. Raises InvalidOption."""
    text = "".join(out.text for out in _named(path, name).outputs if out.output_type == "stream")
    if not text.strip():
        raise InvalidOption(f"the cell {name} of {path.name} prints nothing; run make notebooks.")
    return "\n".join([f"[{name}]", *map(str.rstrip, text.strip("\n").splitlines())])


def _named(path: Path, name: str) -> Any:
    import nbformat

    nb = nbformat.read(path, as_version=4)
    cells = {cell.metadata.get("minivllm", {}).get("name"): cell for cell in nb.cells}
    if name not in cells:
        raise InvalidOption(f"{path.name} has no cell {name}; there are {', '.join(filter(None, cells))}.")
    return cells[name]


@click.command()
@click.option("--root", type=click.Path(path_type=Path, exists=True, file_okay=False), default=".")
def main(root: Path) -> None:
    """Fill the fences of the chapters, and make the pages that are made from others."""
    try:
        for path, text in list(sync(root)):
            if not path.exists() or text != path.read_text(encoding="utf-8"):
                path.write_text(text, encoding="utf-8")
                click.echo(f"{path}: written")
    except MinivllmError as error:
        raise click.ClickException(str(error)) from None


if __name__ == "__main__":
    main()
