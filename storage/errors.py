"""Errors of a query, explained to the person who wrote it."""

import difflib
import re
from pathlib import Path

import duckdb

from specs.errors import RpgError

_MISSING_TABLE = re.compile(r"Table with name (\S+) does not exist")
_SHUT = ("file system operations are disabled", "disabled by configuration", "disabled through configuration")
_OF_FILES = (duckdb.Error, duckdb.IOException, duckdb.InternalException, duckdb.FatalException)
"""DuckDB's errors for a damaged or missing file. (A damaged page header raises a bare Error.)"""


class QueryError(RpgError):
    """Error for a user's SQL that cannot run. `str()` is the whole message, which is shown unchanged."""


def explain(connection: duckdb.DuckDBPyConnection, error: duckdb.Error) -> str:
    """Returns the message to show. For a missing table it includes the nearest name and the list of existing tables."""
    text = str(error).strip()
    if missing := _MISSING_TABLE.search(text):
        return _missing_table(connection, missing[1])
    if any(part in text for part in _SHUT):
        return "this query accesses something outside the store; it can read only the record"
    return text


def is_about_files(error: duckdb.Error, root: Path) -> bool:
    """Returns whether a file of a home's runs caused the error, not the statement or a value that the message
    quotes."""
    text = str(error)
    if any(part in text for part in _SHUT):
        return False
    named = isinstance(error, duckdb.InvalidInputException) and f"{root}/runs/" in text and ".parquet" in text
    return named or type(error) in _OF_FILES


def _missing_table(connection: duckdb.DuckDBPyConnection, name: str) -> str:
    rows = connection.execute(
        "SELECT table_name FROM information_schema.tables WHERE table_catalog = 'memory' AND table_schema = 'main'"
        " ORDER BY table_name"
    ).fetchall()
    names = [str(row[0]) for row in rows]
    lines = [f"there is no table or view `{name}`", f"  there are: {', '.join(names)}"]
    if near := difflib.get_close_matches(name.lower(), names, n=1):
        lines.append(f"  hint: did you mean `{near[0]}`?")
    return "\n".join(lines)
