"""A failed statement, explained to whoever typed it."""

import difflib
import re

import duckdb

_MISSING_TABLE = re.compile(r"Table with name (\S+) does not exist")
_SHUT = ("file system operations are disabled", "disabled by configuration", "disabled through configuration")


def explain(connection: duckdb.DuckDBPyConnection, error: duckdb.Error) -> str:
    """The message to show. A table that does not exist gets the nearest name and the list of those there are."""
    text = str(error).strip()
    if missing := _MISSING_TABLE.search(text):
        return _missing_table(connection, missing[1])
    if any(part in text for part in _SHUT):
        return "this query reaches for something outside the store; only what is recorded can be read"
    return text


def is_about_files(error: duckdb.Error) -> bool:
    """Whether a file is at fault and not the statement. (A damaged page header raises a bare Error.)"""
    return type(error) in (duckdb.Error, duckdb.IOException, duckdb.InternalException) or ".parquet" in str(error)


def table_names(connection: duckdb.DuckDBPyConnection) -> list[str]:
    """The tables and views that anyone may query."""
    rows = connection.execute(
        "SELECT table_name FROM information_schema.tables WHERE table_catalog = 'memory' AND table_schema = 'main'"
        " ORDER BY table_name"
    ).fetchall()
    return [name for (name,) in rows]


def _missing_table(connection: duckdb.DuckDBPyConnection, name: str) -> str:
    names = table_names(connection)
    lines = [f"there is no table or view `{name}`", f"  there are: {', '.join(names)}"]
    if near := difflib.get_close_matches(name.lower(), names, n=1):
        lines.append(f"  hint: did you mean `{near[0]}`?")
    return "\n".join(lines)
