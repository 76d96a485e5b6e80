"""Above the chapters: `minivllm course`: the exercises and questions, and how far a reader has come."""

from __future__ import annotations

import os
from pathlib import Path

import click

from minivllm.cli.course_check import check
from minivllm.cli.course_files import progress_of, shown
from minivllm.cli.course_quiz import quiz
from minivllm.cli.course_status import status


@click.group(invoke_without_command=True)
@click.pass_context
def course(ctx: click.Context) -> None:
    """The book's exercises and questions, and how far you have come. Alone, it shows that: `course status`.

    \b
    minivllm course start      copy the next chapter's exercises into my/
    minivllm course check 3.2  is my answer right?
    minivllm course hint 3.2   one hint more
    minivllm course quiz 3     the interview questions of chapter 3

    Your work and your progress are files in my/, in the folder of the clone; git leaves them alone.
    """
    if ctx.invoked_subcommand is None:
        ctx.invoke(status)


@click.command()
@click.argument("chapter", type=int, required=False, metavar="[N]")
def start(chapter: int | None) -> None:
    """Copy the exercises of a chapter into my/.

    Without N this is the first chapter that you have not started. What is there already is left as it is.
    """
    from minivllm.course.clone import chapter_numbered, find_clone
    from minivllm.course.manifest import chapters

    clone = find_clone()
    if chapter is not None:
        chosen = chapter_numbered(chapter)
    else:
        there = [c for c in chapters() if clone.exercises(c).is_file()]
        waiting = [c for c in there if not os.path.lexists(clone.mine(c))]
        if not there:
            raise click.ClickException(f"There are no exercises in {clone.root / 'exercises'}.")
        if not waiting:
            click.echo("You have started every chapter that has exercises. `minivllm course` shows them all.")
            return
        chosen = waiting[0]
    new, path = clone.start(chosen), shown(clone.mine(chosen))
    if new:
        click.echo(
            f"{path} is yours: chapter {chosen.number}, {chosen.title}, about {chosen.minutes} minutes."
        )
        if chosen.prerequisites:
            many = "s" * (len(chosen.prerequisites) > 1)
            click.echo(f"It builds on chapter{many} {', '.join(map(str, chosen.prerequisites))}.")
    else:
        entries = progress_of(clone).read()["exercises"]
        solved = [e.id for e in chosen.exercises if entries.get(e.id, {}).get("solved")]
        click.echo(
            f"{path} is there already and was left as it is; {len(solved)} of {len(chosen.exercises)} "
            "exercises solved. To begin anew, move it away first."
        )
    first = chosen.exercises[0].id if chosen.exercises else f"{chosen.number}.1"
    click.echo(
        f"\nOpen it        make lab          (or: jupyter lab {path})\n"
        f"Check answers  minivllm course check {chosen.number}\n"
        f"Get a hint     minivllm course hint {first}"
    )


@click.command()
@click.argument("exercise_id", metavar="N.M")
def hint(exercise_id: str) -> None:
    """Show one more hint for exercise N.M.

    There are three, and each says more than the one before.
    """
    from minivllm.course.clone import find_clone
    from minivllm.course.manifest import exercise

    clone, e = find_clone(), exercise(exercise_id)
    clone.make_my()
    count = len(e.hints)
    seen = progress_of(clone).next_hint(e.id, count)
    click.echo(f"Exercise {e.id}, {e.title}")
    for number, text in enumerate(e.hints[: seen + 1], 1):
        new = number == seen + 1
        click.echo(f"{'' if new else '(seen) '}Hint {number} of {count}: {text}")
    if seen + 1 >= count:
        click.echo(f"There are no more. The answer: `minivllm course solution {e.id}`.")


@click.command()
@click.argument("exercise_id", metavar="N.M")
@click.option("--yes", is_flag=True, help="Show it although you have not tried yet.")
def solution(exercise_id: str, yes: bool) -> None:
    """Show the answer to exercise N.M.

    It is the code of this package. First try yourself: `minivllm course check N.M` has to have run once.
    """
    import inspect

    from minivllm.course.answers import answer_source
    from minivllm.course.clone import find_clone
    from minivllm.course.manifest import chapters, exercise, resolve

    clone, e = find_clone(), exercise(exercise_id)
    if not yes and progress_of(clone).exercise(e.id)["tries"] == 0:
        raise click.ClickException(
            f"Try first: `minivllm course check {e.id}` checks your answer, `minivllm course hint {e.id}` "
            "helps. With --yes you see the answer at once."
        )
    function = resolve(e.answer)[2]
    lines, first = inspect.getsourcelines(function)
    path = Path(inspect.getsourcefile(function) or "")
    click.echo(f"Exercise {e.id}, {e.title}: `{e.answer}`")
    click.echo(f"{shown(path)}, lines {first} to {first + len(lines) - 1}:\n")
    click.echo(answer_source(e))
    chapter = next(c for c in chapters() if e in c.exercises)
    if clone.solutions(chapter).is_file():
        click.echo(f"\nThe whole notebook, solved: {shown(clone.solutions(chapter))}")


for _command in (status, start, check, hint, solution, quiz):
    course.add_command(_command)
