"""Above the chapters: one page that leads to every question and every claim of the interview walkthroughs.

It is made from the chapters, so it lists what they have: `make sync` writes book/interview.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from minivllm.course.manifest import Chapter, chapters
from minivllm.course.quiz import questions

HEAD = """# Interview index

Every question that a chapter answers, and every claim that it checks. Each leads to the place where reason
and number stand. `minivllm course quiz` asks the questions in the terminal.
"""
CLAIMS = "### Claims, checked"


def interview_markdown(root: Path) -> str:
    """The page, from the chapters in root/book."""
    texts = [(chapter, root / "book" / f"{chapter.name}.md") for chapter in chapters()]
    read = [(chapter, path.read_text(encoding="utf-8")) for chapter, path in texts if path.is_file()]
    lines = [HEAD, "## Questions", ""]
    for chapter, text in read:
        lines += [f"**Chapter {chapter.number}, [{chapter.title}]({chapter.name}.md)**", ""]
        found = questions(text, chapter.number)
        lines += [f"- [{q.text}]({chapter.name}.md#{anchor(q.text)})" for q in found] + [""]
    lines += ["## Claims", "", "| the claim as people say it | verdict | chapter |", "|---|---|---|"]
    lines += [row for chapter, text in read for row in _claims(chapter, text)]
    return "\n".join(lines) + "\n"


def anchor(heading: str) -> str:
    """The fragment that GitHub and MyST give a heading: lower case, without signs, `-` for a space."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def _claims(chapter: Chapter, text: str) -> Iterator[str]:
    """Rows of the table: claim, verdict, where."""
    table = text.partition(CLAIMS)[2].partition("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("|")][2:]
    for row in rows:
        claim, verdict = (cell.strip() for cell in row.strip("|").split("|")[:2])
        yield f"| {claim} | {verdict} | [{chapter.number}]({chapter.name}.md#claims-checked) |"
