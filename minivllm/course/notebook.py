"""Above the chapters: notebooks from percent cells, the same bytes each time.

A source is a Python file cut into cells by lines that begin with `# %%`; what stands in brackets after
that is the cell's kind, and its name:

    # %% [markdown]            the lines below, without their leading `# `
    # %%                       code
    # %% [code NAME]           code whose output the text of the chapter quotes
    # %% [compare NAME]        the same; its output is text, and the same on every machine: tests compare it
    # %% [figure NAME]         code that ends with a figure; it begins with what a reader who cannot see it
    #| alt: is told            is told, on as many lines as that takes, each with `#|`
    # %% [widget]              code that shows a widget, which is blank on a page: its output is not stored
    # %% [exercise 3.1]        code in which a line of `...` stands for the answer
    # %% [check 3.1]           code that raises until the answer is right

The line `# %matplotlib inline`, alone, becomes that magic; there are no others.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from minivllm.errors import InvalidOption

LIKE_A_CELL = re.compile(r"\s*#\s*%%")
CELL = re.compile(r"# %%(?: \[(?P<kind>[a-z]+)(?: (?P<name>[a-z0-9.-]+))?\])?")
MAGIC = "%matplotlib inline"
# kind -> what its name must look like; None: it has none
KINDS = {
    "markdown": None,
    "code": r"([a-z][a-z0-9-]*)?",
    "compare": r"[a-z][a-z0-9-]*",
    "figure": r"[a-z][a-z0-9-]*",
    "widget": None,
    "exercise": r"\d+\.\d+",
    "check": r"\d+\.\d+",
}

QUOTED = ("code", "compare", "figure")  # their names are shown, as the text refers to them


@dataclass(frozen=True)
class Cell:
    """One cell: its kind (of KINDS), its text, its name (an exercise's id), a figure's text for those who
    cannot see it."""

    kind: str
    text: str
    name: str | None = None
    alt: str | None = None


def parse(source: str) -> list[Cell]:
    """The cells of a source, in order. Raises InvalidOption, with the line, for what is no cell."""
    cells: list[Cell] = []
    lines: list[str] = []
    head: re.Match[str] | None = None
    begun = 1
    for number, line in enumerate([*source.split("\n"), "# %%"], start=1):
        if not LIKE_A_CELL.match(line):
            lines.append(line)
            continue
        if head is None and any(text.strip() for text in lines):
            raise InvalidOption("Line 1 stands before the first cell; begin the file with `# %%`.")
        if head is not None:
            cells.append(_cell(head, lines))
            if not cells[-1].text.strip() and cells[-1].kind not in ("markdown", "code"):
                raise InvalidOption(
                    f"Line {begun} begins a cell of kind {cells[-1].kind} with nothing in it."
                )
        head, lines, begun = CELL.fullmatch(line.rstrip()), [], number
        if head is None or (head["kind"] or "code") not in KINDS:
            raise InvalidOption(
                f"Line {number} begins no cell: {line!r}. That takes `# %%` at the start of the line, and "
                f"one of the kinds {', '.join(KINDS)}."
            )
        if re.fullmatch(KINDS[head["kind"] or "code"] or "", head["name"] or "") is None:
            raise InvalidOption(
                f"Line {number}: {head['name']!r} is no name for a cell of this kind. Exercises and checks "
                f"need one such as 3.1, compare and figure one such as sizes; markdown and widget have none."
            )
    named = Counter((cell.kind == "check", cell.name) for cell in cells if cell.name)
    if named and named.most_common(1)[0][1] > 1:
        raise InvalidOption(f"Two cells have the name {named.most_common(1)[0][0][1]!r}; give each its own.")
    return [cell for cell in cells if cell.text]


def _cell(head: re.Match[str], lines: list[str]) -> Cell:
    kind = head["kind"] or "code"
    alt = None
    if kind == "markdown":
        lines = [re.sub(r"^# ?", "", line) for line in lines]
    else:
        lines = [MAGIC if line.rstrip() == f"# {MAGIC}" else line for line in lines]
    if kind == "figure":
        said = [line.removeprefix("#|").strip() for line in lines if line.startswith("#|")]
        alt = " ".join(said).removeprefix("alt:").strip()
        lines = [line for line in lines if not line.startswith("#|")]
        if not alt:
            raise InvalidOption(f"The figure {head['name']} needs a line `#| alt:` that says what it shows.")
    return Cell(kind, "\n".join(lines).strip("\n"), head["name"], alt)


def notebook(cells: Iterable[Cell]) -> Any:
    """A notebook of these cells without outputs; a cell's id is a digest of its content."""
    from nbformat import v4

    seen: Counter[str] = Counter()
    made = []
    for cell in cells:
        digest = hashlib.sha256(f"{cell.kind}\0{cell.text}".encode()).hexdigest()[:12]
        seen[digest] += 1
        name = digest if seen[digest] == 1 else f"{digest}-{seen[digest]}"
        new = v4.new_markdown_cell if cell.kind == "markdown" else v4.new_code_cell
        quoted = cell.name and cell.kind in QUOTED
        made.append(
            new(f"# [{cell.name}]\n{cell.text}" if quoted else cell.text, id=name, metadata=_metadata(cell))
        )
    about: dict[str, Any] = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return v4.new_notebook(cells=made, metadata=about)


def _metadata(cell: Cell) -> dict[str, Any]:
    """What nbval, MyST-NB and `minivllm course` are told of a cell."""
    if cell.kind in ("markdown", "code") and cell.name is None:
        return {}
    about: dict[str, Any] = {"minivllm": {"kind": cell.kind} | ({"name": cell.name} if cell.name else {})}
    if cell.kind == "compare":
        about["tags"] = ["nbval-check-output"]
    if cell.alt:
        about["mystnb"] = {"image": {"alt": cell.alt}}
    return about
