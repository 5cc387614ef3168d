"""`rpg runs --disk`: disk space of each run and of shared results."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipelines.home.garbage import size_of
from pipelines.home.home import Home

PARTS = ("weights", "checkpoints", "segments")
"""Directories of a run that grow with training; the page and the evaluations are most of the rest."""


def disk_rows(home: Home, run_ids: list[str]) -> tuple[list[str], list[list[Any]]]:
    """Returns the bytes of each run by content, and of the results that runs share; the largest last."""
    rows = [_of_run(home.run(run_id)) for run_id in run_ids]
    return ["run", "weights", "checkpoints", "rows", "bytes"], sorted(rows, key=lambda row: row[-1])


def shared_bytes(home: Home) -> int:
    """Returns the bytes of the results that several runs share, which `rpg gc` frees once no run needs them."""
    return size_of(home.root / "artifacts")


def _of_run(directory: Path) -> list[Any]:
    parts = [size_of(directory / part) for part in PARTS]
    return [directory.name, *parts, size_of(directory)]


def in_words(rows: list[list[Any]]) -> Iterator[list[Any]]:
    """Yields the rows with readable sizes."""
    for name, *sizes in rows:
        yield [name, *(size_text(size) for size in sizes)]


def size_text(size: int) -> str:
    """Formats a size: `3.2 GiB`, `18.0 MiB`."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
