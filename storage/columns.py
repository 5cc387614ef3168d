"""The columns of each recorded table, derived from the row classes of `specs.records`."""

import types
import typing
from datetime import datetime
from functools import cache
from typing import Any

import pyarrow as pa

from specs.records import TABLES, Float32, Int32

NATIVE = ("events", "checkpoints", "evaluations")
"""Tables whose rows are copied into the DuckDB file."""
PARQUET = ("metrics", "rollouts", "tokens", "evaluation_samples")
"""Tables whose rows stay in their segments: millions of them, or long texts."""
EVALUATED = ("evaluations", "evaluation_samples")
"""Tables that the evaluate stage writes; the trainer writes all of them."""

_TYPES: dict[Any, tuple[pa.DataType, str]] = {
    int: (pa.int64(), "BIGINT"),
    float: (pa.float64(), "DOUBLE"),
    Float32: (pa.float32(), "FLOAT"),
    Int32: (pa.int32(), "INTEGER"),
    str: (pa.string(), "VARCHAR"),
    bool: (pa.bool_(), "BOOLEAN"),
    datetime: (pa.timestamp("us", tz="UTC"), "TIMESTAMP WITH TIME ZONE"),
}


@cache
def columns(table: str) -> tuple[tuple[str, pa.DataType, str], ...]:
    """(name, Arrow type, SQL type) of each column of a recorded table, in order."""
    hints = typing.get_type_hints(TABLES[table])
    return tuple((name, *_TYPES[_bare(hint)]) for name, hint in hints.items())


@cache
def arrow_schema(table: str) -> pa.Schema:
    """What a segment written today looks like."""
    return pa.schema([(name, arrow) for name, arrow, _ in columns(table)])


def column_list(table: str) -> str:
    """The columns as a SQL select list."""
    return ", ".join(name for name, _, _ in columns(table))


def _bare(hint: Any) -> Any:
    """The annotation without `| None`."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return next(part for part in typing.get_args(hint) if part is not type(None))
    return hint
