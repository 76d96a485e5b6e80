"""Above the chapters: the course around the engine: exercises, their checks, and the reader's progress."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minivllm.course.checking import CheckFailed as CheckFailed
    from minivllm.course.checking import ExerciseUnsolved as ExerciseUnsolved
    from minivllm.course.checking import check as check
    from minivllm.course.checking import unsolved as unsolved
    from minivllm.course.using import use as use

_HOME = {
    "CheckFailed": "minivllm.course.checking",
    "ExerciseUnsolved": "minivllm.course.checking",
    "check": "minivllm.course.checking",
    "unsolved": "minivllm.course.checking",
    "use": "minivllm.course.using",
}
__all__ = ["CheckFailed", "ExerciseUnsolved", "check", "unsolved", "use"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'minivllm.course' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
