"""The table of contents: a table of what exists of each chapter, and the order of pages beside it.

In book/index.md it stands where `<!-- contents -->` is, a comment that plain Markdown does not show. So no
directive is needed there, and a chapter appears as soon as its files do.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

PLACE = "<!-- contents -->"
ROOT_DOC = "book/index"
# caption -> where its pages begin
GROUPS = {
    "Chapters": "book/ch",
    "Lab notebooks": "notebooks/ch",
    "Exercises": "exercises/ch",
    "Solutions": "solutions/ch",
}
COLUMNS = {"notebooks": "lab", "exercises": "exercises", "solutions": "solutions"}
# What follows the chapters, in this order; other pages of the book come after these.
REFERENCE = ["book/interview", "book/glossary", "book/references"]


def first_heading(path: Path) -> str:
    """The text of a page's first `# ` heading: of a Markdown file, or of a notebook."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    found = re.search(r"^# +(.+?)\s*$", text, re.MULTILINE)
    return found[1] if found else path.stem


def table(root: Path, docs: set[str]) -> str:
    """A row for each chapter, with links to those of its pages that exist; "" where there are none."""
    names = sorted({name.split("/")[1] for name in docs if re.match(r"\w+/ch\d\d_", name)})
    rows = []
    for name in names:
        text, row = root / "book" / f"{name}.md", []
        if f"book/{name}" in docs:
            row.append(f"[{first_heading(text)}]({name}.md)")
        else:
            other = next(folder for folder in COLUMNS if f"{folder}/{name}" in docs)
            row.append(first_heading(root / other / f"{name}.ipynb"))
        for folder, word in COLUMNS.items():
            row.append(f"[{word}](../{folder}/{name}.ipynb)" if f"{folder}/{name}" in docs else "")
        rows.append(row)
    if not rows:
        return ""
    head = [["Chapter", "Lab", "Exercises", "Solutions"], ["---"] * 4]
    return "\n".join(f"| {' | '.join(row)} |" for row in [*head, *rows])


def toctrees(docs: set[str]) -> str:
    """The order of all pages, which the side bar shows."""
    groups = {name: sorted(doc for doc in docs if doc.startswith(start)) for name, start in GROUPS.items()}
    rest = {doc for doc in docs if doc.startswith("book/")} - {ROOT_DOC, *groups["Chapters"], *REFERENCE}
    groups["Reference"] = [*(doc for doc in REFERENCE if doc in docs), *sorted(rest), "genindex"]
    return "\n\n".join(
        "\n".join(["```{toctree}", ":hidden:", f":caption: {name}", "", *(f"/{doc}" for doc in pages), "```"])
        for name, pages in groups.items()
        if pages
    )


def fill_contents(app: Sphinx, docname: str, source: list[str]) -> None:
    """Put both where the comment is, in the first page only."""
    if docname == ROOT_DOC:
        docs = set(app.env.found_docs)
        source[0] = source[0].replace(PLACE, f"{table(Path(app.srcdir), docs)}\n\n{toctrees(docs)}")


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.connect("source-read", fill_contents)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
