"""Above the chapters: what is wrong with a stored notebook that running it does not show.

nbval compares a cell's output only where a marker says so, and passes over a marker that it does not know:
one with a trailing word, in other letters, or behind code. So a test that was meant can be none. Such cells
are found here by reading.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from typing import Any

from minivllm.course.notebook import MAGIC
from minivllm.course.run import KEPT

COMPARED, RAISES = "nbval-check-output", ("raises-exception", "nbval-raises-exception")
TAGS = (COMPARED, *RAISES)  # nbval-skip and nbval-ignore-output are not allowed: they switch a test off
LIKE_A_MARKER = re.compile(r"nbval|pytest.validate|raises.exception", re.IGNORECASE)


def problems(nb: Any) -> Iterator[str]:
    """Each thing that is wrong, with the cell where it stands."""
    if "widgets" in nb.metadata:
        yield "The notebook stores the state of widgets, which is blank on a page."
    count = 0
    for number, cell in enumerate(nb.cells):
        if cell.cell_type != "code":
            continue
        count += 1
        begins = cell.source.split("\n")[0][:50]
        for problem in _problems_of_a_cell(cell, count):
            yield f"Cell {number} ({begins!r}): {problem}"


def _problems_of_a_cell(cell: Any, count: int) -> Iterator[str]:
    tags = cell.metadata.get("tags", [])
    if not isinstance(tags, list):
        yield f"its tags are no list: {tags!r}."
        tags = []
    for tag in tags:
        if LIKE_A_MARKER.search(str(tag)) and tag not in TAGS:
            yield f"the tag {tag!r} means nothing to nbval, or switches it off; known are {', '.join(TAGS)}."
    if cell.metadata.get("minivllm", {}).get("kind") == "compare" and COMPARED not in tags:
        yield f"it is of kind compare, and without the tag {COMPARED} nothing compares it."
    for comment in _comments(cell.source):
        if LIKE_A_MARKER.search(comment):
            yield f"the comment {comment!r} looks like a marker; markers are tags of the cell's metadata."
    magic = _no_python(cell.source)
    if magic is not None:
        yield f"{magic!r} is no Python; a magic may skip the rest of its cell, and only {MAGIC} is allowed."
    outputs = cell.get("outputs", [])
    errors = [output for output in outputs if output.output_type == "error"]
    if COMPARED in tags and not outputs:
        yield "its output is to be compared, and none is stored."
    if any(tag in tags for tag in RAISES) and not errors:
        yield "it is marked as raising, and no error is stored."
    if errors and not any(tag in tags for tag in RAISES):
        yield f"it stores the error {errors[0].ename}, and is not marked as raising."
    if any(output.get("name") == "stderr" for output in outputs):
        yield "it stores what was written to stderr."
    if outputs and cell.execution_count != count:
        yield f"its execution count is {cell.execution_count}; run in order it would be {count}."
    for kind in dict.fromkeys(kind for output in outputs for kind in output.get("data", {})):
        if kind not in KEPT:
            yield f"it stores {kind}; of what a cell shows, only {' and '.join(KEPT)} are stored."
    for output in outputs:
        if "image/png" in output.get("data", {}) and not (
            cell.metadata.get("mystnb", {}).get("image", {}).get("alt")
        ):
            yield "its picture has no text for those who cannot see it (metadata mystnb.image.alt)."


def _comments(source: str) -> Iterator[str]:
    """The comments of a cell, and its lines that look like one: nbval does not ask whether it is a string."""
    lines = [line.strip() for line in source.splitlines()]
    found = dict.fromkeys(line for line in lines if line.startswith("#"))
    try:
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT:
                found[token.string.strip()] = None
    except (tokenize.TokenError, SyntaxError):
        pass  # a cell with another magic: that is said elsewhere
    yield from found


def _no_python(source: str) -> str | None:
    """The line at which a cell is no Python, but for the one magic that is allowed; None: it is Python."""
    lines = ["" if line == MAGIC else line for line in source.split("\n")]
    try:
        ast.parse("\n".join(lines))
    except SyntaxError as error:
        return lines[min(error.lineno or 1, len(lines)) - 1].strip()
    except ValueError:  # a lone surrogate
        return lines[0].strip()
    return None
