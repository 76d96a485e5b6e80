"""Above the chapters: the folder of the clone: where the course's files lie, and the reader's, in `my/`.

exercises/ch03_paging.ipynb   as it is handed out       my/ch03_paging.ipynb   as the reader works on it
book/ch03_paging.md           the text                  my/progress.json       what is solved and known
"""

from __future__ import annotations

import os
import tomllib
from dataclasses import dataclass
from pathlib import Path

import minivllm
from minivllm.course.manifest import Chapter, chapters
from minivllm.errors import InvalidOption, MinivllmError


class NoClone(MinivllmError, LookupError):
    """The course's files are in no folder that was looked through, or a part of them is not there."""


@dataclass(frozen=True)
class Clone:
    """The folder of the project, by its root."""

    root: Path

    @property
    def my(self) -> Path:
        """The reader's own folder; git ignores it. It may not be there yet."""
        return self.root / "my"

    def make_my(self) -> Path:
        """The reader's own folder, made where it is not there. Raises NoClone when a file is in its place."""
        try:
            self.my.mkdir(exist_ok=True)
        except FileExistsError as error:
            raise NoClone(f"{self.my} is no folder, and your work belongs there. Move it away.") from error
        return self.my

    def exercises(self, chapter: Chapter) -> Path:
        """The chapter's exercise notebook as it is handed out."""
        return self.root / "exercises" / f"{chapter.name}.ipynb"

    def solutions(self, chapter: Chapter) -> Path:
        """The chapter's solved notebook."""
        return self.root / "solutions" / f"{chapter.name}.ipynb"

    def mine(self, chapter: Chapter) -> Path:
        """The chapter's exercise notebook as the reader works on it."""
        return self.my / f"{chapter.name}.ipynb"

    def started(self, chapter: Chapter) -> bool:
        """Whether the reader's notebook is there. Raises NoClone when no file is in its place."""
        path = self.mine(chapter)
        if os.path.lexists(path) and not path.is_file():
            raise NoClone(
                f"{path} is no file: it is a folder, a link that leads nowhere, or the like, and the "
                f"notebook of chapter {chapter.number} belongs there. Move it away."
            )
        return path.is_file()

    def text(self, chapter: Chapter) -> Path:
        """The chapter's text."""
        return self.root / "book" / f"{chapter.name}.md"

    def start(self, chapter: Chapter) -> bool:
        """Copy a chapter's exercises into `my/`; False, and nothing done, where they are there already.

        Raises NoClone when there is nothing to copy, or when no file is in its place.
        """
        source = self.exercises(chapter)
        if not source.is_file():
            raise NoClone(f"{source} is not there: this clone has no exercises for chapter {chapter.number}.")
        content = source.read_bytes()
        self.make_my()
        if self.started(chapter):
            return False
        target = self.mine(chapter)
        try:
            with target.open("xb") as file:  # "x": never onto what a reader has written
                try:
                    file.write(content)
                    file.flush()
                except OSError:
                    target.unlink()
                    raise
        except FileExistsError:
            return False
        return True


def find_clone() -> Clone:
    """The clone around the current folder, else the one that this package lies in. Raises NoClone."""
    try:
        here = Path.cwd()
        around = [here, *here.parents]
    except FileNotFoundError:  # the current folder has been removed
        around = []
    for folder in [*around, Path(minivllm.__file__).resolve().parent.parent]:
        if _is_clone(folder):
            return Clone(folder)
    raise NoClone(
        "The course's notebooks and texts are in the project's folder, and neither the current folder nor "
        "one above it is that. Clone the project, go into its folder, and try again."
    )


def _is_clone(folder: Path) -> bool:
    if not (folder / "minivllm" / "course").is_dir() and not (folder / "exercises").is_dir():
        return False
    try:
        project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8")).get("project")
    except (OSError, ValueError):
        return False
    return isinstance(project, dict) and project.get("name") == "minivllm"


def chapter_numbered(number: int) -> Chapter:
    """The chapter of this number. Raises InvalidOption."""
    known = {chapter.number: chapter for chapter in chapters()}
    if number not in known:
        raise InvalidOption(f"The course has no chapter {number}; it has {', '.join(map(str, known))}.")
    return known[number]
