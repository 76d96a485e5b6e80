"""Above the chapters: the questions of the interview walkthroughs, read from the chapters' texts.

## Interview walkthrough
### What does a block table map?        a question: a heading with a 30-second answer below it
**In 30 seconds.** ...                  its answer
**The common wrong answer.** ...        what people say instead
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from minivllm.course.clone import Clone
from minivllm.course.manifest import Chapter

SECTION = "Interview walkthrough"
LABELS = (
    "In 30 seconds",
    "Problem",
    "Design",
    "Benefit",
    "Boundary and cost",
    "The cell",
    "Follow-ups",
    "The common wrong answer",
)
LABEL = re.compile(rf"\*\*({'|'.join(LABELS)})[.:]\*\*[.:]?\s*(.*)")
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)


@dataclass(frozen=True)
class Question:
    """A question of a chapter; answer and wrong (the common wrong answer, "" without one) are Markdown."""

    chapter: int
    text: str
    answer: str
    wrong: str


def questions(text: str, chapter: int) -> list[Question]:
    """The questions in a chapter's text, in its order; [] where it has no walkthrough."""
    found: dict[str, dict[str, list[str]]] = {}
    heading = label = None
    inside = fenced = False
    for line in COMMENT.sub("", text).splitlines():
        fenced ^= line.lstrip().startswith("```")
        title = None if fenced else re.match(r"(#{1,6})\s+(.*?)\s*#*$", line)
        if title and len(title[1]) <= 3:
            inside = (title[2] == SECTION) if len(title[1]) <= 2 else inside
            heading = _plain(title[2]) if inside and len(title[1]) == 3 else None
            label = None
        elif heading is not None:
            begun = None if fenced else LABEL.match(line)
            if begun:
                label, line = begun[1], begun[2]
            if label is not None:
                found.setdefault(heading, {}).setdefault(label, []).append(line)
    return [
        Question(chapter, name, _said(parts[LABELS[0]]), _said(parts.get(LABELS[-1], [])))
        for name, parts in found.items()
        if LABELS[0] in parts
    ]


def questions_of(clone: Clone, chapter: Chapter) -> list[Question]:
    """The questions of a chapter; [] where its text is not there."""
    path = clone.text(chapter)
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    return questions(text, chapter.number)


def _said(lines: Iterable[str]) -> str:
    return LINK.sub(r"\1", "\n".join(lines)).strip()


def _plain(title: str) -> str:
    return re.sub(r"[`*]", "", LINK.sub(r"\1", title))


def in_order(all_of_them: Iterable[Question], quiz: Mapping[str, Any]) -> list[Question]:
    """What was not known first, then what was never asked, then what was known, asked least often first.

    quiz: the part of that name in `Progress.read()`.
    """

    def rank(question: Question) -> tuple[int, int]:
        entry = entry_of(question, quiz)
        if not entry:
            return 1, 0
        return (2, entry.get("asked", 0)) if entry.get("known") else (0, 0)

    return sorted(all_of_them, key=rank)


def entry_of(question: Question, quiz: Mapping[str, Any]) -> Mapping[str, Any]:
    """What is noted of a question; {} where it was never asked."""
    return quiz.get(str(question.chapter), {}).get(question.text, {})
