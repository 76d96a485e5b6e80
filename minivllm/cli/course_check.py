"""Above the chapters: `minivllm course check`: is an answer right, and if not, what is wrong with it?"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from minivllm.cli.course_files import progress_of, shown

if TYPE_CHECKING:
    from minivllm.course.clone import Clone
    from minivllm.course.manifest import Chapter
    from minivllm.course.marking import Verdict


@click.command()
@click.argument("which", required=False, metavar="[N | N.M]")
@click.option(
    "--limit",
    type=click.IntRange(1),
    default=120,
    show_default=True,
    metavar="SECONDS",
    help="The longest that one cell may run.",
)
def check(which: str | None, limit: int) -> None:
    """Run your notebooks and say what is solved.

    That is exercise N.M, chapter N, or without either all chapters that you have started. Save in JupyterLab
    first. A fresh Python runs the notebooks in my/ and leaves them as they are; for one exercise it runs its
    own cells, and those of no exercise. Ends with 1 when something is not solved.
    """
    from minivllm.course.clone import find_clone
    from minivllm.errors import MinivllmError

    clone = find_clone()
    chosen = _chosen(clone, which)
    all_solved = True
    for chapter, wanted in chosen:
        try:
            all_solved &= _check_chapter(clone, chapter, wanted, limit)
        except (MinivllmError, OSError) as error:
            if len(chosen) == 1:
                raise
            click.echo(f"Error: {error}", err=True)  # the other chapters can be checked all the same
            all_solved = False
    if not all_solved:
        raise click.exceptions.Exit(1)


def _chosen(clone: Clone, which: str | None) -> list[tuple[Chapter, list[str]]]:
    """The chapters to check, and which of their exercises. Raises MinivllmError."""
    from minivllm.course.clone import chapter_numbered
    from minivllm.course.manifest import chapters, exercise

    if which is None:
        started = [c for c in chapters() if os.path.lexists(clone.mine(c))]
        if not started:
            raise click.ClickException(
                "There is nothing to check yet. `minivllm course start` begins a chapter."
            )
        return [(c, [e.id for e in c.exercises]) for c in started]
    if which.isdecimal():
        chapter = chapter_numbered(int(which))
        wanted = [e.id for e in chapter.exercises]
    else:
        wanted = [exercise(which).id]
        chapter = next(c for c in chapters() if wanted[0] in {e.id for e in c.exercises})
    if not clone.started(chapter):
        raise click.ClickException(
            f"{shown(clone.mine(chapter))} is not there. `minivllm course start {chapter.number}` makes it."
        )
    return [(chapter, wanted)]


def _check_chapter(clone: Clone, chapter: Chapter, wanted: Sequence[str], limit: int) -> bool:
    """Check, say and note; returns whether all that was wanted is solved."""
    from rich.console import Console

    from minivllm.course.marking import Trouble, Unchecked, mark
    from minivllm.course.work import plan

    mine, handed_out = _read(clone, chapter)
    whole = len(wanted) == len(chapter.exercises)
    steps = plan(mine, handed_out, wanted, whole)
    progress = progress_of(clone)
    titles = {e.id: e.title for e in chapter.exercises}
    console = Console(stderr=True)
    click.echo(f"Chapter {chapter.number}, {chapter.title}: {shown(clone.mine(chapter))}")
    results: dict[str, bool] = {}
    unchecked: set[str] = set()
    with console.status("starting Python") as status:
        for found in mark(steps, clone.my, limit, report=lambda what: status.update(f"running {what}")):
            status.stop()  # or its line would stand before what is said
            if isinstance(found, Trouble):
                _say("", f"A cell of no exercise failed. {found.message}")
            elif isinstance(found, Unchecked):
                unchecked.add(found.exercise)
                why = "not checked: it needs a name from the cell that failed."
                _say(f"{found.exercise} {titles[found.exercise]}: ", f"{why} What was noted of it stays.")
            else:
                progress.tried(found.exercise, found.solved)
                results[found.exercise] = found.solved
                _print(found, titles[found.exercise], shown(clone.exercises(chapter)), whole)
            status.start()
    for name in wanted:
        if name not in results and name not in unchecked:
            _say(f"{name} {titles[name]}: ", f"{shown(clone.exercises(chapter))} has no check for it.")
    num_solved = sum(results.values())
    click.echo(f"{num_solved} of {len(wanted)} solved.")
    failed = next((name for name in wanted if not results.get(name)), None)
    if failed is not None:
        click.echo(f"Stuck? `minivllm course hint {failed}`.")
    return failed is None


def _read(clone: Clone, chapter: Chapter) -> tuple[Any, Any]:
    """The cells of the reader's notebook and of the one that is handed out. Raises MinivllmError."""
    from minivllm.course.work import DamagedNotebook, read_cells

    path, original = clone.mine(chapter), clone.exercises(chapter)
    clone.started(chapter)  # it may be what cannot be read, or has no end
    try:
        mine = read_cells(path)
    except DamagedNotebook as error:
        raise DamagedNotebook(
            f"{shown(path)} cannot be read. {error} An older copy may lie in my/.ipynb_checkpoints. Or move "
            f"the file away: `minivllm course start {chapter.number}` then makes a new one."
        ) from error
    try:
        return mine, read_cells(original)
    except (DamagedNotebook, FileNotFoundError) as error:
        raise DamagedNotebook(
            f"{shown(original)}, which has the checks, is not there or damaged. `git checkout "
            f"exercises/{original.name}` brings it back."
        ) from error


def _print(verdict: Verdict, title: str, original: str, whole: bool) -> None:
    head = f"{verdict.exercise} {title}: "
    if verdict.solved:
        _say(head, "solved", "green")
    else:
        _say(head, "not solved yet", "yellow")
        _say("", verdict.message, indent=6)
        if "NameError" in verdict.message and not whole:
            _say(
                "",
                "Only its own cells ran, and those of no exercise. Is the name in another's cell?",
                indent=6,
            )
    if verdict.remark:
        back = f"To get it back, open {original} in JupyterLab and copy the whole cell."
        _say("", f"{verdict.remark} {back}", indent=6)


def _say(head: str, text: str, colour: str | None = None, indent: int = 2) -> None:
    """One finding. A long message is wrapped in a terminal only, by the terminal."""
    for number, line in enumerate(text.splitlines() or [""]):
        said = click.style(line, fg=colour) if colour else line
        click.echo(" " * indent + (head if number == 0 else "") + said)
