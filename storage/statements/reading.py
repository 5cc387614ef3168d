"""Check of statements: only those that read the record are allowed.

DuckDB's settings close the files outside the record, the settings and the extensions: see
`storage.statements.limits.confine`. This module refuses three kinds of access that DuckDB has no setting for. A
statement could write into the runs' directories, because it may read them. It could read a run's files that contain no
table. And some functions write, wait, return settings, or take addresses of memory.
"""

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import duckdb

from storage.database import quoted
from storage.errors import QueryError

_OUTSIDE = "the function `{}` accesses something outside the store; queries can read only the record"
_SEVERAL = "more than one statement; give them one at a time"
_PLAIN_NAME = re.compile(r"[\w $-]*")
"""Pattern of names that DuckDB cannot interpret as a file's, because file names have a suffix."""
_PRAGMAS = {
    "database_size": "FROM pragma_database_size",
    "show_tables": "SHOW TABLES",
    "show_tables_expanded": "SHOW ALL TABLES",
    "table_info": "FROM pragma_table_info",
    "version": "FROM pragma_version",
}
"""Pragmas about tables, as programs send them -> equivalent query, up to the end of the name."""
_NODES = {"SELECT_NODE", "SET_OPERATION_NODE", "RECURSIVE_CTE_NODE", "CTE_NODE"}
_END_OF_PIVOT_COLUMN = {"using", "group", "order", "limit", ",", ")", ";"}
_TABLE = """
duckdb_columns duckdb_constraints duckdb_functions duckdb_indexes duckdb_keywords duckdb_memory duckdb_schemas
duckdb_tables duckdb_types duckdb_views generate_series icu_calendar_names json_each json_tree pg_timezone_names
pragma_database_size pragma_show pragma_table_info pragma_version range repeat repeat_row summary test_all_types
unnest
"""
TABLE = frozenset(_TABLE.split())
"""Functions that may follow FROM or CALL. The others read files, settings or memory, or write."""
_REFUSED = "current_setting currval getenv getvariable json_serialize_plan nextval pg_sleep setseed sleep_ms write_log"
REFUSED = frozenset(_REFUSED.split())
"""Functions of values that write, wait, or read settings, the environment or files. Other functions only compute."""


def require_reading(connection: duckdb.DuckDBPyConnection, sql: str) -> None:
    """Raises QueryError unless the text is one statement that only reads the record; duckdb.Error if it is not SQL."""
    if "\0" in sql or any("\ud800" <= char <= "\udfff" for char in sql):
        raise QueryError("the query is not text: some of its bytes are not characters")
    text = _what_runs(connection, sql)
    parsed = _parse(connection, text)
    if parsed["error"] and parsed["error_type"] == "not implemented":
        # For DuckDB a PIVOT that finds its columns by itself is two statements; with given columns it is one.
        parsed = _parse(connection, _with_pivot_columns(text))
    if parsed["error"]:
        if parsed["error_type"] == "parser":
            connection.extract_statements(sql)  # raises the same error, with the position
        raise QueryError(_not_a_query(text))
    if len(parsed["statements"]) != 1:
        raise QueryError(_SEVERAL if parsed["statements"] else "the query is empty")
    for node in _nodes(parsed["statements"][0]["node"]):
        _check(connection, node)


def _what_runs(connection: duckdb.DuckDBPyConnection, sql: str) -> str:
    """Returns the statement inside EXPLAIN, the query equivalent to a CALL or PRAGMA, else the text itself."""
    tokens = _tokens(sql)
    if not tokens:
        raise QueryError("the query is empty")
    words = [word.lower() for _, word in tokens]
    if words[0] == "call":
        return "FROM " + _after(sql, tokens, 1)
    if words[0] == "pragma" and "=" not in words and (query := _PRAGMAS.get("".join(words[1:2]))):
        return query + _after(sql, tokens, 2)
    if words[0] != "explain":
        return sql
    start = 2 if words[1:2] == ["analyze"] else 1
    rest = _after(sql, tokens, start)
    if words[start : start + 1] == ["("] and _parse(connection, rest)["error"]:
        return _after(sql, tokens, words.index(")") + 1 if ")" in words else start)  # those are options
    return rest


