"""Above the chapters: notebooks from percent cells, the same bytes each time.

A source is a Python file cut into cells by lines that begin with `# %%`; what stands in brackets after
that is the cell's kind:

    # %% [markdown]            the lines below, without their leading `# `
    # %%                       code
    # %% [exercise 3.1]        code in which a line of `...` stands for the answer
    # %% [check 3.1]           code that raises until the answer is right
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from minivllm.errors import InvalidOption

CELL = re.compile(r"# %%(?: \[(?P<kind>[a-z]+)(?: (?P<exercise>\d+\.\d+))?\])?")
KINDS = ("code", "markdown", "exercise", "check")


@dataclass(frozen=True)
class Cell:
    """One cell: its kind (of KINDS), the exercise it belongs to, and its text."""

    kind: str
    text: str
    exercise: str | None = None


def parse(source: str) -> list[Cell]:
    """The cells of a source, in order. Raises InvalidOption, with the line, for what is no cell."""
    cells: list[Cell] = []
    lines: list[str] = []
    head: re.Match[str] | None = None
    for number, line in enumerate([*source.splitlines(), "# %%"], start=1):
        if not line.startswith("# %%"):
            lines.append(line)
            continue
        if head is None and any(text.strip() for text in lines):
            raise InvalidOption("Line 1 stands before the first cell; begin the file with `# %%`.")
        if head is not None:
            cells.append(_cell(head, lines))
        head, lines = CELL.fullmatch(line.rstrip()), []
        if head is None or (head["kind"] or "code") not in KINDS:
            raise InvalidOption(f"Line {number} begins no cell: {line!r}. Kinds are {', '.join(KINDS)}.")
        if ((head["kind"] or "") in ("exercise", "check")) != (head["exercise"] is not None):
            raise InvalidOption(
                f"Line {number} must name an exercise, such as 3.1, if and only if it is for one."
            )
    return [cell for cell in cells if cell.text]


def _cell(head: re.Match[str], lines: list[str]) -> Cell:
    kind = head["kind"] or "code"
    if kind == "markdown":
        lines = [re.sub(r"^# ?", "", line) for line in lines]
    return Cell(kind, "\n".join(lines).strip("\n"), head["exercise"])


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
        metadata = {"tags": [cell.kind]} if cell.exercise else {}
        made.append(new(cell.text, id=name, metadata=metadata))
    about: dict[str, Any] = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return v4.new_notebook(cells=made, metadata=about)
