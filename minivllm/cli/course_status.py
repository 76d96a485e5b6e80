"""Above the chapters: `minivllm course status`: a line a chapter, and what to do next."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from minivllm.cli.course_files import progress_of, shown

if TYPE_CHECKING:
    from rich.table import Table

    from minivllm.course.clone import Clone
    from minivllm.course.manifest import Chapter, Exercise

BAR = 6  # characters


@click.command()
def status() -> None:
    """Show how far you are, and what to do next."""
    from rich.console import Console

    from minivllm.course.clone import find_clone
    from minivllm.course.manifest import chapters

    clone = find_clone()
    found = progress_of(clone).read()
    rows = [_standing(chapter, clone, found) for chapter in chapters()]
    console = Console()
    console.print(_table(rows, "#." if console.options.ascii_only else "█░"))
    console.print(f"Next: {_next_step(rows)}", markup=False, highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class _Standing:
    """How far a reader is in one chapter. there: whether the clone has exercises for it."""

    chapter: Chapter
    there: bool
    started: bool
    path: str
    unsolved: Sequence[Exercise]
    num_questions: int
    num_known: int


def _standing(chapter: Chapter, clone: Clone, found: dict[str, Any]) -> _Standing:
    from minivllm.course.quiz import entry_of, questions_of

    solved = found["exercises"]
    questions = questions_of(clone, chapter)
    return _Standing(
        chapter=chapter,
        there=clone.exercises(chapter).is_file(),
        started=os.path.lexists(clone.mine(chapter)),
        path=shown(clone.mine(chapter)),
        unsolved=[e for e in chapter.exercises if not solved.get(e.id, {}).get("solved")],
        num_questions=len(questions),
        num_known=sum(bool(entry_of(q, found["quiz"]).get("known")) for q in questions),
    )


def _table(rows: Iterable[_Standing], signs: str) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title="The course",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        caption="Exercises solved and questions known, of all there are. Level: 1 to 5.",
    )
    table.add_column("", justify="right")
    table.add_column("chapter")
    table.add_column("exercises", no_wrap=True)
    table.add_column("questions", no_wrap=True)
    table.add_column("min", justify="right", no_wrap=True)
    table.add_column("level", justify="right", no_wrap=True)
    table.add_column("a GPU adds", style="dim")
    for row in rows:
        chapter, count = row.chapter, len(row.chapter.exercises)
        table.add_row(
            str(chapter.number),
            Text(chapter.title),
            bar(count - len(row.unsolved), count, signs),
            bar(row.num_known, row.num_questions, signs),
            str(chapter.minutes),
            str(chapter.difficulty),
            Text(chapter.gpu),
        )
    return table


def bar(done: int, count: int, signs: str = "█░") -> str:
    """A bar and its numbers: ███░░░ 1/2; empty only at 0, full only at the end; "-" where count is 0."""
    if count == 0:
        return "-"
    full = BAR if done >= count else min(max(round(BAR * done / count), done > 0), BAR - 1)
    return f"{signs[0] * full}{signs[1] * (BAR - full)} {done}/{count}"


def _next_step(rows: Sequence[_Standing]) -> str:
    for row in rows:
        n = row.chapter.number
        if row.started and row.unsolved:
            e = row.unsolved[0]
            return f"exercise {e.id}, {e.title}, in {row.path}; then `minivllm course check {e.id}`."
        if row.started and row.num_known < row.num_questions:
            return f"the questions of chapter {n}: `minivllm course quiz {n}`."
        if row.there and not row.started:
            return f"chapter {n}, {row.chapter.title}: `minivllm course start {n}`."
    if any(row.started for row in rows):
        return "nothing; you have solved and known all that is there."
    return "nothing yet: this clone has no exercises. `python -m minivllm.course.build` makes them."
