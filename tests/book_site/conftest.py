"""What the tests of the site share: one browser."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from book_site.checker import NO_CHROMIUM, find_chromium, open_browser


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    path = find_chromium()
    if path is None:
        pytest.exit(NO_CHROMIUM, returncode=1)
    with open_browser(path) as opened:
        yield opened
