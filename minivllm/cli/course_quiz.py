"""Above the chapters: `minivllm course quiz`: the interview questions, and which of them the reader knows."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from minivllm.cli.course_files import progress_of, shown

if TYPE_CHECKING:
    from minivllm.course.progress import Progress
    from minivllm.course.quiz import Question


@click.command()
@click.argument("chapter", type=int, required=False, metavar="[N]")
def quiz(chapter: int | None) -> None:
    """Ask the interview questions.

    Those of chapter N, or without it those of all chapters. Answer aloud, then press Enter: you see the
    book's 30-second answer and the common wrong one, and say whether you knew it: y, n, or q to stop. What
    you did not know is asked first the next time.
    """
    from minivllm.course.clone import chapter_numbered, find_clone
    from minivllm.course.manifest import chapters
    from minivllm.course.quiz import in_order, questions_of

    clone = find_clone()
    chosen = chapters() if chapter is None else (chapter_numbered(chapter),)
    found = [question for c in chosen for question in questions_of(clone, c)]
    if not found:
        where = shown(clone.text(chosen[0])) if chapter is not None else shown(clone.root / "book")
        raise click.ClickException(
            f"There are no questions in {where}: no section `## Interview walkthrough`."
        )
    clone.make_my()
    progress = progress_of(clone)
    asked = _ask_all(in_order(found, progress.read()["quiz"]), progress)
    num_known = sum(asked)
    click.echo(f"{len(asked)} of {len(found)} asked, {num_known} known.", nl=False)
    click.echo(" The others come first the next time." if num_known < len(asked) else "")


def _ask_all(questions: Sequence[Question], progress: Progress) -> list[bool]:
    """Ask one after the other, until all are asked or the reader stops; which were known."""
    asked: list[bool] = []
    try:
        for number, question in enumerate(questions, 1):
            known = _ask(question, f"Question {number} of {len(questions)}, chapter {question.chapter}")
            if known is None:
                break
            progress.answered(question.chapter, question.text, known)
            asked.append(known)
    except KeyboardInterrupt:  # while an answer was shown
        click.echo()
    return asked


def _ask(question: Question, head: str) -> bool | None:
    """Whether the reader knew it; None to stop."""
    from rich.console import Console
    from rich.markdown import Markdown

    console = Console()
    console.print(f"\n{head}", style="dim", markup=False, highlight=False)
    console.print(Markdown(f"**{question.text}**"))
    said = _line("[Enter shows the answer, q stops] ")
    if said is None or said.lower() in ("q", "quit"):
        return None
    console.print(Markdown(question.answer))
    if question.wrong:
        console.print()
        console.print(Markdown(f"*The common wrong answer.* {question.wrong}"))
    while (said := _line("[Did you know it? y, n, q] ")) is not None:
        match said.lower():
            case "y" | "yes":
                return True
            case "n" | "no":
                return False
            case "q" | "quit":
                return None
        click.echo("y for yes, n for no, q to stop.")
    return None


def _line(prompt: str) -> str | None:
    """A line from the reader; None at the end of the input, or for Ctrl-C."""
    click.echo(prompt, nl=False)
    try:
        line = sys.stdin.readline() if sys.stdin is not None else ""
    except KeyboardInterrupt:
        line = ""
    if not line.endswith("\n") or sys.stdin is None or not sys.stdin.isatty():
        click.echo()  # where no Enter of the reader's has ended the line
    return line.strip() if line else None
