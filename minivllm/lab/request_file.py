"""Above the chapters: what all files of requests have in common: how one is read, and a bad line refused.

A line is refused by its file, its number, what is wrong and what was expected.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from numbers import Real
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

from minivllm.errors import InvalidRequestFile

T = TypeVar("T")


class BadLine(ValueError):
    """What is wrong with a line, and what was expected; who reads the file adds where the line stands."""


def refuse_line(path: str | PathLike[str], number: int, error: object) -> InvalidRequestFile:
    """The error for one line of a file."""
    return InvalidRequestFile(f"{os.fspath(path)}, line {number}: {error}")


def read_bytes(path: str | PathLike[str]) -> bytes:
    """A file's contents. Raises InvalidRequestFile."""
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or str(error)
        raise InvalidRequestFile(
            f"The request file {os.fspath(path)} cannot be read: {reason}. "
            "`minivllm workload --out FILE` makes one."
        ) from error


def parse_lines(path: str | PathLike[str], data: bytes, parse: Callable[[bytes], T], keys: str) -> list[T]:
    """`parse` of each line that is not empty, in order. keys: in words, what an object on a line must have.

    Raises InvalidRequestFile for a line that `parse` refuses with BadLine, and for a file without lines.
    """
    found = []
    for number, line in enumerate(data.split(b"\n"), 1):
        if line.strip():
            try:
                found.append(parse(line))
            except BadLine as error:
                raise refuse_line(path, number, error) from error
    if not found:
        raise InvalidRequestFile(
            f"{os.fspath(path)} holds no request; expected one JSON object a line, with {keys}."
        )
    return found


def parse_object(line: bytes, keys: Sequence[str]) -> dict[str, Any]:
    """The JSON object on a line. keys: those of the format, for the message. Raises BadLine."""
    try:
        found = json.loads(decode(line), object_pairs_hook=_unique)
    except BadLine:
        raise
    except (ValueError, RecursionError) as error:
        raise BadLine(f"not JSON ({error}); expected one JSON object on the line.") from error
    if not isinstance(found, dict):
        raise BadLine(f"a JSON {type(found).__name__}; expected an object with {', '.join(keys)}.")
    return found


def decode(line: bytes) -> str:
    """The text of a line. Raises BadLine."""
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadLine(
            f"not UTF-8: byte {error.start} is {line[error.start]:#04x}; save it as UTF-8."
        ) from error


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise BadLine(
            f"a key stands there twice, among {', '.join(key for key, _ in pairs)}; expected each once."
        )
    return found


def expect(right: bool, name: str, value: Any, expected: str) -> None:
    """Raises BadLine, which shows the value as JSON, unless it is right."""
    if not right:
        shown = json.dumps(value)
        raise BadLine(f"{name} is {shown[:60] + '...' * (len(shown) > 60)}; expected {expected}.")


def is_int(value: Any) -> bool:
    """A whole number, and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """A real number, NaN and infinity among them, and not a bool."""
    return isinstance(value, Real) and not isinstance(value, bool)
