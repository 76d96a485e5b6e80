"""The bibliography: its page is what its source makes of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from minivllm.course.references import references_markdown
from minivllm.errors import InvalidOption

BOOK = Path(__file__).resolve().parent.parent / "book"


def entry(key: str, author: str, year: str = "2023", title: str = "A title", **fields: str) -> str:
    given = {"author": author, "year": year, "title": title, "url": "https://example.org/a"} | fields
    return f"@misc{{{key}, {', '.join(f'{name} = {{{value}}}' for name, value in given.items() if value)}}}\n"


def headings(page: str) -> list[str]:
    return re.findall(r"^### (.+)$", page, re.MULTILINE)


def text(page: str) -> str:
    """What stands under the last heading."""
    return page.rstrip("\n").rpartition("\n\n")[2]


def test_the_books_bibliography_is_made_from_its_source():
    made = references_markdown((BOOK / "references.bib").read_text(encoding="utf-8"))
    assert (BOOK / "references.md").read_text(encoding="utf-8") == made
    assert "Kwon et al., 2023" in headings(made)


@pytest.mark.parametrize(
    "author, heading",
    [
        ("Kwon, Woosuk", "Kwon, 2023"),
        ("Woosuk Kwon and Zhuohan Li", "Kwon and Li, 2023"),
        ("Kwon, Woosuk and Li, Zhuohan and Zhuang, Siyuan", "Kwon et al., 2023"),
        ("Kwon, Woosuk and others", "Kwon et al., 2023"),
        ("{vLLM Team}", "vLLM Team, 2023"),
        ("van der Berg, Piet", "van der Berg, 2023"),
        (r"M{\"u}ller, J{\"o}rg", "Müller, 2023"),
    ],
)
def test_a_heading_names_one_author_or_two_or_the_first_and_the_year(author, heading):
    assert headings(references_markdown(entry("a", author))) == [heading]


def test_two_that_are_alike_get_letters_by_title_and_a_third_that_is_not_gets_none():
    entries = [
        entry("x", "Li, A", title="B"),
        entry("y", "Li, C", title="A"),
        entry("z", "Li, A", year="2024"),
    ]
    page = references_markdown("".join(entries))
    assert headings(page) == ["Li, 2023a", "Li, 2023b", "Li, 2024"]
    assert page.index("C Li. *A*") < page.index("A Li. *B*")


def test_entries_are_sorted_without_regard_to_accents_and_capitals_nor_to_their_order():
    entries = [entry(str(i), name) for i, name in enumerate([r"{\'A}bc, X", "Zed, X", "aa, X", "Bee, X"])]
    page = references_markdown("".join(entries))
    assert headings(page) == ["aa, 2023", "Ábc, 2023", "Bee, 2023", "Zed, 2023"]
    assert references_markdown("".join(reversed(entries))) == page


def test_an_entry_has_authors_title_venue_year_and_links():
    fields = {"booktitle": "Proc. of {X}", "pages": "3--5", "eprint": "2309.06180", "archiveprefix": "arXiv"}
    source = entry("a", "Kwon, Woosuk and Li, Zhuohan and Yu, Cody Hao", title="A {T}itle?", url="", **fields)
    assert text(references_markdown(source)) == (
        "Woosuk Kwon, Zhuohan Li and Cody Hao Yu. *A Title?* Proc. of X, pages 3–5, 2023. "
        "[arXiv:2309.06180](https://arxiv.org/abs/2309.06180)."
    )


@pytest.mark.parametrize(
    "fields, links",
    [
        (
            {"url": "https://arxiv.org/abs/2309.06180v2"},
            "[arXiv:2309.06180v2](https://arxiv.org/abs/2309.06180v2)",
        ),
        (
            {"url": "https://arxiv.org/pdf/2309.06180.pdf"},
            "[arXiv:2309.06180](https://arxiv.org/abs/2309.06180)",
        ),
        ({"url": "https://doi.org/10.1/x"}, "[doi:10.1/x](https://doi.org/10.1/x)"),
        ({"url": "", "doi": "10.1/a_b"}, r"[doi:10.1/a\_b](https://doi.org/10.1/a_b)"),
        ({"url": "https://example.org/a_b/"}, r"[example.org/a\_b](https://example.org/a_b/)"),
        (
            {"url": "https://example.org", "doi": "10.1/x"},
            "[doi:10.1/x](https://doi.org/10.1/x) · [example.org](https://example.org)",
        ),
    ],
)
def test_each_way_to_give_a_link_is_understood(fields, links):
    assert text(references_markdown(entry("a", "Li, A", **fields))).endswith(f"2023. {links}.")


def test_what_markdown_would_take_for_markup_is_shown_as_it_is():
    assert r"*The \*f\_1\* of \$x\$ & 5%*." in references_markdown(
        entry("a", "Li, A", title=r"The *f\_1* of \$x\$ \& 5\%")
    )


@pytest.mark.parametrize(
    "source, complaint",
    [
        (entry("a9", ""), "a9 .* author"),
        (entry("a9", "Li, A", title=""), "a9 has no title"),
        (entry("a9", "Li, A", url=""), "a9 has no link"),
        (entry("a9", "Li, A", url="example.org"), "a9 has the url 'example.org'"),
        (entry("a9", "Li, A").replace("year", "jahr"), "a9 has no year"),
        ("@misc{a9, title = {unclosed", "no BibTeX that can be read"),
        (entry("a9", "Li, A") * 2, "no BibTeX that can be read.*a9"),
    ],
    ids=["author", "title", "link", "url", "year", "syntax", "twice"],
)
def test_an_entry_that_lacks_something_is_named(source, complaint):
    with pytest.raises(InvalidOption, match=complaint):
        references_markdown(source)


def test_the_glossary_is_sorted_and_has_each_term_once_with_a_text():
    parts = re.split(r"^### ", (BOOK / "glossary.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    terms = [part.partition("\n")[0] for part in parts]
    assert terms == sorted(terms, key=str.casefold)
    assert len({term.casefold() for term in terms}) == len(terms)
    assert all(part.partition("\n")[2].strip() for part in parts)