def _tokens(sql: str) -> list[tuple[int, str]]:
    """Returns each token of the text except comments: the byte at which it starts, and the token."""
    content = sql.encode()
    starts = [start for start, _ in duckdb.tokenize(sql)]
    return [
        (start, content[start:end].decode(errors="replace").split("--")[0].split("/*")[0].strip())
        for start, end in pairwise([*starts, len(content)])
    ]


def _after(sql: str, tokens: list[tuple[int, str]], number: int) -> str:
    """Returns the text without its first tokens."""
    return sql.encode()[tokens[number][0] :].decode() if number < len(tokens) else ""


def _parse(connection: duckdb.DuckDBPyConnection, sql: str) -> dict[str, Any]:
    """Returns DuckDB's own parse tree of the statements, without binding or running them."""
    row = connection.execute(f"SELECT json_serialize_sql({quoted(sql)}::VARCHAR)").fetchone()
    assert row
    try:
        parsed: dict[str, Any] = json.loads(row[0])
    except RecursionError:
        raise QueryError("the query is nested too deeply") from None
    return parsed


def _with_pivot_columns(sql: str) -> str:
    """Returns the text with `IN (0)` after each column of a PIVOT without IN. A digit does not affect quoting around
    it."""
    content, tokens = sql.encode(), _tokens(sql)
    pieces, copied, depth = [], 0, 0
    pivots: list[tuple[int, bool]] = []
    """Bracket depth of each PIVOT that encloses the current token, and whether its columns are being read."""
    has_values = False
    for start, token in [*tokens, (len(content), ";")]:
        word = token.lower()
        if pivots and pivots[-1] == (depth, True) and word in _END_OF_PIVOT_COLUMN:
            if not has_values:
                pieces.append(content[copied:start] + b" IN (0) ")
                copied = start
            has_values = False
            if word != ",":
                pivots.pop()
        elif pivots and pivots[-1] == (depth, False) and word == "on":
            pivots[-1], has_values = (depth, True), False
        elif pivots and pivots[-1] == (depth, True) and word == "in":
            has_values = True
        elif word in ("pivot", "pivot_wider"):
            pivots.append((depth, False))
        depth += (word == "(") - (word == ")")
    return b"".join([*pieces, content[copied:]]).decode()


def _not_a_query(sql: str) -> str:
    """Returns why a statement that DuckDB can parse is not read-only."""
    words = [token.upper() for _, token in _tokens(sql)]
    if ";" in words[:-1]:
        return _SEVERAL
    if "PIVOT" in words:
        return "this PIVOT cannot be checked; give each column's values: ON name IN ('a', 'b')"
    return _no_query(words[0])


def _no_query(kind: str) -> str:
    return f"{kind} is not a query: the record is read-only (SELECT, DESCRIBE, EXPLAIN, ...)"


def _nodes(tree: Any) -> Iterator[dict[str, Any]]:
    """Yields every object in DuckDB's parse tree, from the root downwards."""
    waiting = [tree]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            yield part
            waiting += part.values()
        elif isinstance(part, list):
            waiting += part


def _check(connection: duckdb.DuckDBPyConnection, node: dict[str, Any]) -> None:
    kind = str(node.get("type"))
    if kind.endswith("_NODE") and kind not in _NODES:
        raise QueryError(_no_query(kind.removesuffix("_NODE")))
    if kind == "BASE_TABLE":
        names = [node["catalog_name"], node["schema_name"], node["table_name"]]
        if not all(map(_PLAIN_NAME.fullmatch, names)):
            name = ".".join(filter(None, names))
            raise QueryError(f"`{name}` is not a table or view: it accesses something outside the store")
    elif kind == "TABLE_FUNCTION":
        function, node["function"] = node["function"], node["function"]["children"]  # those are functions of values
        name = function["function_name"]
        known = "SELECT 1 FROM duckdb_functions() WHERE lower(function_name) = lower(?)"
        if name.lower() not in TABLE and connection.execute(known, [name]).fetchone():
            raise QueryError(_OUTSIDE.format(name))
    elif str(node.get("function_name")).lower() in REFUSED:
        raise QueryError(_OUTSIDE.format(node["function_name"]))
