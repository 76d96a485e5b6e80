"""Looks at the pages of a built site as a browser shows them, and says what is wrong with them."""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import unquote, urljoin, urlsplit
from urllib.request import ProxyHandler, build_opener

from playwright.sync_api import Browser, Error, Page, sync_playwright

WIDTHS = {"narrow": 390, "wide": 1400}
CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
NO_CHROMIUM = (
    "The pages of the book are looked at with Chromium or Chrome, and none was found. On Debian or Ubuntu: "
    "apt install chromium. Elsewhere install one and name it: make test-book CHROMIUM=/path/to/chromium"
)
# It shall ask nothing of anyone: no updates, no components, no sync.
FLAGS = [
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-gpu",
    "--disable-quic",
    "--disable-sync",
    "--no-first-run",
]

# What a page shows, once it is laid out. Each entry of the result is a complaint.
LOOK = (Path(__file__).parent / "look.js").read_text(encoding="utf-8")


def find_chromium() -> str | None:
    """The path of the browser: what CHROMIUM names, else the first that is installed."""
    named = os.environ.get("CHROMIUM")
    return shutil.which(named) if named else next(filter(None, map(shutil.which, CHROMIUM)), None)


@contextmanager
def open_browser(path: str) -> Iterator[Browser]:
    """The installed Chromium, without a window; its profile is a new, empty folder."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS, headless=True)
        yield browser
        browser.close()


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@contextmanager
def serve(folder: Path) -> Iterator[str]:
    """The folder on a free port of this machine; gives the address, which ends in `/`."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


def problems(browser: Browser, address: str, width: int) -> list[str]:
    """What is wrong with the page at this address in a window of this width in CSS pixels; [] if nothing."""
    host, found = urlsplit(address).netloc, []
    context = browser.new_context(viewport={"width": width, "height": 900}, service_workers="block")
    try:
        page = context.new_page()
        page.on("console", lambda m: found.append(f"console: {m.text}") if m.type == "error" else None)
        page.on("pageerror", lambda error: found.append(f"script error: {error}"))
        page.on("requestfailed", lambda request: found.append(f"request failed: {request.url}"))
        page.on(
            "response", lambda r: found.append(f"request failed: {r.status} {r.url}") if not r.ok else None
        )

        def only_here(route: object) -> None:
            url = route.request.url  # type: ignore[attr-defined]
            if urlsplit(url).scheme in ("data", "blob") or urlsplit(url).netloc == host:
                route.continue_()  # type: ignore[attr-defined]
            else:
                found.append(f"request to another host: {url}")
                route.abort()  # type: ignore[attr-defined]

        context.route("**/*", only_here)
        page.goto(_end_of_redirect(address), wait_until="load")
        _settle(page)
        found += page.evaluate(LOOK)
    except Error as error:
        found.append(f"the page does not open: {error.message}")
    finally:
        context.close()
    return sorted(set(found))


def _end_of_redirect(address: str) -> str:
    """Where a page leads that only sends its reader on: a browser would leave it while we look at it."""
    direct = build_opener(ProxyHandler({}))
    with suppress(HTTPError), direct.open(address, timeout=20) as answer:
        sent_on = _Anchors(answer.read().decode()).sent_on
        return urljoin(address, sent_on) if sent_on else address
    return address


def _settle(page: Page) -> None:
    """Wait for formulas, and for images that load only when near. What slides in is there at once."""
    page.add_style_tag(content="* { transition: none !important; animation: none !important }")
    page.evaluate("window.MathJax?.startup?.promise?.then(() => null)")
    shown = "i => { i.loading = 'eager'; return i.decode().catch(() => null) }"
    page.evaluate(f"Promise.all([...document.images].map({shown}))")
    page.wait_for_load_state("networkidle")


class _Anchors(HTMLParser):
    """The places in a page, and where its links lead."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.places: set[str] = set()
        self.links: list[str] = []
        self.sent_on: str | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        self.places |= {str(named[key]) for key in ("id", "name") if named.get(key)}
        self.links += [str(named[key]) for key in ("href", "src") if named.get(key) is not None]
        refresh = re.match(r"\d+; *url=(.+)", named.get("content") or "")
        if named.get("http-equiv") == "refresh" and refresh:
            self.sent_on = refresh[1]
            self.links.append(refresh[1])


def pages(site: Path) -> list[str]:
    """All pages of the site, as paths from its root; the theme's own files are none."""
    found = (path.relative_to(site).as_posix() for path in site.rglob("*.html"))
    return sorted(path for path in found if not path.startswith("_static/"))


def dead_links(site: Path) -> list[str]:
    """Each link within the site that leads nowhere: to no file, or to no place in its page."""
    read = {page: _Anchors((site / page).read_text(encoding="utf-8")) for page in pages(site)}
    found = []
    for page, anchors in read.items():
        for link in anchors.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or link in ("", "#"):
                continue
            folder = Path(page).parent.as_posix()
            target = os.path.normpath(os.path.join(folder, unquote(parts.path))) if parts.path else page
            if link.startswith("/"):
                found.append(f"{page}: {link} works only where the site has a host for itself")
            elif target.startswith("..") or not (site / target).is_file():
                found.append(f"{page}: {link} leads to no file")
            elif parts.fragment and target in read and unquote(parts.fragment) not in read[target].places:
                found.append(f"{page}: {link} leads to no place in {target}")
    return sorted(set(found))
