"""Above the chapters: a reader's notebook: its code cells, and which to run for which exercise.

A reader may add, move, split and delete cells. A cell keeps its kind and name in its metadata (see
`notebook.py`); a check cell that has lost them is known by its text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minivllm.errors import MinivllmError


class DamagedNotebook(MinivllmError, ValueError):
    """A file is no notebook any more."""


@dataclass(frozen=True)
class CodeCell:
    """A code cell: its text; its kind: "exercise", "check", or "code" for all others; whose it is."""

    source: str
    kind: str = "code"
    exercise: str | None = None


@dataclass(frozen=True)
class Step:
    """A cell to be run. A check is always the course's own; remark: what became of the reader's copy of it;
    gone: whether there is no cell for the answer any more, "" where there is one."""

    cell: CodeCell
    remark: str = ""
    gone: str = ""


def read_cells(path: Path) -> list[CodeCell]:
    """The code cells of a notebook, in order. Raises DamagedNotebook, OSError."""
    try:
        return [_cell(found) for found in _cells(path) if found.get("cell_type") == "code"]
    except (ValueError, RecursionError, AttributeError, TypeError) as error:
        raise DamagedNotebook(f"{path.name} is no notebook any more: {error}.") from error


def _cells(path: Path) -> list[dict[str, Any]]:
    text = path.read_text(encoding="utf-8-sig")
    if not text.strip():
        raise ValueError("the file is empty")
    found = json.loads(text)
    if not isinstance(found, dict) or not isinstance(found.get("cells"), list):
        raise ValueError("the file is JSON, but has no list of cells")
    return found["cells"]


def _cell(found: dict[str, Any]) -> CodeCell:
    source = found.get("source", "")
    text = source if isinstance(source, str) else "".join(source)
    about = (found.get("metadata") or {}).get("minivllm")
    if not isinstance(about, dict) or about.get("kind") not in ("exercise", "check"):
        return CodeCell(text)
    return CodeCell(text, about["kind"], str(about.get("name")))


def plan(
    mine: Sequence[CodeCell], handed_out: Sequence[CodeCell], wanted: Sequence[str], whole: bool
) -> list[Step]:
    """What to run for the exercises `wanted`, in order: the reader's cells, with the course's own checks.

    A check comes after the last cell that belongs to its exercise, else at the end. whole: run the cells of
    all exercises; else those of the wanted ones, and cells of no exercise.
    """
    checks = {str(c.exercise): c for c in handed_out if c.kind == "check" and c.exercise in wanted}
    known = {
        _plain(c.source): CodeCell(c.source, "check", c.exercise) for c in handed_out if c.kind == "check"
    }
    cells = [known.get(_plain(cell.source), cell) for cell in mine]
    last = {cell.exercise: place for place, cell in enumerate(cells)}
    steps = []
    for place, cell in enumerate(cells):
        if cell.kind == "code" or (cell.kind == "exercise" and (whole or cell.exercise in checks)):
            steps.append(Step(cell))
        if cell.exercise in checks and last[cell.exercise] == place:
            steps.append(_check(checks[cell.exercise], cells))
    return steps + [_check(check, cells) for name, check in checks.items() if name not in last]


def _check(check: CodeCell, cells: Sequence[CodeCell]) -> Step:
    own = [cell for cell in cells if cell.exercise == check.exercise]
    texts = [_plain(cell.source) for cell in own if cell.kind == "check"]
    became = "was changed" if texts else "is gone"
    remark = f"The check cell of {check.exercise} {became}; the course's own ran in its place."
    gone = f"The cell of exercise {check.exercise} is gone."
    return Step(
        check,
        "" if _plain(check.source) in texts else remark,
        "" if any(cell.kind == "exercise" for cell in own) else gone,
    )


def _plain(source: str) -> str:
    return "\n".join(line.rstrip() for line in source.strip().splitlines())
