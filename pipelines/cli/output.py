"""How results leave a command: as a table to look at, or as JSON, CSV or Parquet to go on with."""

import csv
import io
import json
import math
import sys
from collections.abc import Iterable, Sequence
from datetime import date, datetime, timedelta
from decimal import Decimal
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specs.errors import RpgError

if TYPE_CHECKING:
    from storage import Result

MOST_TABLE_ROWS = 1000
"""A table is to be looked at; whoever wants more takes another format."""
_CONTROL = {code: f"\\x{code:02x}" for code in [*range(32), *range(127, 160)]} | {9: "\\t", 10: "\\n", 13: "\\r"}


class Format(StrEnum):
    """How rows are written."""

    table = "table"
    csv = "csv"
    json = "json"
    parquet = "parquet"


def write_result(result: "Result", chosen: Format | None, output: Path | None) -> None:
    """A query's answer, to a file or to stdout. With no format chosen the file's name decides; stdout gets a table."""
    kind = chosen or _format_of(output)
    if kind is Format.parquet:
        _write_parquet(result, output)
        return
    if kind is Format.table:
        text = table_text(result.columns, result.rows, width=None if output is None else 0)
    elif kind is Format.csv:
        text = csv_text(result.columns, result.rows)
    else:
        text = json_text(as_objects(result.columns, result.rows))
    write_bytes(text.encode("utf-8", "surrogateescape"), output)


def print_rows(columns: Sequence[str], rows: Sequence[Sequence[Any]], *, as_json: bool) -> None:
    """What a verb lists: a table, or with `--json` a list of objects."""
    text = json_text(as_objects(columns, rows)) if as_json else table_text(columns, rows)
    write_bytes(text.encode("utf-8", "surrogateescape"), None)


def print_json(value: Any) -> None:
    """One JSON document."""
    write_bytes(json_text(value).encode("utf-8", "surrogateescape"), None)


def table_text(columns: Sequence[str], rows: Sequence[Sequence[Any]], *, width: int | None = None) -> str:
    """The rows as a table: numbers to the right, one line each.

    Args:
        width: characters a line may have; None: the terminal's, without limit where stdout is none; 0: without limit.
    """
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    on_terminal = width is None and sys.stdout.isatty()
    shown = rows[:MOST_TABLE_ROWS]
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for index, name in enumerate(columns):
        numeric = any(_is_number(row[index]) for row in shown)
        table.add_column(Text(name), justify="right" if numeric else "left", no_wrap=True, overflow="ellipsis")
    for row in shown:
        table.add_row(*(Text(cell_text(value)) for value in row))
    buffer = io.StringIO()
    console = Console(file=buffer, force_terminal=on_terminal, width=None if on_terminal else width or 100_000)
    console.print(table)
    if len(rows) > len(shown):
        hidden = len(rows) - len(shown)
        print(f"{hidden} more rows are not shown; `--format csv` or `-o FILE` gives all", file=sys.stderr)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"


def cell_text(value: Any) -> str:
    """A value on one line; control characters, which recorded text may hold, are spelt out."""
    if value is None:
        return "NULL"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, datetime):
        return value.strftime("%Y-%m-%d %H:%M:%S")
    if isinstance(value, (list, dict)):
        value = json.dumps(plain(value), ensure_ascii=False)
    return str(value).translate(_CONTROL)


def csv_text(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """RFC 4180 with a header; NULL is an empty field, times are ISO-8601, lists and structs are JSON."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow(_csv_field(value) for value in row)
    return buffer.getvalue()


def json_text(value: Any) -> str:
    """Indented JSON; NaN and infinities, which JSON lacks, are null."""
    return json.dumps(plain(value), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def as_objects(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[dict[str, Any]]:
    """One object a row."""
    return [dict(zip(columns, row, strict=True)) for row in rows]


def plain(value: Any) -> Any:
    """A value in the terms of JSON."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (datetime, date)):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    return value if value is None or isinstance(value, (str, int, bool)) else str(value)


def _csv_field(value: Any) -> Any:
    if isinstance(value, (list, dict)):
        return json.dumps(plain(value), ensure_ascii=False)
    return value.isoformat() if isinstance(value, (datetime, date)) else value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, Decimal)) and not isinstance(value, bool)


def _format_of(output: Path | None) -> Format:
    if output is None:
        return Format.table
    suffix = output.suffix.lstrip(".")
    if suffix not in tuple(Format):
        raise RpgError(f"{output}: its name does not say the format; give --format table, csv, json or parquet")
    return Format(suffix)


def _write_parquet(result: "Result", output: Path | None) -> None:
    import pyarrow.parquet as pq

    if output is None and sys.stdout.isatty():
        raise RpgError("Parquet is not for a terminal; give -o FILE")
    buffer = io.BytesIO()
    pq.write_table(result.arrow(), buffer, compression="zstd")
    write_bytes(buffer.getvalue(), output)


def write_bytes(content: bytes, output: Path | None) -> None:
    """Whole to a file (written aside, renamed), or to stdout, whose reader may leave early."""
    if output is None:
        try:
            sys.stdout.flush()
            sys.stdout.buffer.write(content)
            sys.stdout.buffer.flush()
        except BrokenPipeError:
            sys.stderr.close()  # Python would complain there when it closes stdout
            raise SystemExit(0) from None
        return
    aside = output.with_name(f".{output.name}.partial")
    try:
        aside.write_bytes(content)
        aside.replace(output)
    except OSError as error:
        raise RpgError(f"{output} cannot be written: {error.strerror}") from error
