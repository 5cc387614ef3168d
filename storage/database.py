"""The DuckDB file: an index that can be made again. It is never written in place.

An ingest works on a copy and publishes it by rename, so whoever has the old file open goes on reading what it was,
nobody waits, and a killed ingest leaves nothing but the copy.
"""

import hashlib
import json
import os
import re
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import duckdb

_HERE = Path(__file__).parent


def database_path(root: Path) -> Path:
    """Where the file lies."""
    return root / "experiments.duckdb"


def working_path(root: Path) -> Path:
    """Where an ingest prepares the next one."""
    return root / "experiments.duckdb.ingesting"


@cache
def sql(name: str) -> str:
    """The text of a SQL file of this package."""
    return (_HERE / name).read_text(encoding="utf-8")


@cache
def schema_version() -> str:
    """Number and digest of the schema that this code writes."""
    text = sql("schema.sql") + sql("catalogue.sql")
    number = re.search(r"^-- version: (\d+)$", text, re.MULTILINE)
    assert number, "schema.sql carries no version"
    return f"{number[1]}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def quoted(text: object) -> str:
    """A SQL string literal."""
    return "'" + str(text).replace("'", "''") + "'"


def connect(path: str | Path = ":memory:") -> duckdb.DuckDBPyConnection:
    """A connection whose times are UTC and which sees no Python variables."""
    connection = duckdb.connect(str(path))
    connection.execute("SET TimeZone = 'UTC'; SET python_enable_replacements = false")
    return connection


def attach(connection: duckdb.DuckDBPyConnection, root: Path) -> str | None:
    """Attaches the file read-only as `store`. Returns why it cannot serve, else None; `missing` where there is none."""
    path = database_path(root)
    if not path.exists():
        return "missing"
    try:
        connection.execute(f"ATTACH {quoted(path)} AS store (READ_ONLY)")
        found = connection.execute("SELECT version FROM store.recorded.version").fetchall()
    except duckdb.Error as error:
        return f"unreadable: {str(error).splitlines()[0]}"
    if found != [(schema_version(),)]:
        connection.execute("DETACH store")
        return f"of schema version {found[0][0] if found else '?'}, this is {schema_version()}"
    return None


def create(root: Path) -> duckdb.DuckDBPyConnection:
    """An empty database at the working path."""
    discard_working_copy(root)
    connection = connect(working_path(root))
    connection.execute(sql("schema.sql"))
    connection.execute(sql("catalogue.sql"))
    connection.execute("INSERT INTO recorded.version VALUES (?)", [schema_version()])
    return connection


def open_copy(root: Path) -> duckdb.DuckDBPyConnection:
    """The present database, copied to the working path."""
    discard_working_copy(root)
    shutil.copyfile(database_path(root), working_path(root))
    return connect(working_path(root))


def publish(root: Path) -> None:
    """The working copy, closed before, becomes the database in one step."""
    working = working_path(root)
    with open(working, "rb") as file:
        os.fsync(file.fileno())
    # A log that another program left behind belongs to the file that is replaced here.
    database_path(root).with_name("experiments.duckdb.wal").unlink(missing_ok=True)
    os.replace(working, database_path(root))
    directory = os.open(root, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def discard_working_copy(root: Path) -> None:
    """Removes what a killed ingest left."""
    working = working_path(root)
    working.unlink(missing_ok=True)
    working.with_name(working.name + ".wal").unlink(missing_ok=True)


def insert_rows(connection: duckdb.DuckDBPyConnection, table: str, rows: list[dict[str, Any]]) -> None:
    """Plain rows into a table, by the names of its columns; other keys are left out, missing ones are NULL."""
    if not rows:
        return
    described = connection.execute(f"SELECT column_name, column_type FROM (DESCRIBE {table})").fetchall()
    structure = json.dumps([dict(described)])
    names = ", ".join(f"s.{name}" for name, _ in described)
    connection.execute(
        f"INSERT INTO {table} SELECT {names} FROM (SELECT unnest(from_json(?::JSON, ?)) AS s)",
        [json.dumps(rows, default=str), structure],
    )
