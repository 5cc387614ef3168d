"""The browser of the tests of pages."""

import shutil
from collections.abc import Iterator

import pytest
from browsing import PATIENCE
from playwright.sync_api import Browser, expect, sync_playwright

CHROMIUM = shutil.which("chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    expect.set_options(timeout=PATIENCE)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()
