"""A database of Prefect's on SQLite to begin a home with: what its hundred migrations make of an empty one.

Migrating takes longer than a tiny run. The first server of this user that has done it for a new home leaves a copy in
the user's own cache, and each further home of the same version of Prefect begins with that.

What keeps others from changing it is that directory: it has mode 0700, and each use checks it. That a template holds no
trigger, no view and no rows of a server's is a second check. Its schema is compared with nothing: a digest beside it
could be written by whoever can write the template.
"""

import os
import shutil
import sqlite3
from contextlib import closing, suppress
from importlib.metadata import version
from pathlib import Path

from specs.machine.files import DiskError, replacing
from specs.machine.own_cache import place_to_save_time

_MIGRATED = ("alembic_version", "block_schema", "block_schema_reference", "block_type")
"""Tables that migrations fill. A server fills others, with runs or with a key of its own."""


def begin_with_template(database: Path) -> bool:
    """Puts a copy of the template where there is no database yet. Returns whether there was none: where there is no
    template either, the server that makes the database has one to keep."""
    if database.exists():
        return False
    if template := _template():
        with suppress(OSError, DiskError, sqlite3.Error), replacing(database) as aside:
            shutil.copyfile(template, aside)
            _check_untouched(aside)
    return True


def keep_template(database: Path) -> None:
    """Keeps a copy of a database that a server has just made, as the template for the next home, unless there is one.
    Where it cannot be written, the next home is migrated too."""
    with suppress(OSError, DiskError, sqlite3.Error):
        if not (template := _template()) or template.exists():
            return
        with replacing(template) as aside, closing(sqlite3.connect(database)) as made:
            made.execute("VACUUM INTO ?", [str(aside)])
            os.chmod(aside, 0o600)
            _check_untouched(aside)


def _check_untouched(path: Path) -> None:
    """Raises sqlite3.DataError if a database holds more than migrations make. Prefect's make no trigger and no view,
    and fill a few tables only."""
    with closing(sqlite3.connect(path)) as database:
        kinds = dict(database.execute("SELECT name, type FROM sqlite_master"))
        if odd := {*kinds.values()} - {"table", "index"}:
            raise sqlite3.DataError(f"it has a {min(odd)}")
        for table in (name for name, kind in kinds.items() if kind == "table" and name not in _MIGRATED):
            if database.execute(f'SELECT EXISTS (SELECT * FROM "{table}")').fetchone() != (0,):
                raise sqlite3.DataError(f"{table} has rows")


def _template() -> Path | None:
    return place_to_save_time("prefect", "databases", f"{version('prefect')}.db")
