"""The columns of each recorded table, derived from the row classes of `specs.records`."""

import types
import typing
from datetime import datetime
from functools import cache
from typing import TYPE_CHECKING, Any

from specs.records import TABLES, Float32, Int32

if TYPE_CHECKING:
    import pyarrow as pa

NATIVE = ("events", "checkpoints", "evaluations")
"""Tables whose rows are copied into the DuckDB file."""
PARQUET = ("metrics", "rollouts", "tokens", "turns", "evaluation_samples", "evaluation_scores", "drift_samples")
"""Tables whose rows stay in their segments, because there are millions of them or they contain long texts."""

_TYPES: dict[Any, str] = {
    int: "BIGINT",
    float: "DOUBLE",
    Float32: "FLOAT",
    Int32: "INTEGER",
    str: "VARCHAR",
    bool: "BOOLEAN",
    datetime: "TIMESTAMP WITH TIME ZONE",
}


@cache
def columns(table: str) -> tuple[tuple[str, str], ...]:
    """Returns (name, SQL type) of each column of a recorded table, in order."""
    hints = typing.get_type_hints(TABLES[table])
    return tuple((name, _TYPES[_bare(hint)]) for name, hint in hints.items())


@cache
def arrow_schema(table: str) -> "pa.Schema":
    """Returns the Arrow schema of a new segment."""
    import pyarrow as pa  # here, so that a query that reads no segment starts sooner

    types = {
        "BIGINT": pa.int64(),
        "DOUBLE": pa.float64(),
        "FLOAT": pa.float32(),
        "INTEGER": pa.int32(),
        "VARCHAR": pa.string(),
        "BOOLEAN": pa.bool_(),
        "TIMESTAMP WITH TIME ZONE": pa.timestamp("us", tz="UTC"),
    }
    return pa.schema([(name, types[kind]) for name, kind in columns(table)])


def column_list(table: str) -> str:
    """Returns the columns as a SQL select list."""
    return ", ".join(name for name, _ in columns(table))


def _bare(hint: Any) -> Any:
    """Returns the annotation without `| None`."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return next(part for part in typing.get_args(hint) if part is not type(None))
    return hint
