#!/usr/bin/env python3
"""Takes the pictures of docs/tour.md and the README: runs the tour's experiment, and opens its pages in Chromium.

    .venv/bin/python tools/screenshots.py            # runs it in build/tour, then writes docs/*.png
    .venv/bin/python tools/screenshots.py --all DIR  # each page at 1280 and 390 pixels, light and dark, whole, into DIR

It needs the Debian package `chromium`, Playwright (extra `dev`), and a quarter of an hour of two CPU cores at first.
"""

import argparse
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

ROOT = Path(__file__).resolve().parent.parent
RPG = Path(sys.executable).with_name("rpg")
MOST_BYTES = 150_000
"""Largest picture in docs/."""
PATIENCE = 120_000
"""Milliseconds that a page may take on a busy machine."""
WIDTH = 1120
HEIGHTS = {"report": 1500, "live": 1050, "record": 620, "dashboard-experiment": 800}
"""Page -> height of its picture in docs/, in pixels."""


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--home", type=Path, default=ROOT / "build/tour/home", help="home of the runs")
    arguments.add_argument("--all", type=Path, metavar="DIR", help="writes every page in every form into DIR")
    chosen = arguments.parse_args()
    home = chosen.home.resolve()
    home.mkdir(parents=True, exist_ok=True)
    with services(home) as addresses, sync_playwright() as playwright:
        train(home)
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        pages = Pages(browser, home, addresses)
        if chosen.all:
            pages.take_all(chosen.all)
        else:
            pages.take_for_docs(ROOT / "docs")
        browser.close()


def rpg(home: Path, *words: str) -> str:
    """Runs `rpg` on the home and returns its standard output."""
    environment = os.environ | {"RPG_HOME": str(home)}
    done = subprocess.run(
        [RPG, *words], env=environment, stdout=subprocess.PIPE, text=True, check=True, cwd=home.parent
    )
    return done.stdout


@contextmanager
def services(home: Path) -> Iterator[dict[str, str]]:
    """Yields the addresses of the dashboard, the studies and the record, served meanwhile."""
    try:
        yield json.loads(rpg(home, "up", "--json"))
    finally:
        rpg(home, "down")


def train(home: Path) -> None:
    """Runs the tour's experiment, except for finished work."""
    (experiment,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/tour.md").read_text(encoding="utf-8"), re.DOTALL)
    spec = home.parent / "tour.yaml"
    spec.write_text(f"extends: {ROOT}/specs/experiments/quickstart.yaml\n{experiment}", encoding="utf-8")
    rpg(home, "run", str(spec))


class Pages:
    """The product's pages in a browser."""

    def __init__(self, browser: Browser, home: Path, addresses: dict[str, Any]) -> None:
        self._browser, self._home, self._addresses = browser, home, addresses
        self._login = Path(addresses["password"]).read_text(encoding="ascii")
        experiment = json.loads((home / "experiments/tour/experiment.json").read_text(encoding="utf-8"))
        run_id = experiment["runs"][0]
        record = addresses["record"]
        self._of_record = {
            "report": f"{record}/experiments/tour",
            "run": f"{record}/runs/{run_id}",
            "live": f"{record}/live?of=tour",
            "record": record,
        }

    @contextmanager
    def open(self, name: str, width: int = 1280, height: int = 900, *, dark: bool = False) -> Iterator[Page]:
        """Opens a page, logged in, and waits until it is drawn."""
        user, _, password = self._login.partition(":")
        context = self._browser.new_context(
            viewport={"width": width, "height": height},
            color_scheme="dark" if dark else "light",
            http_credentials={"username": user, "password": password, "origin": self._addresses["record"]},
        )
        context.set_default_timeout(PATIENCE)
        page = context.new_page()
        if name == "dashboard-experiment":
            self._open_dashboard(page)
        else:
            if not (answer := page.goto(self._of_record[name])) or not answer.ok:
                sys.exit(f"{page.url} cannot be opened: {page.content()[:200]}")
            if name != "record":
                page.locator("figure.chart svg").first.wait_for()
            if name == "live":
                page.evaluate("(async () => { await drawing; })()")
            page.wait_for_timeout(6000)  # until the others are drawn too
        yield page
        context.close()

    def _open_dashboard(self, page: Page) -> None:
        """Opens the experiment's page on the Prefect dashboard."""
        page.goto(self._addresses["dashboard"])
        page.get_by_placeholder("admin:pass").fill(self._login)
        page.get_by_role("button", name="Login").click()
        page.wait_for_url("**/dashboard**")
        page.goto(f"{self._addresses['dashboard']}/v2/artifacts/key/tour")
        page.locator("a[href*='/artifacts/artifact/']").first.click()
        page.wait_for_url("**/artifacts/artifact/**")
        page.wait_for_timeout(4000)

    def take_all(self, directory: Path) -> None:
        """Writes each page in each form."""
        directory.mkdir(parents=True, exist_ok=True)
        for name in (*self._of_record, "dashboard-experiment"):
            for width in (1280, 390):
                for dark in (False, True):
                    with self.open(name, width, dark=dark) as page:
                        path = directory / f"{name}-{width}-{'dark' if dark else 'light'}.png"
                        page.screenshot(path=path, full_page=True)

    def take_for_docs(self, directory: Path) -> None:
        """Writes the pictures of the docs: the upper part of each page."""
        for name, height in HEIGHTS.items():
            with self.open(name, WIDTH, height) as page:
                shot = Image.open(io.BytesIO(page.screenshot()))
            path = directory / f"{name}.png"
            shot.convert("P", palette=Image.Palette.ADAPTIVE, colors=128).save(path, optimize=True)
            if path.stat().st_size > MOST_BYTES:
                sys.exit(f"{path} has {path.stat().st_size} bytes, above {MOST_BYTES}: lower its height")


if __name__ == "__main__":
    main()
