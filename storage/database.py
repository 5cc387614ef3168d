"""The DuckDB file, an index that can be rebuilt from the segments. It is never written in place.

An ingest works on a copy and publishes the copy by a rename. So readers of the old file keep it open, no process waits,
and a killed ingest leaves only its copy.
"""

import hashlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import duckdb

from specs.machine.files import sync
from specs.records import TABLES
from storage.columns import columns

_HERE = Path(__file__).parent
_log = logging.getLogger("storage")
_ROWS_AT_ONCE = 20_000
"""Number of rows in one insert as JSON, so that its text stays small."""


def database_path(root: Path) -> Path:
    """Returns the path of the database."""
    return root / "experiments.duckdb"


def has_index(root: Path) -> bool:
    """Returns whether a home can have an index. It cannot if its path contains `?`: DuckDB would read the rest of the
    path as options, and put its log into another directory. Queries of such a home read the segments."""
    return "?" not in str(root)


def packs_path(root: Path) -> Path:
    """Returns the directory of the packs, which belong to the database: see `storage.merging.packs`."""
    return root / "packs"


def has_pack(root: Path, pack: str, num_bytes: int) -> bool:
    """Returns whether a pack's file exists with the expected size. `pack`: its path, relative to the home."""
    try:
        return (root / pack).stat().st_size == num_bytes
    except OSError:
        return False


def working_path(root: Path) -> Path:
    """Returns the path of the copy that an ingest works on."""
    return root / "experiments.duckdb.ingesting"


@cache
def sql(name: str) -> str:
    """Returns the text of a SQL file of this package."""
    return (_HERE / name).read_text(encoding="utf-8")


@cache
def schema_version() -> str:
    """Returns number and digest of the schema that this code writes, and of the columns of the segments that it
    lists."""
    text = "".join(sql(name) for name in ("schema.sql", "catalogue.sql", "queries/views.sql", "queries/rewards.sql"))
    text += "".join(f"{table}: {columns(table)}\n" for table in TABLES)
    number = re.search(r"^-- version: (\d+)$", text, re.MULTILINE)
    assert number, "schema.sql contains no version number"
    return f"{number[1]}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def quoted(text: object) -> str:
    """Returns a SQL string literal. The product's own queries use literals, because DuckDB's first bound parameter
    imports pandas, if it is installed, which takes a fifth of a second."""
    return "'" + str(text).replace("'", "''") + "'"


def file_literal(path: object) -> str:
    """Returns a SQL string literal that matches only this file, because DuckDB's readers treat a path as a pattern."""
    return quoted(as_pattern(path))


def as_pattern(path: object) -> str:
    """Returns the pattern that matches only this path."""
    return re.sub(r"[*?[]", r"[\g<0>]", str(path))


def quoted_list(texts: Iterable[str]) -> str:
    """Returns a SQL list of strings."""
    return f"[{', '.join(map(quoted, texts))}]::VARCHAR[]"


def connect(path: str | Path = ":memory:") -> duckdb.DuckDBPyConnection:
    """Returns a connection whose times are UTC. SQL cannot read the variables of the surrounding Python."""
    connection = duckdb.connect(str(path))
    # Segments never change: repeated queries need not read their footers again.
    connection.execute("SET parquet_metadata_cache = true")
    connection.execute("SET TimeZone = 'UTC'; SET python_enable_replacements = false")
    return connection


def attach(connection: duckdb.DuckDBPyConnection, root: Path) -> str | None:
    """Attaches the database read-only as `store`. Returns None, or why it is unusable: `missing` if it does not
    exist."""
    path = database_path(root)
    if not path.exists():
        return "missing"
    if not path.is_file():
        return "no file" if not path.is_dir() else "a directory"
    try:
        connection.execute(f"ATTACH {quoted(path)} AS store (READ_ONLY)")
        versions = connection.execute("SELECT version FROM store.recorded.version").fetchall()
    except duckdb.Error as error:
        return f"unreadable: {str(error).splitlines()[0]}"
    if versions != [(schema_version(),)]:
        connection.execute("DETACH store")
        return f"of schema version {versions[0][0] if versions else '?'}, this is {schema_version()}"
    return None


