"""Above the chapters: what checks share: say what was expected, what came, and the mistake by its name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any

from minivllm.course.manifest import exercise
from minivllm.errors import MinivllmError


class _Said(MinivllmError):
    """An error whose message says everything: a notebook shows it without the lines of the check."""

    def _render_traceback_(self) -> list[str]:  # IPython asks for this
        return [f"{type(self).__name__}: {self}"]


class ExerciseUnsolved(_Said, NotImplementedError):
    """A stub was called: the exercise has not been answered yet."""


class CheckFailed(_Said, AssertionError):
    """An answer is not right yet: the message says what was expected and what came."""


def unsolved(exercise_id: str) -> ExerciseUnsolved:
    """What a stub raises: the exercise's name and its first hint."""
    e = exercise(exercise_id)
    return ExerciseUnsolved(f"Exercise {e.id}, {e.title}, is not solved yet. A first hint: {e.hints[0]}")


def check(exercise_id: str, answer: Any) -> str:
    """Check an answer, a function or a class with the method; returns a word of praise.

    Raises CheckFailed, ExerciseUnsolved, or what the answer itself raises.
    """
    e = exercise(exercise_id)
    chapter, number = e.id.split(".")
    module = import_module(f"minivllm.course.checks.ch{int(chapter):02d}")
    getattr(module, f"check_{chapter}_{number}")(answer)
    return f"Exercise {e.id}, {e.title}: right."


def expect(what: str, got: Any, expected: Any, mistakes: Mapping[str, Iterable[Any]] | None = None) -> None:
    """Raises CheckFailed unless got is expected. mistakes: name of a mistake -> what it would have given."""
    equal = _equal(got, expected)
    if equal and type(got) is type(expected):
        return
    message = f"{what}: expected {expected!r}, got {got!r}."
    if equal:
        wanted, came = type(expected).__name__, type(got).__name__
        raise CheckFailed(f"{message} The value is right, its type is not: {wanted} is wanted, not {came}.")
    for mistake, would_give in (mistakes or {}).items():
        if any(_equal(got, wrong) for wrong in would_give):
            message += f" It looks as if {mistake}."
            break
    raise CheckFailed(message)


def _equal(a: Any, b: Any) -> bool:
    """Whether two values are equal, a list and a tuple by what is in them. What cannot be compared is not."""
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        a, b = list(a), list(b)
    try:
        equal = a == b
    except Exception:  # arrays compare item by item, and a list of them asks for one truth
        return False
    return isinstance(equal, bool) and equal


def refuses(what: str, error: type[Exception], call: Callable[..., Any], *arguments: Any) -> None:
    """Raises CheckFailed unless the call raises this error; a stub's ExerciseUnsolved passes through."""
    try:
        got = call(*arguments)
    except _Said:
        raise
    except error:
        return
    except Exception as other:
        came = f"{type(other).__name__}: {other}"
        raise CheckFailed(f"{what}: expected {error.__name__}, got {came}.") from other
    raise CheckFailed(f"{what}: expected {error.__name__}, got {got!r}. What cannot be done must be refused.")
