"""The index, filled from what the text has anyway: no directive is needed in a chapter.

Each link to a term of the glossary becomes an entry under that term, and each fence of code that is marked
with `<!-- code: minivllm/memory/blocks.py#BlockPool.allocate -->` one under that symbol. Both point to the
very place. The term's own place in the glossary is its main entry, set in bold.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

GLOSSARY = "book/glossary"
CODE = re.compile(r"<!-- *code: *(?P<path>\S+?)#(?P<symbol>[\w.]+) *-->")
TERM = re.compile(r"^### +(.+?)\s*$", re.MULTILINE)


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub and MyST form it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def terms(glossary: Path) -> dict[str, str]:
    """anchor -> term, of each `### Term` of the glossary; empty if there is none."""
    if not glossary.exists():
        return {}
    return {slug(term): term for term in TERM.findall(glossary.read_text(encoding="utf-8"))}


class IndexEntries(SphinxTransform):
    """Adds a page's entries. It runs before Sphinx gathers them, which is at 850."""

    default_priority = 800

    def apply(self, **kwargs: Any) -> None:
        """Change the page in place."""
        known = terms(Path(self.env.doc2path(GLOSSARY)))
        if self.env.docname == GLOSSARY:
            self.add_definitions(known)
        else:
            self.add_links(known)
        self.add_code()

    def add_definitions(self, known: dict[str, str]) -> None:
        """Each term's own section is its main entry."""
        for section in list(self.document.findall(nodes.section)):
            title = section[0].astext()
            if known.get(slug(title)) == title:
                section.insert(1, self.entry(title, section["ids"][0], main="main"))

    def add_links(self, known: dict[str, str]) -> None:
        """Each link to a term; a link to what the glossary lacks is left to Sphinx, which warns."""
        for link in list(self.document.findall(addnodes.pending_xref)):
            if link.get("reftarget") == GLOSSARY and link.get("reftargetid") in known:
                self.put_before(link, known[link["reftargetid"]])

    def add_code(self) -> None:
        """Each marked fence. The comment that marks it has done its work and goes."""
        for comment in list(self.document.findall(nodes.raw)):
            if found := CODE.fullmatch(comment.astext().strip()):
                path = found["path"].removeprefix("minivllm/")
                self.put_before(comment, f"{found['symbol']} ({path})")
                comment.parent.remove(comment)

    def put_before(self, node: nodes.Element, text: str) -> None:
        """Put an entry before the node, and a place for it to point to."""
        place = f"index-{self.env.new_serialno('index')}"
        at = node.parent.index(node)
        node.parent.insert(at, [self.entry(text, place), nodes.target("", "", ids=[place])])

    def entry(self, text: str, place: str, main: str = "") -> addnodes.index:
        """An entry; ";" would make of one entry two levels."""
        return addnodes.index(entries=[("single", text.replace(";", ","), place, main, None)])


def page_titles(app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: Any) -> None:
    """Let the index say where an entry leads: to which page, and not only that it is the second."""
    if templatename == "genindex.html":
        titles = {app.builder.get_target_uri(name): node.astext() for name, node in app.env.titles.items()}
        context["title_of"] = lambda link: titles[link.partition("#")[0]]


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.add_transform(IndexEntries)
    app.connect("html-page-context", page_titles)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
