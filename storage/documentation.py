"""The meaning of every table, view and column. The pages of the documentation and the database's comments share these
texts.

The text of a recorded table is in its row class in specs/records.py, the metrics' text in specs/metrics.py. The text of
another table, of a view, or of a column that a view adds to its table is in the SQL file that creates it: above the
statement, and beside a column or above the statement as `--   column: text`.
"""

import ast
import inspect
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import duckdb

from specs import metrics, records
from storage.database import quoted, sql

SQL_FILES = ("catalogue.sql", "queries/views.sql")
SHARED = ("run_id", "experiment", "seed")
"""Columns that have the same meaning as in `runs` everywhere, unless they have their own text."""
_STATEMENT = re.compile(r'CREATE (?:TABLE|VIEW) "?([\w.]+)"? ')
_COLUMN_ABOVE = re.compile(r"--   (\w+): (.*)")
_COLUMN_BESIDE = re.compile(r' +"?(\w+)"? .*?-- (.*)')


@dataclass(frozen=True, slots=True)
class Description:
    """The description of a table or view and of its columns."""

    about: str
    columns: dict[str, str]


@cache
def descriptions() -> dict[str, Description]:
    """Returns the descriptions by table or view."""
    texts = [text for file in SQL_FILES for text in _in_sql(sql(file))]
    described = dict(texts)
    for module, classes in ((records, records.TABLES), (metrics, {"metric_names": metrics.Metric})):
        for name, text in _in_classes(inspect.getsource(module), classes):
            in_view = described.get(name, Description("", {})).columns
            described[name] = Description(text.about, text.columns | in_view)
    shared = {name: text for name, text in described["runs"].columns.items() if name in SHARED}
    return {name: Description(text.about, shared | text.columns) for name, text in described.items()}


def comments(columns: Iterable[tuple[str, str, bool]]) -> Iterator[str]:
    """Yields the SQL statements that comment tables, views and their columns in a database.

    Args:
        columns: for each column its table's or view's name, its own, and whether it is a view's; ordered by table.
    """
    commented = ""
    for relation, column, is_view in columns:
        text = descriptions().get(relation, Description("", {}))
        if relation != commented and text.about:
            kind = "VIEW" if is_view else "TABLE"
            yield f'COMMENT ON {kind} "{relation}" IS {quoted(text.about)}'
        commented = relation
        if meaning := text.columns.get(column):
            yield f'COMMENT ON COLUMN "{relation}"."{column}" IS {quoted(meaning)}'


def comment(connection: duckdb.DuckDBPyConnection) -> None:
    """Adds comments to the tables and views of a connection's schema, and to their columns."""
    of_each = connection.execute(
        "SELECT table_name, column_name, table_oid IN (SELECT view_oid FROM duckdb_views()) FROM duckdb_columns()"
        " WHERE database_name = current_database() AND schema_name = 'main' AND NOT internal"
        " ORDER BY table_name, column_index"
    )
    connection.execute("; ".join(comments(of_each.fetchall())))


def metric_names() -> str:
    """Returns the view `metric_names` as a SELECT. It has a row for each metric that a step may record."""
    columns = ("name", "title", "unit", "better", "least", "most", "recorded_with", "meaning")
    rows = (", ".join(_literal(getattr(metric, name)) for name in columns) for metric in metrics.METRICS)
    values = ", ".join(f"({row})" for row in rows)
    return f"SELECT * FROM (VALUES {values}) AS metric ({', '.join(columns)})"


def _literal(value: str | float) -> str:
    """Returns a text or a number as a SQL literal; NULL for an infinite bound."""
    if isinstance(value, str):
        return quoted(value)
    return f"{value}::DOUBLE" if math.isfinite(value) else "NULL::DOUBLE"


def _in_sql(text: str) -> Iterator[tuple[str, Description]]:
    """Yields the descriptions in the comments of a SQL file; none for a statement without comments."""
    above: list[str] = []
    name, about, columns = "", "", dict[str, str]()
    for line in [*text.splitlines(), ";"]:
        if line.startswith("--"):
            above.append(line)
            continue
        if created := _STATEMENT.match(line):
            name = created[1]
            about, columns = _above(above)
        elif beside := _COLUMN_BESIDE.match(line):
            columns[beside[1]] = beside[2]
        above = []
        if line.endswith(";") and name:
            if about or columns:
                yield name, Description(about, columns)
            name = ""


def _above(lines: Iterable[str]) -> tuple[str, dict[str, str]]:
    """Returns the descriptions in the comment above a statement: of the statement and of its columns."""
    about: list[str] = []
    columns: dict[str, str] = {}
    for line in lines:
        if of_column := _COLUMN_ABOVE.match(line):
            columns[of_column[1]] = of_column[2]
        elif columns:
            columns[list(columns)[-1]] += f" {line.lstrip('- ')}"
        else:
            about.append(line.lstrip("- "))
    return " ".join(about), columns


def _in_classes(source: str, kinds: Mapping[str, type]) -> Iterator[tuple[str, Description]]:
    classes = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    for table, kind in kinds.items():
        columns = {
            field.target.id: _on_one_line(text.value.value)
            for field, text in pairwise(classes[kind.__name__].body)
            if isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
        }
        yield table, Description(_on_one_line(kind.__doc__), columns)


def _on_one_line(text: object) -> str:
    return " ".join(str(text or "").split())
