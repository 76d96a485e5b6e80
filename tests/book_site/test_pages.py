"""Every page of the built book, in a narrow and a wide window. `make test-book` builds it first."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from book_site.checker import WIDTHS, dead_links, pages, problems, serve

# BOOK_SITE names another folder to look at.
SITE = Path(os.environ.get("BOOK_SITE", Path(__file__).resolve().parents[2] / "book" / "_build" / "html"))


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serve(SITE) as served:
        yield served


def test_the_book_has_been_built():
    assert {"index.html", "book/index.html", "genindex.html", "search.html"} <= set(pages(SITE)), (
        "run make book"
    )


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("page", pages(SITE))
def test_a_page_shows_all_it_has_and_asks_nothing_of_another_host(page, width, address, browser: Browser):
    found = problems(browser, f"{address}{page}", WIDTHS[width])
    assert not found, "\n".join(["", *found])


def test_every_link_within_the_book_leads_somewhere():
    found = dead_links(SITE)
    assert not found, "\n".join(["", *found])
