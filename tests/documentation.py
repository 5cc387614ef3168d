"""The pages of the documentation and the fenced blocks on them."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY", "CHANGELOG")),
    *sorted((ROOT / "docs").rglob("*.md")),
]

_BLOCK = re.compile(r"(?:^<!-- not run: (?P<why>[^\n]+) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S)


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    page: Path
    line: int
    language: str
    text: str
    not_run: str
    """Reason, from the comment above it, why it is only shown; empty if it runs."""

    @property
    def file(self) -> str:
        """The file that its first line says it is (`# file: NAME`), for the commands of its page; empty: none."""
        named = re.match(r"# file: (\S+)\n", self.text)
        return named[1] if named else ""

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(*languages: str) -> list[Block]:
    """The blocks of all pages, or those of these languages that run."""
    every = [block for page in PAGES for block in _blocks_of(page)]
    return [block for block in every if block.language in languages and not block.not_run] if languages else every


def _blocks_of(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for match in _BLOCK.finditer(text):
        line = text.count("\n", 0, match.start("language")) + 1
        yield Block(page, line, match["language"], match["text"], match["why"] or "")


def build_site(directory: Path) -> str:
    """Builds the pages as `make docs` does, into a directory; returns what mkdocs printed. Fails at any warning."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(directory)]
    # What mkdocs-material says of another program's future, at each start, is switched off by its variable.
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert built.returncode == 0, built.stderr
    return built.stderr
