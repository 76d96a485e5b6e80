"""Above the chapters: the bibliography's page, made from BibTeX.

Each entry gets a heading to which chapters link: `### Kwon et al., 2023` in references.md is
`[Kwon et al., 2023](references.md#kwon-et-al-2023)` there.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from itertools import groupby
from typing import Any

from minivllm.errors import InvalidOption

HEAD = """<!-- Made from references.bib by `make sync`; change it there. -->

# Bibliography

Everything that the book cites.

## By first author
"""
VENUES = ("booktitle", "journal", "howpublished", "publisher", "institution", "school", "note")
SPECIAL = re.compile(r"([\\`*_\[\]<>$|#])")


def references_markdown(bib_text: str) -> str:
    """The page for these BibTeX entries, sorted by heading, then title; the same each time.

    Raises InvalidOption for what cannot be read, and for an entry, by its key, that lacks an author, a title,
    a year or a link.
    """
    from pybtex.database import parse_string
    from pybtex.exceptions import PybtexError

    try:
        entries = dict(parse_string(bib_text, "bibtex").entries)
    except PybtexError as error:
        raise InvalidOption(f"The bibliography is no BibTeX that can be read: {error}") from error
    made = sorted((_sort_key(_label(key, entry), _title(key, entry)), key) for key, entry in entries.items())
    parts = [HEAD]
    for _, alike in groupby(made, key=lambda item: item[0][0]):
        keys = [key for _, key in alike]
        letters = _letters(len(keys))
        for letter, key in zip(letters, keys, strict=True):
            parts.append(f"### {_label(key, entries[key])}{letter}\n\n{_formatted(key, entries[key])}\n")
    return "\n".join(parts)


def _letters(count: int) -> list[str]:
    """One needs no letter; of several each gets one."""
    if count > 26:
        raise InvalidOption(f"{count} entries have the same authors and year; letters end at 26.")
    return [""] if count == 1 else [chr(ord("a") + i) for i in range(count)]


def _sort_key(label: str, title: str) -> tuple[str, str]:
    """As a reader looks them up: without regard to accents and capitals."""
    return _plain(label), _plain(title)


def _plain(text: str) -> str:
    letters = unicodedata.normalize("NFKD", text.casefold())
    return "".join(letter for letter in letters if not unicodedata.combining(letter))


def _label(key: str, entry: Any) -> str:
    """`A, 2023`, `A and B, 2023` or `A et al., 2023`."""
    names = [_decoded(" ".join([*p.prelast_names, *p.last_names])) for p in _people(entry)]
    names = names or [_decoded(entry.fields.get("organization", ""))]
    if not names[0]:
        raise InvalidOption(f"The entry {key} says neither author nor organization; add one.")
    who = f"{names[0]} et al." if len(names) > 2 or "others" in names[1:] else " and ".join(names)
    return f"{who}, {_field(key, entry, 'year')}"


def _formatted(key: str, entry: Any) -> str:
    """Authors. *Title*. Venue, pages, year. Links."""
    people = [
        " ".join(_decoded(n) for n in (*p.first_names, *p.middle_names, *p.prelast_names, *p.last_names))
        + "".join(f", {_decoded(n)}" for n in p.lineage_names)
        for p in _people(entry)
    ]
    who = _joined(people) or _decoded(entry.fields["organization"])
    title, where = _escaped(_title(key, entry)), _venue(entry)
    links = " · ".join(f"[{text}]({url})" for text, url in _links(key, entry))
    return " ".join(
        [
            _sentence(_escaped(who)),
            f"*{title}*" if title.endswith(("?", "!")) else f"*{title}*.",
            _sentence(", ".join([*where, _field(key, entry, "year")])),
            f"{links}.",
        ]
    )


def _venue(entry: Any) -> list[str]:
    """Where it appeared, with what finds it there."""
    fields = entry.fields
    where = next((_escaped(_decoded(fields[name])) for name in VENUES if name in fields), None)
    if where is None and _arxiv(entry):
        where = "arXiv preprint"
    volume = _decoded(fields.get("volume", ""))
    number = f"({_decoded(fields['number'])})" if volume and "number" in fields else ""
    pages = _decoded(fields.get("pages", ""))
    return [
        *([where] if where else []),
        *([f"volume {volume}{number}"] if volume else []),
        *([f"pages {pages}"] if pages else []),
    ]


def _links(key: str, entry: Any) -> Iterable[tuple[str, str]]:
    """(text, address) of arXiv, DOI and another page, as far as the entry has them."""
    links = []
    if number := _arxiv(entry):
        links.append((f"arXiv:{number}", f"https://arxiv.org/abs/{number}"))
    if doi := _doi(entry):
        links.append((f"doi:{_escaped(doi)}", f"https://doi.org/{doi}"))
    url = entry.fields.get("url", "")
    if url and not re.match(r"https?://((dx\.)?doi\.org|arxiv\.org)/", url):
        if re.fullmatch(r"https://[^\s<>()]+", url) is None:
            raise InvalidOption(f"The entry {key} has the url {url!r}; write one that begins with https://.")
        links.append((_escaped(url.removeprefix("https://").rstrip("/")), url))
    if not links:
        raise InvalidOption(f"The entry {key} has no link; give its eprint (arXiv), doi or url.")
    return links


def _arxiv(entry: Any) -> str:
    """The number of the entry on arXiv, or ""."""
    if entry.fields.get("archiveprefix", "").lower() == "arxiv":
        return str(entry.fields.get("eprint", ""))
    found = re.search(
        r"arxiv\.org/(?:abs|pdf)/([\w.-]+/)?(\d[\w.]*?)(?:\.pdf)?$", entry.fields.get("url", "")
    )
    return "".join(part or "" for part in found.groups()) if found else ""


def _doi(entry: Any) -> str:
    """Its DOI, whether given as such or as an address, or ""."""
    given = str(entry.fields.get("doi", ""))
    address = str(entry.fields.get("url", ""))
    given = given or (address if re.match(r"https?://(dx\.)?doi\.org/", address) else "")
    return re.sub(r"^https?://(dx\.)?doi\.org/", "", given)


def _people(entry: Any) -> list[Any]:
    return list(entry.persons.get("author", ()))


def _title(key: str, entry: Any) -> str:
    return _decoded(_field(key, entry, "title"))


def _field(key: str, entry: Any, name: str) -> str:
    if name not in entry.fields:
        raise InvalidOption(f"The entry {key} has no {name}; add it.")
    return str(entry.fields[name])


def _joined(names: list[str]) -> str:
    """BibTeX's last author "others" stands for those whom the entry does not name."""
    if names[-1:] == ["others"]:
        return f"{', '.join(names[:-1])} et al."
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _sentence(text: str) -> str:
    return text if text.endswith((".", "?", "!")) else f"{text}."


def _decoded(text: str) -> str:
    """LaTeX's accents and dashes as letters, without its braces."""
    from pybtex.richtext import Text

    plain = str(Text.from_latex(text)).replace("\\$", "$").replace("~", " ").replace("--", "–")
    return " ".join(plain.split())


def _escaped(text: str) -> str:
    return SPECIAL.sub(r"\\\1", text)
