"""What a person sees in a browser: headless Chromium on the dashboard and on the record's pages."""

import shutil
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import uvicorn
from live import wait_for
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright
from playwright.sync_api import Error as PlaywrightError
from recorded_home import record_two_cells
from server_profile import ServerLab

from pipelines.home import Home
from pipelines.launchers.network import free_port
from pipelines.server.api import answers, running_services
from pipelines.web.app import make_app

CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
PATIENCE = 120_000
"""Milliseconds that a page of the dashboard may take on a busy machine."""


@dataclass
class Visit:
    """One browser window, and what it did beside showing pages."""

    page: Page
    elsewhere: list[str] = field(default_factory=list)
    """Addresses beyond this machine that it asked for."""
    errors: list[str] = field(default_factory=list)
    """What the pages' scripts, style and policy had to complain of."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def visit(browser: Browser, credentials: Any = None) -> Iterator[Visit]:
    """A window of its own.

    Args:
        credentials: for a page that asks for a password in HTTP's own way; None: it is refused.
    """
    context: BrowserContext = browser.new_context(viewport={"width": 1280, "height": 900}, http_credentials=credentials)
    context.set_default_timeout(PATIENCE)
    visit = Visit(context.new_page())

    def note(url: str) -> None:
        if urlsplit(url).hostname not in ("127.0.0.1", None):
            visit.elsewhere.append(url)

    context.on("request", lambda request: note(request.url))
    context.on("console", lambda message: visit.errors.append(message.text) if message.type == "error" else None)
    context.on("weberror", lambda error: visit.errors.append(str(error.error)))
    try:
        yield visit
    finally:
        context.close()


@pytest.fixture
def record(tmp_path: Path) -> Iterator[str]:
    """The address of the pages of a home with four recorded runs."""
    home = Home(tmp_path / "home")
    record_two_cells(home)
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(make_app(home), port=port, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    wait_for(lambda: answers(f"http://127.0.0.1:{port}/ready"), what="the pages")
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join()


def column(page: Page, heading: str) -> list[str]:
    """The visible cells of the table of runs under a heading."""
    headings = page.locator("table").last.locator("th").all_inner_texts()
    cells = page.locator("table").last.locator(f"tbody tr:visible td:nth-child({headings.index(heading) + 1})")
    return cells.all_inner_texts()


def test_the_record_is_filtered_sorted_and_opened(browser: Browser, record: str) -> None:
    with visit(browser) as visited:
        page = visited.page
        page.goto(record)
        runs = column(page, "run")
        assert len(runs) > 2
        page.get_by_label("Filter").fill(runs[0])
        assert column(page, "run") == [runs[0]]
        page.reload()
        assert column(page, "run") == [runs[0]], "the filter is in the page's address"
        page.get_by_label("Filter").fill("")
        heading = page.locator("table").last.get_by_role("columnheader", name="after")
        heading.click()
        rising = column(page, "after")
        heading.press("Enter")
        assert column(page, "after") == rising[::-1]
        assert rising == sorted(rising, key=lambda share: float(share.rstrip(" %"))) != rising[::-1]
        page.get_by_role("link", name=runs[0]).click()
        expect(page.locator("svg").first).to_be_visible()
        page.go_back()
        page.locator("a[href^=experiments]").first.click()
        expect(page.locator("svg").first).to_be_visible()
        assert (visited.errors, visited.elsewhere) == ([], [])


@pytest.mark.long
def test_who_has_not_logged_in_is_shown_nothing(browser: Browser, server_lab: ServerLab) -> None:
    services = running_services(server_lab.home)
    assert services is not None
    for address in (
        f"{services.url}/admin/settings",
        f"{services.url}/flow_runs/{'0' * 8}-0000-0000-0000-{'0' * 12}",
        services.record_url,
        f"{services.record_url}/record/runs/any/state.json",
        services.studies_url,
        f"{services.studies_url}/api/studies",
    ):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(address, timeout=60)
        refused.value.close()
        assert refused.value.code == 401, address
    settings = urllib.request.urlopen(f"{services.dashboard}/ui-settings", timeout=60)
    with settings:
        assert server_lab.auth_string.partition(":")[2] not in settings.read().decode()
    with visit(browser) as visited:
        visited.page.goto(f"{services.dashboard}/v2/runs")
        visited.page.wait_for_url("**/login**")
        with pytest.raises(PlaywrightError, match="ERR_INVALID_AUTH_CREDENTIALS"):
            visited.page.goto(services.record_url)
