"""A database of Prefect's on SQLite to begin a home with: what its hundred migrations make of an empty one.

Migrating takes longer than a tiny run. The first server of this user that has done it for a new home leaves a copy, and
each further home of the same version of Prefect begins with that.
"""

import os
import shutil
import sqlite3
from contextlib import closing, suppress
from importlib.metadata import version
from pathlib import Path

from specs.machine.files import DiskError, replacing

_EMPTY = "SELECT NOT EXISTS (SELECT * FROM flow_run) AND NOT EXISTS (SELECT * FROM configuration)"
"""Whether a database holds nothing of anybody's: neither runs, nor what a server has made for itself, such as a key."""


def begin_with_template(database: Path) -> bool:
    """Puts a copy of the template where there is no database yet. Returns whether there was none: where there is no
    template either, the server that makes the database has one to keep."""
    if database.exists():
        return False
    with suppress(OSError, DiskError), replacing(database) as aside:
        shutil.copyfile(_template(), aside)
    return True


def keep_template(database: Path) -> None:
    """Keeps a copy of a database that a server has just made, as the template for the next home, unless there is one.
    Where it cannot be written, the next home is migrated too."""
    with suppress(OSError, DiskError, sqlite3.Error):
        if (template := _template()).exists():
            return
        with replacing(template) as aside, closing(sqlite3.connect(database)) as made:
            made.execute("VACUUM INTO ?", [str(aside)])
            os.chmod(aside, 0o600)
            with closing(sqlite3.connect(aside)) as copy:
                if copy.execute(_EMPTY).fetchone() != (1,):
                    raise sqlite3.DataError("runs are in it")


def _template() -> Path:
    from huggingface_hub import cached_assets_path

    return cached_assets_path("rpg", "prefect", "databases") / f"{version('prefect')}.db"
