"""What the views of a connection read: each recorded table as a SELECT over its segments, and the views over those."""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from storage import database
from storage.columns import NATIVE, PARQUET, column_list, columns
from storage.documentation import metric_names
from storage.segments import Segment

_STATEMENT = re.compile(r"^CREATE VIEW ([\w.]+) AS\s(.*?);$", re.DOTALL | re.MULTILINE)
_NOT_SUPERSEDED = (
    "NOT EXISTS (FROM recorded.superseded AS s"
    " WHERE s.run_id = r.run_id AND s.attempt = r.attempt AND r.step > s.valid_through)"
)
SUMMARY = "rewards"
"""The table that an ingest keeps of what it reads in the runs' metrics."""
UNIT_OF_RUN = "'runs/' || run_id"
"""SQL: the unit of the run that a row is of."""


@dataclass(frozen=True)
class View:
    """A view that anyone may query, or that such a one is over."""

    select: str
    over: tuple[str, ...]
    """The views that must be made before it, in that order."""
    tables: frozenset[str]
    """The tables recorded in segments, or made from them, that it reads in the end."""


@cache
def views() -> dict[str, View]:
    """The views by name, in an order in which they can be made: those of views.sql, and the metrics' names."""
    made: dict[str, View] = {}
    for name, select in _STATEMENT.findall(database.sql("queries/views.sql")):
        words = re.findall(r"[\w.]+", select)
        direct = [other for other in made if other in words]
        over = dict.fromkeys(inner for other in direct for inner in (*made[other].over, other))
        tables = {table for table in (*NATIVE, *PARQUET, SUMMARY) if f"recorded.{table}" in words}
        made[name] = View(select, tuple(over), frozenset(tables.union(*(made[other].tables for other in direct))))
    return made | {"metric_names": View(metric_names(), (), frozenset())}


def in_segments(
    table: str,
    root: Path,
    current: Collection[Segment],
    other: Collection[Segment],
    resumed: Collection[str] = (),
) -> str:
    """A table's rows that lie in segments, as a SELECT.

    Args:
        current: segments with exactly today's columns: one file's footer is enough to bind the query.
        other: segments of older or newer versions; missing columns are NULL, unknown ones left out.
        resumed: runs of which some rows may be superseded; those are left out.
    """
    parts = []
    for segments, options in ((current, ""), (other, ", union_by_name = true")):
        whole = [segment for segment in segments if segment.run_id not in resumed]
        partly = [segment for segment in segments if segment.run_id in resumed]
        if whole:
            parts.append(f"SELECT * FROM {_read(root, whole, options)}")
        if partly:
            parts.append(f"SELECT * FROM {_read(root, partly, options)} AS r WHERE {_NOT_SUPERSEDED}")
    # One relation over files is read several times as fast as a union with it. Where all columns may not be there, a
    # relation without rows gives them their place and type.
    if other or len(parts) != 1:
        nulls = ", ".join(f"NULL::{kind} AS {name}" for name, kind in columns(table))
        parts.insert(0, f"SELECT {nulls} WHERE false")
    return f"SELECT {column_list(table)} FROM ({' UNION ALL BY NAME '.join(parts)})"


def rewards(metrics: str) -> str:
    """The rows of the summary of some rows of `metrics`, both as a SELECT."""
    return f"WITH metrics AS ({metrics}) {database.sql('queries/rewards.sql')}"


def _read(root: Path, segments: Iterable[Segment], options: str) -> str:
    """A relation with the rows of the files.

    The run is taken from the file's path, so that DuckDB opens only the files of the runs that a query asks for.
    """
    paths = ", ".join(database.quoted(root / segment.key) for segment in segments)
    below_runs = f"substring(filename, {len(f'{root}/runs/') + 1})"
    # Not split_part, which DuckDB works out for each row; this is worked out once for each vector of rows.
    run_id = f"left({below_runs}, strpos({below_runs}, '/') - 1)"
    source = f"read_parquet([{paths}], filename = true, hive_partitioning = false{options})"
    return f"(SELECT * EXCLUDE (filename) REPLACE ({run_id} AS run_id) FROM {source})"