def create(root: Path) -> duckdb.DuckDBPyConnection:
    """Returns an empty database at the working path."""
    discard_working_copy(root)
    connection = connect(working_path(root))
    connection.execute("BEGIN")  # each statement by itself would wait for the disk
    create_tables(connection, "recorded")
    connection.execute(f"INSERT INTO recorded.version VALUES ({quoted(schema_version())})")
    connection.execute("COMMIT")
    return connection


def create_tables(connection: duckdb.DuckDBPyConnection, schema: str) -> None:
    """Creates the empty tables of schema.sql and catalogue.sql in their own schema."""
    connection.execute(f"CREATE SCHEMA {schema}; SET schema = '{schema}'")
    connection.execute(sql("schema.sql"))
    connection.execute(sql("catalogue.sql"))
    connection.execute("SET schema = 'main'")


def open_copy(root: Path) -> duckdb.DuckDBPyConnection:
    """Returns the present database, copied to the working path."""
    discard_working_copy(root)
    shutil.copyfile(database_path(root), working_path(root))
    return connect(working_path(root))


def damage_of_index(root: Path) -> str:
    """Returns DuckDB's message about a damaged block of the database; empty if all can be read.

    DuckDB verifies a block's checksum when it reads the block, so every row of every table is read.
    """
    with connect() as connection:
        if attach(connection, root):
            return ""
        try:
            tables = connection.execute(
                "SELECT schema_name, table_name FROM duckdb_tables() WHERE database_name = 'store'"
            ).fetchall()
            for schema, table in tables:
                connection.execute(f"SELECT bit_xor(hash(t)) FROM store.{schema}.{table} AS t").fetchall()
        except duckdb.Error as error:
            return str(error).splitlines()[0]
    return ""


def publish(root: Path) -> None:
    """Replaces the database by the working copy, which must be closed."""
    working = working_path(root)
    sync(working)
    # Another program's leftover log belongs to the replaced file.
    database_path(root).with_name("experiments.duckdb.wal").unlink(missing_ok=True)
    if database_path(root).is_dir():  # a user's directory, which is kept
        database_path(root).rename(aside := root / f"experiments.duckdb.{time.time_ns()}.directory")
        _log.warning("experiments.duckdb was a directory: it is %s now", aside)
    os.replace(working, database_path(root))
    sync(root)


def discard_working_copy(root: Path) -> None:
    """Removes a killed ingest's copy."""
    working = working_path(root)
    working.unlink(missing_ok=True)
    working.with_name(working.name + ".wal").unlink(missing_ok=True)


def insert_rows(connection: duckdb.DuckDBPyConnection, table: str, rows: list[dict[str, Any]]) -> None:
    """Inserts rows, whose keys are names of columns. Unknown keys are left out, and missing ones are NULL."""
    if not rows:
        return
    described = connection.execute(f"SELECT column_name, column_type FROM (DESCRIBE {table})").fetchall()
    structure = json.dumps([dict(described)])
    names = ", ".join(f's."{name}"' for name, _ in described)
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        listed = quoted(json.dumps(rows[start : start + _ROWS_AT_ONCE], default=str))
        connection.execute(
            f"INSERT INTO {table} SELECT {names} FROM (SELECT unnest(from_json({listed}, {quoted(structure)})) AS s)"
        )


def insert_plain_rows(connection: duckdb.DuckDBPyConnection, table: str, rows: list[dict[str, Any]]) -> None:
    """Inserts rows that contain only numbers and texts, about ten times as fast as `insert_rows`."""
    if rows:
        import pyarrow as pa  # here, so that a query that reads no segment starts sooner

        names = dict.fromkeys(name for row in rows for name in row)
        connection.register("incoming", pa.table({name: [row.get(name) for row in rows] for name in names}))
        connection.execute(f"INSERT INTO {table} BY NAME FROM incoming")
        connection.unregister("incoming")
