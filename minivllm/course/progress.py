"""Above the chapters: what a reader has solved, seen and known, kept in `my/progress.json`.

{"version": 1,
 "exercises": {"3.2": {"tries": 4, "solved": true, "hints": 1}},
 "quiz": {"3": {"Why blocks?": {"asked": 2, "known": true}}}}

It is written whole or not at all, and one process at a time reads and writes it back. Keys that are not
known here are kept. A file that cannot be read is set aside under another name, never written over.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from minivllm.errors import MinivllmError
from minivllm.lab.workload import write_whole

VERSION = 1
PATIENCE = 10  # seconds to wait for another command that writes
FIELDS = {"tries": int, "solved": bool, "hints": int, "asked": int, "known": bool}


class NewerProgress(MinivllmError, ValueError):
    """The file was written by a later version of this program; it is left as it is."""


class Progress:
    """The reader's progress in a folder, which need not be there yet. tell: hears of a file set aside."""

    def __init__(self, folder: Path, tell: Callable[[str], None] = lambda _: None) -> None:
        self.path = folder / "progress.json"
        self._tell = tell

    def read(self) -> dict[str, Any]:
        """All that is known: version, exercises, quiz. Raises NewerProgress, OSError."""
        if not self.path.exists():
            return _empty()
        try:
            return _parse(self.path.read_bytes())
        except (ValueError, RecursionError) as error:
            if isinstance(error, NewerProgress):
                raise
        with self._locked():
            return self._read_or_set_aside()

    @contextmanager
    def change(self) -> Iterator[dict[str, Any]]:
        """What is known, to be changed in place; written at the end unless an exception ends the block."""
        self.path.parent.mkdir(exist_ok=True)
        with self._locked():
            found = self._read_or_set_aside()
            yield found
            write_whole(self.path, json.dumps(found, indent=1) + "\n")

    def exercise(self, exercise_id: str) -> dict[str, Any]:
        """tries, solved and hints of one exercise."""
        return {"tries": 0, "solved": False, "hints": 0, **self.read()["exercises"].get(exercise_id, {})}

    def tried(self, exercise_id: str, solved: bool) -> None:
        """Note that a check ran."""
        with self.change() as found:
            entry = found["exercises"].setdefault(exercise_id, {})
            entry["tries"] = entry.get("tries", 0) + 1
            entry["solved"] = solved

    def next_hint(self, exercise_id: str, count: int) -> int:
        """Note that one more of `count` hints was shown; returns how many had been before."""
        with self.change() as found:
            entry = found["exercises"].setdefault(exercise_id, {})
            seen = min(entry.get("hints", 0), count)
            entry["hints"] = min(seen + 1, count)
        return seen

    def answered(self, chapter: int, question: str, known: bool) -> None:
        """Note whether the reader knew the answer to a question."""
        with self.change() as found:
            entry = found["quiz"].setdefault(str(chapter), {}).setdefault(question, {})
            entry["asked"] = entry.get("asked", 0) + 1
            entry["known"] = known

    @contextmanager
    def _locked(self) -> Iterator[None]:
        from filelock import FileLock, Timeout

        try:
            with FileLock(self.path.with_name(".progress.lock"), timeout=PATIENCE):
                yield
        except Timeout as error:
            raise MinivllmError(
                f"Another command has held {self.path} for {PATIENCE} s. Let it end, then try again."
            ) from error

    def _read_or_set_aside(self) -> dict[str, Any]:
        try:
            return _parse(self.path.read_bytes())
        except FileNotFoundError:
            return _empty()
        except NewerProgress:
            raise
        except (ValueError, RecursionError) as error:
            number = 1
            while (aside := self.path.with_name(f"progress.damaged-{number}.json")).exists():
                number += 1
            self.path.rename(aside)
            self._tell(
                f"{self.path.name} could not be read ({error}). It is kept as {aside.name}; this begins anew."
            )
            return _empty()


def _empty() -> dict[str, Any]:
    return {"version": VERSION, "exercises": {}, "quiz": {}}


def _parse(data: bytes) -> dict[str, Any]:
    """Raises ValueError (also as JSON's and UTF-8's), RecursionError, NewerProgress."""
    found = json.loads(data.decode("utf-8-sig"))
    if not isinstance(found, dict) or type(found.get("version")) is not int or found["version"] < 1:
        raise ValueError("it has no version")
    if found["version"] > VERSION:
        raise NewerProgress(
            f"my/progress.json has version {found['version']}, and this program knows {VERSION}. "
            "Bring your clone up to date, or move the file away to start anew; nothing was changed."
        )
    found = {**found, "exercises": found.get("exercises", {}), "quiz": found.get("quiz", {})}
    _check(found["exercises"], "exercises")
    if not isinstance(found["quiz"], dict):
        raise ValueError("quiz is no object")
    for chapter, entries in found["quiz"].items():
        _check(entries, f"quiz of chapter {chapter}")
    return found


def _check(entries: Any, what: str) -> None:
    if not isinstance(entries, dict):
        raise ValueError(f"{what}: no object")
    for name, entry in entries.items():
        if not isinstance(entry, dict):
            raise ValueError(f"{what}, {name}: no object")
        for key, kind in FIELDS.items():
            if key in entry and (type(entry[key]) is not kind or entry[key] < 0):
                raise ValueError(f"{what}, {name}: {key} is {entry[key]!r}")
