"""An answer's rows as text that DuckDB itself writes: many times faster than value by value in Python.

It writes what `pipelines.cli.output` writes of Python's values, of the types that tables hold. An answer with a column
of another type, such as a list, is left to that.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Literal

from storage.database import quoted

Form = Literal["csv", "json"]

_WHOLE = ("TINYINT", "SMALLINT", "INTEGER", "BIGINT", "HUGEINT", "UTINYINT", "USMALLINT", "UINTEGER", "UBIGINT")
_REAL = ("FLOAT", "DOUBLE")
_TIME = (
    "CASE WHEN isfinite({0}) THEN concat(replace(strftime({0}, '%Y-%m-%dT%H:%M:%S.%f'), '.000000', ''), '+00:00')"
    " ELSE {0}::VARCHAR END"
)
"""A time as ISO 8601, parts of a second where there are any. A connection's times are UTC."""
_EMPTY = "''"
_IN_QUOTES = " OR ".join(f"contains({{0}}, {character})" for character in ("','", "'\"'", "chr(10)", "chr(13)"))
_CSV: Mapping[str, str] = {
    **dict.fromkeys(_WHOLE, "{0}::VARCHAR"),
    **dict.fromkeys(_REAL, "{0}::DOUBLE::VARCHAR"),
    "BOOLEAN": "CASE WHEN {0} THEN 'True' WHEN NOT {0} THEN 'False' END",
    "TIMESTAMP WITH TIME ZONE": _TIME,
    "VARCHAR": f"CASE WHEN {_IN_QUOTES} THEN concat('\"', replace({{0}}, '\"', '\"\"'), '\"') ELSE {{0}} END",
}
_JSON: Mapping[str, str] = {
    **dict.fromkeys(_WHOLE, "{0}::VARCHAR"),
    **dict.fromkeys(_REAL, "CASE WHEN isfinite({0}) THEN {0}::DOUBLE::VARCHAR END"),
    "BOOLEAN": "{0}::VARCHAR",
    "TIMESTAMP WITH TIME ZONE": f"'\"' || {_TIME} || '\"'",
    "VARCHAR": "to_json({0})::VARCHAR",
}


def written_by_duckdb(sql: str, columns: Sequence[tuple[str, str]], form: Form) -> str | None:
    """The query whose only column is each row of another one as text: a line of CSV, or an object.

    Args:
        columns: name and type of each column of `sql`.
    Returns:
        None where a column is of a type that is not written here, or no object can have its names.
    """
    writers = _CSV if form == "csv" else _JSON
    if any(kind not in writers for _, kind in columns):
        return None
    names = [f"c{index}" for index in range(len(columns))]
    values = [writers[kind].format(name) for name, (_, kind) in zip(names, columns, strict=True)]
    if form == "json" and len({name for name, _ in columns}) < len(columns):
        return None
    row = _line(values) if form == "csv" else _object([name for name, _ in columns], values)
    return f"SELECT {row} FROM ({sql}\n) AS answer({', '.join(names)})"


def _line(values: Sequence[str]) -> str:
    if len(values) == 1:  # an empty line would be none
        return f"coalesce(nullif({values[0]}, ''), '\"\"')"
    return f"concat_ws(',', {', '.join(f'coalesce({value}, {_EMPTY})' for value in values)})"


def _object(names: Sequence[str], values: Sequence[str]) -> str:
    parts = []
    for index, (name, value) in enumerate(zip(names, values, strict=True)):
        key = json.dumps(name, ensure_ascii=False)
        before = "," if index else "\n {"
        parts += [quoted(f"{before}\n  {key}: "), f"coalesce({value}, 'null')"]
    return f"concat({', '.join(parts)}, {quoted(chr(10) + ' }')})"
