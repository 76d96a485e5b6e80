"""Above the chapters: what checks share: say what was expected, what came, and the mistake by its name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any

from minivllm.course.manifest import exercise
from minivllm.errors import MinivllmError


class ExerciseUnsolved(MinivllmError, NotImplementedError):
    """A stub was called: the exercise has not been answered yet."""


class CheckFailed(MinivllmError, AssertionError):
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
    if type(got) is type(expected) and got == expected:
        return
    message = f"{what}: expected {expected!r}, got {got!r}."
    for mistake, would_give in (mistakes or {}).items():
        if any(got == wrong for wrong in would_give):
            message += f" It looks as if {mistake}."
            break
    raise CheckFailed(message)


def refuses(what: str, error: type[Exception], call: Callable[..., Any], *arguments: Any) -> None:
    """Raises CheckFailed unless the call raises this error."""
    try:
        got = call(*arguments)
    except error:
        return
    raise CheckFailed(f"{what}: expected {error.__name__}, got {got!r}. What cannot be done must be refused.")
