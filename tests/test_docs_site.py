"""The documentation as a site: it is read without a network. That it is built without a warning: test_docs.py."""

import re
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from documentation import ROOT, build_site
from playwright.sync_api import Page, sync_playwright


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built pages."""
    directory = tmp_path_factory.mktemp("site")
    build_site(directory)
    return directory


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Says nothing: what it would print is no output of a test."""


@pytest.fixture(scope="module")
def served(site: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def browser_page() -> Iterator[Page]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        yield browser.new_page()
        browser.close()


def test_every_page_is_built(site: Path) -> None:
    pages = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    assert pages <= {path.relative_to(site) for path in site.rglob("*.html")}


def test_no_page_loads_anything_from_elsewhere(site: Path) -> None:
    loaded = re.compile(r"<(?:script|link|img|iframe)\b[^>]*?\b(?:src|href)=[\"']?(https?://[^\"' >]+)")
    for path in site.rglob("*.html"):
        assert not loaded.findall(path.read_text()), path.name


def test_equations_are_drawn_and_words_are_found_without_a_network(served: str, browser_page: Page) -> None:
    asked: list[str] = []
    browser_page.on("request", lambda request: asked.append(request.url))
    browser_page.goto(f"{served}/objectives.html")
    equation = browser_page.locator("math").first.bounding_box()
    assert equation["height"] > 20, "a fraction is higher than a line of text"
    browser_page.get_by_placeholder("Search").first.press_sequentially("fingerprint")  # the page listens to keys
    browser_page.locator(".md-search-result__item").first.wait_for(timeout=120_000)
    assert all(url.startswith((served, "data:", "blob:")) for url in asked), asked
