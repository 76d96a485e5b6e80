"""The site of a sample book: what Sphinx and the book's extensions make of plain Markdown and notebooks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from book_site import sample
from book_site.checker import WIDTHS, dead_links, pages, problems, serve


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = sample.write_book(tmp_path_factory.mktemp("book"))
    done = sample.build(root)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    return root / sample.SITE


def read(site: Path, page: str) -> str:
    return (site / page).read_text(encoding="utf-8")


def places(site: Path, entry: str) -> list[str]:
    """Where the index's entry of this name leads, main entries with a `*` before them."""
    found = re.search(
        rf"<dt>{re.escape(entry)}</dt>\s*<dd>(.*?)</dd>", read(site, "genindex.html"), re.DOTALL
    )
    assert found is not None, f"no entry {entry}"
    links = re.findall(r'<a href="([^"]+)">(<strong>)?', found[1])
    return [("*" if main else "") + link for link, main in links]


def target(site: Path, link: str) -> str:
    """The text that follows the place to which a link leads."""
    page, _, place = link.lstrip("*").partition("#")
    after = read(site, page).split(f'id="{place}"', 1)[1].split(">", 1)[1]
    return re.sub(r"<[^>]+>", "", after).strip()


def test_only_the_books_pages_become_pages(site):
    chapters = {"book/ch02_sample.html", "book/ch03_sample.html", "notebooks/ch03_sample.html"}
    names = ("index", "interview", "glossary", "references", "performance", "more")
    frame = {f"book/{name}.html" for name in names}
    assert set(pages(site)) == chapters | frame | {"index.html", "genindex.html", "search.html"}


def test_all_its_pages_pass_the_checks(site, browser: Browser):
    assert dead_links(site) == []
    with serve(site) as address:
        for page in pages(site):
            for width in WIDTHS.values():
                assert (page, problems(browser, address + page, width)) == (page, [])


def test_the_root_leads_to_the_first_page(site, browser: Browser):
    with serve(site) as address:
        page = browser.new_page()
        page.goto(address)
        page.wait_for_url(f"{address}book/index.html")
        assert page.get_by_role("heading", name="minivllm").count() == 1
        page.close()


def test_the_first_page_lists_what_exists_of_each_chapter(site):
    rows = re.findall(r"<tr[^>]*>(.*?)</tr>", read(site, "book/index.html"), re.DOTALL)
    links = [re.findall(r'href="([^"#]+)', row) for row in rows]
    assert links == [[], ["ch02_sample.html"], ["ch03_sample.html", "../notebooks/ch03_sample.html"]]
    assert "3. Paging" in rows[2]


def test_the_side_bar_has_every_page_in_order(site):
    bar = re.search(r'<nav class="bd-links.*?</nav>', read(site, "genindex.html"), re.DOTALL)
    assert bar is not None
    assert re.findall(r'href="([^"]+)"', bar[0]) == [
        "book/index.html",
        "book/ch02_sample.html",
        "book/ch03_sample.html",
        "notebooks/ch03_sample.html",
        "book/interview.html",
        "book/glossary.html",
        "book/references.html",
        "book/more.html",
        "book/performance.html",
        "#",
    ]


def test_a_term_is_found_where_it_is_defined_and_where_a_chapter_uses_it(site):
    definition, *uses = places(site, "Block table")
    assert definition == "*book/glossary.html#block-table"
    assert [use.partition("#")[0] for use in uses] == ["book/ch03_sample.html", "notebooks/ch03_sample.html"]
    assert all(target(site, use).startswith("block table") for use in uses)


def test_a_term_that_no_chapter_uses_is_found_where_it_is_defined(site):
    assert places(site, "Swapping") == ["*book/glossary.html#swapping"]


def test_the_index_has_nothing_but_terms_and_code(site):
    entries = set(re.findall(r"<dt>(.*?)</dt>", read(site, "genindex.html")))
    terms = set(re.findall(r"^### (.+)$", (sample.ROOT / "book" / "glossary.md").read_text(), re.MULTILINE))
    assert entries == terms | {"BlockPool.allocate (memory/blocks.py)"}


def test_a_marked_fence_is_found_under_its_symbol_and_the_mark_is_gone(site):
    (place,) = places(site, "BlockPool.allocate (memory/blocks.py)")
    assert target(site, place).startswith("def allocate(")
    assert "code: minivllm" not in read(site, "book/ch03_sample.html")


def test_formulas_are_made_where_dollars_enclose_them_and_prices_are_left(site):
    text = read(site, "book/ch03_sample.html")
    assert r"\(\lceil n / 16 \rceil\)" in text
    assert "It costs $5, or $6 elsewhere" in text


def test_a_figure_keeps_its_alt_text(site):
    assert 'alt="A memory map of five rungs."' in read(site, "book/ch03_sample.html")
    assert 'alt="A memory map."' in read(site, "notebooks/ch03_sample.html")


def test_the_search_finds_a_page_without_a_network(site, browser: Browser):
    with serve(site) as address:
        page = browser.new_page()
        page.goto(f"{address}search.html?q=preemption")
        page.locator("#search-results li a").first.wait_for(timeout=20_000)
        assert "Glossary" in page.locator("#search-results").inner_text()
        page.close()


def test_a_formula_that_tex_does_not_understand_is_seen(site, browser: Browser):
    page = site / "book" / "ch02_sample.html"
    text = read(site, "book/ch03_sample.html")
    for wrong in (r"\unknown{n}", r"\frac{n}"):
        page.write_text(text.replace(r"\(n\)", rf"\({wrong}\)"), encoding="utf-8")
        with serve(site) as address:
            found = problems(browser, f"{address}book/ch02_sample.html", 1400)
        assert any("formula with an error" in problem for problem in found), (wrong, found)


@pytest.mark.parametrize(
    "line, complaint",
    [
        ("[there](ch03_sample.md#no-such-heading)", "no-such-heading"),
        ("[there](ch09_none.md)", "ch09_none.md"),
        ("[a term](glossary.md#no-such-term)", "no-such-term"),
        ("![A figure.](figures/none.png)", "figures/none.png"),
    ],
    ids=["heading", "chapter", "term", "figure"],
)
def test_what_leads_nowhere_stops_the_build(line, complaint, tmp_path):
    root = sample.write_book(tmp_path)
    page = root / "book" / "ch02_sample.md"
    page.write_text(f"{page.read_text()}\n{line}\n", encoding="utf-8")
    done = sample.build(root)
    assert done.returncode != 0
    assert re.search(rf"ch02_sample\.md:5.*{re.escape(complaint)}", done.stderr)


def test_a_book_without_chapters_builds(tmp_path):
    root = sample.write_book(tmp_path)
    for path in [*root.glob("book/ch*"), *root.glob("notebooks/ch*")]:
        path.unlink()
    done = sample.build(root)
    assert (done.returncode, done.stderr) == (0, "")
    assert dead_links(root / sample.SITE) == []
