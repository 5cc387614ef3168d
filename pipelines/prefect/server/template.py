"""A template of Prefect's SQLite database for a new home: the result of about a hundred migrations of an empty
database.

Migrating takes longer than a tiny run. The first server of this user that migrates a new home's database leaves a copy
in the user's own cache, and each further home of the same version of Prefect starts with that copy.

The cache directory has mode 0700, and each use checks it: no other user can change the copy. A second check is that a
template has the schema of the migrations, and no rows of a server's.
"""

import hashlib
import os
import shutil
import sqlite3
from contextlib import closing, suppress
from importlib.metadata import version
from pathlib import Path

from specs.machine.files import DiskError, replacing
from specs.machine.own_cache import place_to_save_time

_SCHEMAS = {"3.7.7": "957e223c8b49fe8c0717f359356186b839ddd565bda8677d5b180eda1ff3ac63"}
"""Version of Prefect -> digest of the schema that its migrations make. For other versions no template is kept."""
_MIGRATED = ("alembic_version", "block_schema", "block_schema_reference", "block_type")
"""Tables that migrations fill. A running server fills others, with runs or with its own key."""


def begin_with_template(database: Path) -> bool:
    """Copies the template to a path without a database. Returns whether the path had no database. If there is no
    template either, the server that makes the database should keep one."""
    if database.exists():
        return False
    if template := _template():
        with suppress(OSError, DiskError, sqlite3.Error), replacing(database) as aside:
            shutil.copyfile(template, aside)
            _check_untouched(aside)
    return True


def keep_template(database: Path) -> None:
    """Keeps a copy of a database that a server has just made as the template for the next home, unless a template
    exists. If the copy cannot be written, the next home is migrated too."""
    with suppress(OSError, DiskError, sqlite3.Error):
        if not (template := _template()) or template.exists():
            return
        with replacing(template) as aside, closing(sqlite3.connect(database)) as made:
            made.execute("VACUUM INTO ?", [str(aside)])
            os.chmod(aside, 0o600)
            _check_untouched(aside)


def _check_untouched(path: Path) -> None:
    """Raises sqlite3.DataError if a database differs from the migrations' schema, or has rows in tables that they
    leave empty."""
    with closing(sqlite3.connect(path)) as database:
        if schema_of(database) != _SCHEMAS[version("prefect")]:
            raise sqlite3.DataError("its schema is not that of Prefect's migrations")
        tables = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
        for table in {name for (name,) in tables} - {*_MIGRATED}:
            if database.execute(f'SELECT EXISTS (SELECT * FROM "{table}")').fetchone() != (0,):
                raise sqlite3.DataError(f"{table} has rows")


def schema_of(database: sqlite3.Connection) -> str:
    """Returns the digest of a database's tables, indices, views and triggers. The lines of a statement are sorted:
    Prefect writes the constraints of a table in any order."""
    made = database.execute("SELECT type, name, tbl_name, ifnull(sql, '') FROM sqlite_master ORDER BY type, name")
    told = [(*names, sorted(line.strip(", \t") for line in sql.splitlines())) for *names, sql in made]
    return hashlib.sha256(repr(told).encode()).hexdigest()


def _template() -> Path | None:
    known = version("prefect")
    return place_to_save_time("prefect", "databases", f"{known}.db") if known in _SCHEMAS else None
