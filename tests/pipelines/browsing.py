"""A browser for tests, headless Chromium, and a server of a home's pages."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from playwright.sync_api import Browser, BrowserContext, Page
from waiting import wait_for

from pipelines.home.home import Home
from pipelines.launchers.network import free_port
from pipelines.prefect.server.api import answers
from pipelines.web.app import make_app

PATIENCE = 120_000
"""Milliseconds that a page of the dashboard may take on a busy machine."""


@dataclass
class Visit:
    """A browser window, with its errors and its requests to other machines."""

    page: Page
    elsewhere: list[str] = field(default_factory=list)
    """Addresses beyond this machine that it asked for."""
    errors: list[str] = field(default_factory=list)
    """Errors of the pages' scripts, style and policy."""


@contextmanager
def visit(browser: Browser, credentials: Any = None, *, width: int = 1280) -> Iterator[Visit]:
    """Opens a window that shares nothing with others.

    Args:
        credentials: login for pages that ask for one by HTTP; without it they refuse.
        width: width of the window, pixels.
    """
    viewport: Any = {"width": width, "height": 900}
    context: BrowserContext = browser.new_context(viewport=viewport, http_credentials=credentials)
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


@contextmanager
def served(home: Home) -> Iterator[str]:
    """Serves a home's pages and yields their address."""
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(make_app(home, lambda _shown: True), port=port, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_for(lambda: answers(f"http://127.0.0.1:{port}/ready"), what="the pages")
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()
