"""Rows that lie in Parquet, as SQL relations with today's columns."""

from collections.abc import Iterable
from pathlib import Path

from storage.columns import column_list, columns
from storage.segments import Segment


def empty(table: str) -> str:
    """A relation with the table's columns and no rows: it gives older files' missing columns their place and type."""
    return "SELECT " + ", ".join(f"NULL::{sql} AS {name}" for name, _, sql in columns(table)) + " WHERE false"


def parquet(table: str, root: Path, current: Iterable[Segment], other: Iterable[Segment]) -> str:
    """The rows of segments, as a SELECT.

    Args:
        current: segments with exactly today's columns: one file's footer is enough to bind the query.
        other: segments of older or newer versions; missing columns are NULL, unknown ones left out.
    """
    parts = [empty(table)]
    if paths := _paths(root, current):
        parts.append(f"SELECT {column_list(table)} FROM read_parquet([{paths}])")
    if paths := _paths(root, other):
        parts.append(f"SELECT * FROM read_parquet([{paths}], union_by_name = true)")
    if len(parts) == 1:
        return parts[0]
    return f"SELECT {column_list(table)} FROM ({' UNION ALL BY NAME '.join(parts)})"


def quoted(text: object) -> str:
    """A SQL string literal."""
    return "'" + str(text).replace("'", "''") + "'"


def _paths(root: Path, segments: Iterable[Segment]) -> str:
    return ", ".join(quoted(root / segment.key) for segment in segments)
