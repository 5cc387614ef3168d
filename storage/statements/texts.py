"""Conversion of an answer's rows to text by DuckDB, which is many times faster than value by value in Python.

For the types of the recorded tables, the text equals the text of `pipelines.cli.output` for Python's values.
`pipelines.cli.output` itself writes an answer with a column of another type, such as a list.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Literal

from storage.database import quoted

Form = Literal["csv", "json", "parquet", "table"]
_AS_TEXT = r"INTERVAL|TIME_NS|TIMESTAMP_NS|GEOMETRY|VARIANT"
"""Types whose values neither Python nor Parquet can represent exactly. A month, for example, would become thirty
days."""
_NOT_IN = {
    "parquet": re.compile(rf"\b({_AS_TEXT}|TIME WITH TIME ZONE|UHUGEINT|BIT|BIGNUM|UNION)\b|\bHUGEINT\b."),
    "rows": re.compile(rf"\b({_AS_TEXT}|BLOB)\b"),
}
"""Types, also nested ones, that are written as DuckDB's text. Only a HUGEINT, the type of sums, is an integer in
Parquet."""

_WHOLE = ("TINYINT", "SMALLINT", "INTEGER", "BIGINT", "HUGEINT", "UTINYINT", "USMALLINT", "UINTEGER", "UBIGINT")
_REAL = ("FLOAT", "DOUBLE")
_TIME = (
    "CASE WHEN isfinite({0}) THEN concat(replace(strftime({0}, '%Y-%m-%dT%H:%M:%S.%f'), '.000000', ''), '+00:00')"
    " ELSE {0}::VARCHAR END"
)
"""SQL for a time in ISO 8601, with parts of a second if there are any. A connection's times are UTC."""
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
    """Returns a query whose only column has each row of `sql` as text: a line of CSV, or a JSON object.

    Args:
        columns: name and type of each column of `sql`.
    Returns:
        None if a column has an unsupported type, or an object cannot have its names.
    """
    if form not in ("csv", "json"):
        return None
    writers = _CSV if form == "csv" else _JSON
    places = [f"c{index}" for index in range(len(columns))]
    read = [_read(place, kind, form) for place, (_, kind) in zip(places, columns, strict=True)]
    if any(kind not in writers for _, kind in read):
        return None
    values = [writers[kind].format(value) for value, kind in read]
    row = _line(values) if form == "csv" else _object(distinct([name for name, _ in columns]), values)
    return f"SELECT {row} FROM ({sql}\n) AS answer({', '.join(places)})"


def changed_by(form: Form, columns: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Returns the columns, by name and type, whose values a form would change, so that they must be written as text."""
    return [(name, kind) for name, kind in columns if _read("", kind, form)[1] != kind]


def with_texts(sql: str, columns: Sequence[tuple[str, str]], form: Form) -> str:
    """Returns the query with these columns as text, under the same names."""
    places = [f"c{index}" for index in range(len(columns))]
    values = [_read(place, kind, form)[0] for place, (_, kind) in zip(places, columns, strict=True)]
    named = [
        f'{value} AS "{name.replace(chr(34), 2 * chr(34))}"' for value, (name, _) in zip(values, columns, strict=True)
    ]
    return f"SELECT {', '.join(named)} FROM ({sql}\n) AS answer({', '.join(places)})"


def distinct(names: Sequence[str]) -> list[str]:
    """Returns the names of columns, with a number appended to each name that occurs before.

    >>> distinct(["a", "b", "a", "a_1", "a"])
    ['a', 'b', 'a_2', 'a_1', 'a_3']
    """
    found: list[str] = []
    for name in names:
        new, number = name, 0
        while new in found or (number and new in names):
            number += 1
            new = f"{name}_{number}"
        found.append(new)
    return found


def _read(value: str, kind: str, form: Form) -> tuple[str, str]:
    """Returns the expression and the type with which a column's value is read for a form."""
    changes = _NOT_IN["parquet" if form == "parquet" else "rows"].search(kind)
    return (f"{value}::VARCHAR", "VARCHAR") if changes else (value, kind)


def _line(values: Sequence[str]) -> str:
    if len(values) == 1:  # an empty line would not count as a row
        return f"coalesce(nullif({values[0]}, ''), '\"\"')"
    return f"concat_ws(',', {', '.join(f'coalesce({value}, {_EMPTY})' for value in values)})"


def _object(names: Sequence[str], values: Sequence[str]) -> str:
    parts = []
    for index, (name, value) in enumerate(zip(names, values, strict=True)):
        key = json.dumps(name, ensure_ascii=False)
        before = "," if index else "\n {"
        parts += [quoted(f"{before}\n  {key}: "), f"coalesce({value}, 'null')"]
    return f"concat({', '.join(parts)}, {quoted(chr(10) + ' }')})"
