"""One browser for the pages of all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from browser import Page, browser_page


@pytest.fixture(scope="session")
def shared_browser() -> Iterator[Page]:
    with browser_page() as page:
        yield page


@pytest.fixture
def browser(shared_browser: Page) -> Page:
    """Return the browser, which has met no problem yet."""
    shared_browser.problems.clear()
    return shared_browser
