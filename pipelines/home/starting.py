"""Experiments and studies that a command of this machine is starting: their runs are not recorded yet."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pipelines.home.home import Home
from specs.errors import RpgError
from specs.machine.files import read_json, write_json
from specs.machine.liveness import is_alive, is_visible, pid_namespace_here, start_of


@contextmanager
def announced(home: Home, name: str) -> Iterator[Callable[[], None]]:
    """Tells other commands that this process is starting an experiment or a study.

    Yields:
        A function to call once its runs are recorded. The end of the block calls it too; a home that was created for
        the note alone is then removed.
    """
    note, is_new = _notes(home) / f"{os.getpid()}.json", not home.root.exists()
    process = {"pid": os.getpid(), "started": start_of(os.getpid()), "pid_namespace": pid_namespace_here()}
    with suppress(OSError, RpgError):
        home.create()
        note.parent.mkdir(parents=True, exist_ok=True)
        for other in note.parent.glob("*.json"):
            if not _is_live(read_json(other)):  # its command was killed
                other.unlink(missing_ok=True)
        write_json(note, {"name": name, **process})

    def recorded() -> None:
        with suppress(OSError):
            note.unlink(missing_ok=True)

    try:
        yield recorded
    finally:
        recorded()
        with suppress(OSError):  # it has other files
            for directory in (note.parent, note.parent.parent, home.root) if is_new else ():
                directory.rmdir()


def starting(home: Home) -> list[str]:
    """Returns the experiments and studies that a live command is starting."""
    notes = [read_json(path) for path in sorted(_notes(home).glob("*.json"))]
    return [note["name"] for note in notes if _is_live(note)]


def _is_live(note: dict[str, Any]) -> bool:
    return is_visible(note.get("pid_namespace", "")) and is_alive(note.get("pid"), note.get("started"))


def _notes(home: Home) -> Path:
    return home.root / "locks" / "starting"
