"""Above the chapters: are the checks strict enough? Mutants of every answer must be refused.

    python -m minivllm.course.gate [3.2 ...]

Each mutant runs in a child process that can be killed: one that hangs is refused too. A mutant that is right
after all (an equivalent one) is listed with a reason in the EQUIVALENT of its chapter's checks.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from random import Random
from typing import Any

import click

from minivllm.course.answers import answer_source
from minivllm.course.checking import check
from minivllm.course.manifest import Exercise, chapters, exercise, resolve
from minivllm.course.mutants import mutants
from minivllm.errors import MinivllmError

SECONDS = 2.0  # that a mutant has
PATIENCE = 60.0  # that the answer itself has
SHARE = 0.95  # of the mutants that are not equivalent


class CheckTooSlow(MinivllmError):
    """A check refuses, or does not finish, the right answer."""


@dataclass(frozen=True)
class Verdict:
    """What a check said of one mutant."""

    change: str
    refused: bool


def gate(e: Exercise, sample: int | None = None, seed: int = 0) -> Iterator[Verdict]:
    """Run the mutants of an exercise's answer, or a seeded sample of them.

    First the answer itself is checked, which raises CheckTooSlow where it does not pass: a refusal would then
    say nothing. On a busy machine a mutant has three times as long as that took.
    """
    began = time.monotonic()
    if not passes(e, answer_source(e), PATIENCE):
        raise CheckTooSlow(
            f"The check of exercise {e.id} does not take the package's own answer within {PATIENCE} s here."
        )
    seconds = max(SECONDS, 3 * (time.monotonic() - began))
    equivalent = equivalents(e)
    found = [m for m in mutants(answer_source(e)) if m[0] not in equivalent]
    if sample is not None and sample < len(found):
        found = Random(f"{seed} {e.id}").sample(found, sample)
    for change, source in found:
        yield Verdict(change, refused=not passes(e, source, seconds))


def equivalents(e: Exercise) -> dict[str, str]:
    """What was changed -> why the changed answer is as right as the first."""
    module = import_module(f"minivllm.course.checks.ch{int(e.id.split('.')[0]):02d}")
    listed: dict[tuple[str, str], str] = module.EQUIVALENT
    return {change: why for (exercise_id, change), why in listed.items() if exercise_id == e.id}


def passes(e: Exercise, source: str, seconds: float = SECONDS) -> bool:
    """Whether the check takes this source for an answer, within so many seconds."""
    context: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    child = context.Process(target=_run, args=(e, source))
    child.start()
    child.join(seconds)
    if child.is_alive():
        child.kill()
        child.join()
    return child.exitcode == 0


def _run(e: Exercise, source: str) -> None:
    try:
        check(e.id, built(e, source))
    except BaseException:  # whatever it is, the answer was refused
        sys.exit(1)


def built(e: Exercise, source: str) -> Any:
    """An answer made of source, as a reader would hand it in: a function, or a class with the method."""
    owner, name, original = resolve(e.answer)
    names: dict[str, Any] = dict(vars(sys.modules[original.__module__]))
    exec(source, names)
    return type("Mine", (owner,), {name: names[name]}) if isinstance(owner, type) else names[name]


def survivors(verdicts: Iterable[Verdict]) -> tuple[int, list[str]]:
    """How many mutants there were, and the changes that no check noticed."""
    all_of_them = list(verdicts)
    return len(all_of_them), [v.change for v in all_of_them if not v.refused]


@click.command()
@click.argument("ids", nargs=-1)
def main(ids: tuple[str, ...]) -> None:
    """Run all mutants of the exercises IDS, or of every exercise; ends with 1 when too many survive."""
    failed = False
    for e in [exercise(i) for i in ids] or [e for chapter in chapters() for e in chapter.exercises]:
        count, left = survivors(gate(e))
        click.echo(f"{e.id} {e.title}: {count - len(left)} of {count} mutants refused")
        for change in left:
            click.echo(f"    survived: {change}")
        failed |= count - len(left) < SHARE * count
    if failed:
        raise click.ClickException(f"A check that refuses less than {SHARE:.0%} of the mutants is too weak.")


if __name__ == "__main__":
    main()
