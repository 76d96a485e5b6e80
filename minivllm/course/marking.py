"""Above the chapters: run a reader's notebook and say of each exercise whether it is solved, and if not, why.

A cell that hangs or ends the kernel costs its own exercise only: the others go on in a new kernel.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from minivllm.course.kernel import EMPTY, Failure, Kernel, Place
from minivllm.course.work import Step

SECONDS = 120  # a cell may take; the first loads the model
SPOKEN = ("CheckFailed", "ExerciseUnsolved")  # errors whose message says everything
LONGEST = 1500  # characters of a message


@dataclass(frozen=True)
class Verdict:
    """What came out for one exercise. message: why it is not solved. remark: on cells changed or gone."""

    exercise: str
    solved: bool
    message: str = ""
    remark: str = ""


@dataclass(frozen=True)
class Unchecked:
    """Nothing can be said of an exercise: it misses a name, and a cell of no exercise had failed."""

    exercise: str


@dataclass(frozen=True)
class Trouble:
    """A cell that belongs to no exercise failed; what comes after it may have failed just for that."""

    message: str


def mark(
    steps: Sequence[Step],
    folder: Path,
    seconds: int = SECONDS,
    report: Callable[[str], None] = lambda _: None,
) -> Iterator[Verdict | Unchecked | Trouble]:
    """Run a plan in `folder`; yields what is known as soon as it is known. report: hears what runs now.

    Raises KernelNotStarted.
    """
    due = {str(step.cell.exercise) for step in steps if step.cell.kind == "check"}
    fatal: set[int] = set()  # places of cells that made a kernel useless: the next one passes over them
    told: set[int] = set()  # places of cells whose failure has been said
    broken_off = False  # whether a cell of no exercise failed: the names that it makes may be missing
    while due:
        with Kernel(folder, seconds) as kernel:
            for place, step in enumerate(steps):
                name = step.cell.exercise
                if place in fatal or (step.cell.kind == "check" and name not in due):
                    continue
                report(f"exercise {name}" if name else f"cell {place + 1} of {len(steps)}")
                failure = kernel.run(step.cell.source)
                if name is None and failure is not None and place not in told:
                    yield Trouble(explain(failure, step, seconds))
                elif name in due and (failure is not None or step.cell.kind == "check"):
                    due.discard(name)
                    how = (failure.kind, failure.name) if failure is not None else None
                    missing = broken_off and how == ("error", "NameError")
                    yield Unchecked(str(name)) if missing else _verdict(failure, step, seconds)
                if failure is not None:
                    told.add(place)
                    broken_off |= name is None
                if failure is not None and failure.kind != "error":
                    fatal.add(place)
                    break
                if not due:
                    break


def _verdict(failure: Failure | None, step: Step, seconds: int) -> Verdict:
    name = str(step.cell.exercise)
    if failure is None:
        return Verdict(name, True, remark=step.remark)
    remarks = [step.remark, step.gone]
    return Verdict(name, False, explain(failure, step, seconds), " ".join(filter(None, remarks)))


def explain(failure: Failure, step: Step, seconds: int) -> str:
    """What a reader is told of a cell that failed, in a line or two."""
    at = _where(failure.places[-1], step) if failure.places else _cell(step)
    if failure.kind == "timeout":
        return (
            f"It ran for more than {seconds} s and was stopped, {at}. Is there a loop that does not end? "
            "If it only needs longer, give it longer with --limit."
        )
    if failure.kind == "died":
        return f"Python itself ended, {_cell(step)}: by exit(), a crash, or because the memory was full."
    if failure.name in SPOKEN:  # the verdict itself says that it is not solved
        not_solved = f"Exercise {step.cell.exercise}, "
        said = (
            failure.message.partition(" is not solved yet. ")[2] if failure.name == "ExerciseUnsolved" else ""
        )
        return _short(said if said and failure.message.startswith(not_solved) else failure.message, LONGEST)
    said = re.sub(r" \(\S+, line \d+\)$", "", failure.message.split("\n")[0])  # that file is the kernel's own
    if said == "incomplete input":  # what IPython makes of a bracket or a string that is not closed
        said, at = _incomplete(step, said, at)
    return f"{failure.name}{': ' if said else ''}{_short(said, 300)}, {at}."


def _incomplete(step: Step, said: str, at: str) -> tuple[str, str]:
    """What Python itself says of such a cell, and where. A cell with magics is no Python: as it was."""
    if re.search(r"^\s*[%!]", step.cell.source, re.MULTILINE):
        return said, at
    try:
        ast.parse(step.cell.source)
    except SyntaxError as error:
        return error.msg, _where(Place(error.lineno or 1, (error.text or "").strip()), step)
    return said, at


def _where(place: Place, step: Step) -> str:
    text = f": `{_short(place.text, 100)}`" if place.text else ""
    if place.file is not None:
        return f"in line {place.line} of {place.file}{text}"
    if place.source is None or _text(place.source) == _text(step.cell.source):
        return f"in line {place.line} of {_whose(step)}{text}"
    return f"in line {place.line} of the cell that begins `{_first_line(place.source)}`{text}"


def _cell(step: Step) -> str:
    return f"in {_whose(step)}"


def _whose(step: Step) -> str:
    if step.cell.kind == "check":
        return "its check"
    if step.cell.kind == "exercise":
        return "its cell"
    return f"the cell that begins `{_first_line(step.cell.source)}`"


def _first_line(source: str) -> str:
    return _short(_text(source).split("\n")[0].strip(), 60)


def _text(source: str) -> str:
    return source.replace(EMPTY, "").strip()


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."
