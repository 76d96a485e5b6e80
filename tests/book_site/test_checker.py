"""Every check of the site can fail: a small page with one fault each, and one without."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from book_site.checker import WIDTHS, dead_links, find_chromium, pages, problems, serve

SVG = '<svg xmlns="http://www.w3.org/2000/svg" width="8" height="8"><rect width="8" height="8"/></svg>'


def write_page(folder: Path, body: str, name: str = "page.html") -> None:
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    head += '<link rel="icon" href="data:,">'
    (folder / name).write_text(f"<!DOCTYPE html><html><head>{head}</head><body>{body}</body></html>")


FINE = """
<img src="a.svg" alt="">
<article>
  <p>It costs $5 and then $6, <code>$x$</code> is code; <b>5</b> &lt; 6.</p>
  <pre>echo $HOME $PATH \\(</pre>
  <img src="a.svg" alt="A square" loading="lazy">
  <div style="overflow-x: auto"><table style="width: 2000px"><tr><td>wide</td></tr></table></div>
  <div style="overflow: hidden"><div style="width: 3000px; clip-path: inset(50%)">not seen</div></div>
  <a href="https://example.org/">not followed</a> <a href="#">top</a> <a href="other.html#ü">there</a>
</article>
"""

FAULTS = {
    "another host": (
        '<img src="http://other.invalid/a.png" alt="A">',
        "request to another host: .*other.invalid",
    ),
    "a font from another host": (
        "<style>@font-face{font-family:f;src:url(https://fonts.invalid/f.woff2)}p{font-family:f}</style><p>x</p>",
        "request to another host: .*fonts.invalid",
    ),
    "console": ('<script>console.error("broken thing")</script>', "console: broken thing"),
    "script": ("<script>null.length</script>", "script error: .*null"),
    "missing file": ('<script src="missing.js"></script>', r"request failed: 404 .*missing\.js"),
    "inline formula": (r"<article><p>A table of \(n\) entries</p></article>", r"formula not rendered: \\\(n"),
    "display formula": (r"<article><p>\[ n \]</p></article>", "formula not rendered"),
    "dollars": ("<article><p>A table of $n_i$ entries</p></article>", r"formula not rendered: \$n_i\$"),
    "dollars with a tag": ("<p>A table of $n<em>i</em>$ entries</p>", r"formula not rendered: \$ni\$"),
    "two dollars": ("<p>$$ n $$</p>", r"formula not rendered: \$\$ n"),
    "formula with an error": (
        '<mjx-container><g data-mjx-error="Undefined control sequence \\foo"></g></mjx-container>',
        "formula with an error: Undefined control sequence",
    ),
    "no alt": ('<img src="a.svg">', r"image without alt text: a\.svg"),
    "empty alt in the text": (
        '<article><img src="a.svg" alt=" "></article>',
        r"image without alt text: a\.svg",
    ),
    "no image": ('<img src="text.png" alt="A">', r"image that cannot be shown: text\.png"),
    "wide page": ('<p style="width: 1500px">x</p>', r"the page is \d+ px wider than the window: x"),
    "long word": (
        f"<article><p>{'long' * 200}</p></article>",
        r"the page is \d+ px wider than the window: longlong",
    ),
    "cut off": (
        '<style>html,body{overflow-x:hidden}</style><article><p style="width:1500px">long</p></article>',
        'wider than the window: <p class=""> long',
    ),
    "scrolls beyond the window": (
        '<style>body{overflow-x:hidden}</style><article><div style="overflow-x:auto;width:1500px">'
        '<p style="width: 1600px">long</p></div></article>',
        "wider than the window: <div",
    ),
}


@pytest.fixture
def site(tmp_path: Path) -> Path:
    (tmp_path / "a.svg").write_text(SVG)
    (tmp_path / "text.png").write_text("This is no image.")
    write_page(tmp_path, '<p id="ü">here</p>', "other.html")
    return tmp_path


@pytest.mark.parametrize("width", WIDTHS)
def test_a_page_without_fault_passes(width, site, browser):
    write_page(site, FINE)
    with serve(site) as address:
        assert problems(browser, f"{address}page.html", WIDTHS[width]) == []
    assert dead_links(site) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen_and_named(fault, site, browser):
    body, expected = FAULTS[fault]
    write_page(site, body)
    with serve(site) as address:
        found = problems(browser, f"{address}page.html", WIDTHS["narrow"])
    assert any(re.search(expected, problem) for problem in found), found


def test_a_wide_table_is_a_fault_in_the_narrow_window_only(site, browser):
    write_page(site, '<article><p style="width: 800px">x</p></article>')
    with serve(site) as address:
        assert problems(browser, f"{address}page.html", WIDTHS["wide"]) == []
        assert problems(browser, f"{address}page.html", WIDTHS["narrow"])


def test_a_page_that_does_not_exist_is_a_fault(site, browser):
    with serve(site) as address:
        assert any("404" in problem for problem in problems(browser, f"{address}none.html", 390))


def test_a_redirect_is_followed_and_its_end_is_looked_at(site, browser):
    write_page(site, '<meta http-equiv="refresh" content="0; url=bad.html">')
    write_page(site, '<img src="a.svg">', "bad.html")
    with serve(site) as address:
        assert problems(browser, f"{address}page.html", 390) == ["image without alt text: a.svg"]


@pytest.mark.parametrize(
    "link, expected",
    [
        ('<a href="none.html">x</a>', "none.html leads to no file"),
        ('<a href="other.html#none">x</a>', "other.html#none leads to no place in other.html"),
        ('<a href="#none">x</a>', "#none leads to no place in page.html"),
        ('<a href="../up.html">x</a>', "../up.html leads to no file"),
        ('<a href="/other.html">x</a>', "/other.html works only where"),
        ('<img src="none.png">', "none.png leads to no file"),
        ('<meta http-equiv="refresh" content="0; url=none.html">', "none.html leads to no file"),
    ],
    ids=["file", "place", "same page", "outside", "host", "image", "redirect"],
)
def test_a_dead_link_is_found(link, expected, site):
    write_page(site, link)
    assert [problem for problem in dead_links(site) if expected in problem]


def test_the_themes_own_files_are_no_pages(site):
    (site / "_static").mkdir()
    write_page(site / "_static", "")
    assert pages(site) == ["other.html"]


def test_a_browser_that_is_named_is_taken_and_no_other(monkeypatch):
    monkeypatch.setenv("CHROMIUM", "no-such-browser")
    assert find_chromium() is None
    monkeypatch.setenv("CHROMIUM", "sh")
    assert str(find_chromium()).endswith("/sh")
