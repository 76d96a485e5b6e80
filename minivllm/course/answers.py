"""Above the chapters: the answer of an exercise and its stub, both taken from the package itself.

So book, solution and engine cannot drift apart: there is one text of each.
"""

from __future__ import annotations

import ast
import inspect
import textwrap

from minivllm.course.manifest import Exercise, resolve
from minivllm.errors import InvalidOption


def answer_source(exercise: Exercise) -> str:
    """The function that answers an exercise, as it stands in the package, without indentation."""
    _, _, function = resolve(exercise.answer)
    return textwrap.dedent(inspect.getsource(function)).rstrip()


def stub_source(exercise: Exercise) -> str:
    """The same with its signature and docstring only; called, it raises ExerciseUnsolved."""
    source = answer_source(exercise)
    function = ast.parse(source).body[0]
    if not isinstance(function, ast.FunctionDef):
        raise InvalidOption(f"{exercise.answer} is no function, so it is no answer.")
    has_docstring = ast.get_docstring(function) is not None
    keep = function.body[0].end_lineno if has_docstring else function.body[0].lineno - 1
    head = source.splitlines()[:keep]
    indent = " " * function.body[0].col_offset
    return "\n".join([*head, f'{indent}raise course.unsolved("{exercise.id}")'])
