"""Above the chapters: what the course consists of: chapters, their exercises, and what answers each.

It stands in `manifest.toml`, so that the command line, the builder and the tests read one list.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import reduce
from importlib import import_module
from importlib.resources import files
from typing import Any

from minivllm.errors import InvalidOption


@dataclass(frozen=True)
class Exercise:
    """One exercise: an id such as "3.2", the symbol of the package that answers it, three hints in steps."""

    id: str
    title: str
    answer: str
    hints: tuple[str, str, str]


@dataclass(frozen=True)
class Chapter:
    """One chapter. minutes: for text, notebook and exercises; difficulty: 1 to 5; prerequisites: numbers of
    chapters; gpu: what a GPU adds to it."""

    number: int
    slug: str
    title: str
    minutes: int
    prerequisites: tuple[int, ...]
    difficulty: int
    gpu: str
    exercises: tuple[Exercise, ...]

    @property
    def name(self) -> str:
        """The stem of its files: ch03_paging."""
        return f"ch{self.number:02d}_{self.slug.replace('-', '_')}"


def chapters() -> tuple[Chapter, ...]:
    """All chapters, in order."""
    text = files("minivllm.course").joinpath("manifest.toml").read_text(encoding="utf-8")
    return tuple(_chapter(entry) for entry in tomllib.loads(text)["chapter"])


def _chapter(entry: dict[str, Any]) -> Chapter:
    exercises = tuple(Exercise(**{**e, "hints": tuple(e["hints"])}) for e in entry.pop("exercise", []))
    return Chapter(**{**entry, "prerequisites": tuple(entry["prerequisites"])}, exercises=exercises)


def exercise(exercise_id: str) -> Exercise:
    """The exercise of this id. Raises InvalidOption."""
    known = {e.id: e for chapter in chapters() for e in chapter.exercises}
    if exercise_id not in known:
        raise InvalidOption(f"There is no exercise {exercise_id!r}; there are {', '.join(known)}.")
    return known[exercise_id]


def resolve(symbol: str) -> tuple[Any, str, Any]:
    """What a dotted name stands for: (its owner, a module or class; its name there; itself)."""
    parts = symbol.split(".")
    for end in range(len(parts) - 1, 0, -1):
        try:
            owner = reduce(getattr, parts[end:-1], import_module(".".join(parts[:end])))
        except ModuleNotFoundError:
            continue
        return owner, parts[-1], getattr(owner, parts[-1])
    raise InvalidOption(f"{symbol} is no name in this package.")
