"""Output of a command's results: a table for people, or JSON, CSV or Parquet for programs."""

import contextlib
import csv
import io
import json
import math
import os
import secrets
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime, timedelta
from decimal import Decimal
from enum import StrEnum
from html import escape
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar, assert_never

from pipelines.terminal.cells import markdown_cell, spreadsheet_cell
from pipelines.terminal.streams import beneath, stripped
from specs.errors import RpgError

if TYPE_CHECKING:
    from rich.console import JustifyMethod

    from storage.statements.texts import Form
    from storage.store import Stream

_Date = TypeVar("_Date", date, datetime)
MOST_TABLE_ROWS = 1000
"""Largest number of rows in a table for people. Other formats have no limit."""
_LEAST_WIDTH = 24
"""Least width of a column, in characters. If columns of this width do not fit, the last columns are left out. A run's
id is never cut."""
_GAP = 3
"""Characters between columns."""
_ON_ONE_LINE = {9: "\\t", 10: "\\n"}


class Format(StrEnum):
    """Output format of rows."""

    table = "table"
    csv = "csv"
    json = "json"
    parquet = "parquet"
    latex = "latex"
    markdown = "markdown"
    html = "html"


class TableFormat(StrEnum):
    """Output format of a verb's table."""

    table = "table"
    latex = "latex"
    markdown = "markdown"
    html = "html"
    csv = "csv"
    json = "json"


@dataclass(frozen=True, slots=True)
class Choice:
    """Selection of a table's rows, and the digits of its numbers."""

    rows: Sequence[str] = ()
    """Keeps a row if its first column contains one of these texts. Empty keeps all rows."""
    digits: int | None = None
    """Digits after the decimal point."""

    def __bool__(self) -> bool:
        return bool(self.rows) or self.digits is not None

    def of(self, rows: Iterable[Sequence[Any]]) -> list[tuple[Any, ...]]:
        """Returns the chosen rows. Numbers have the chosen digits."""
        chosen = [row for row in rows if not self.rows or any(text in cell_text(row[0]) for text in self.rows)]
        return [tuple(row) if self.digits is None else tuple(map(self._rounded, row)) for row in chosen]

    def of_table(self, rows: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
        """Returns the chosen rows of a whole table; see `of`.

        Raises:
            BadParameter: no row is chosen.
        """
        import typer

        chosen = self.of(rows)
        if self.rows and not chosen:
            there = ", ".join(dict.fromkeys(cell_text(row[0]) for row in rows)) or "none"
            raise typer.BadParameter(
                f"no row has {' or '.join(map(repr, self.rows))} in its first column; rows: {there}",
                param_hint="--rows",
            )
        return chosen

    def _rounded(self, value: Any) -> Any:
        return f"{value:z.{self.digits}f}" if isinstance(value, (float, Decimal)) else value


ALL = Choice()
"""All rows, with their digits as they are."""


def write_stream(
    stream: "Stream", kind: Format, output: Path | None, choice: Choice = ALL, *, safe: bool = False
) -> None:
    """Writes a query's result to a file or to stdout.

    Warnings go to stderr. Rows are written as they arrive; a table holds only the rows that it shows.

    Args:
        choice: chosen rows and digits; JSON keeps all digits; Parquet keeps all rows and digits.
        safe: as for `csv_text`.
    """
    for warning in stream.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    with _destination(output, is_stripped=kind is Format.table) as file:
        if kind is Format.parquet:
            _write_parquet(stream, file)
            return
        for text in _texts(stream, kind, choice, width=None if output is None else 0, safe=safe):
            file.write(_encoded(text))


def _texts(stream: "Stream", kind: Format, choice: Choice, *, width: int | None, safe: bool) -> Iterator[str]:
    """Yields the result in pieces."""
    columns, written = stream.columns, stream.texts()
    choice = replace(choice, digits=None) if kind is Format.json else choice
    batches = (choice.of(rows) if choice else rows for rows in stream.rows()) if written is None else iter(())
    if kind is Format.table:
        shown: list[tuple[Any, ...]] = []
        count = 0
        for rows in batches:
            shown += rows[: MOST_TABLE_ROWS - len(shown)]
            count += len(rows)
        yield table_text(columns, shown, width=width, num_rows=count)
    elif kind in (Format.latex, Format.markdown, Format.html):
        every = [[cell_text(value) for value in row] for rows in batches for row in rows]
        yield table_for_papers(columns, every, TableFormat(kind.value))
    elif kind is Format.csv:
        yield csv_text([columns], safe=safe)
        yield from (map(_lines, written) if written is not None else (csv_text(rows, safe=safe) for rows in batches))
    else:
        start = "["
        if written is None:
            written = (list(map(_object_text, as_objects(columns, rows))) for rows in batches)
        for objects in written:
            yield start + ",".join(objects)
            start = ","
        yield "[]\n" if start == "[" else "\n]\n"


def _lines(lines: Sequence[str]) -> str:
    return "".join([f"{line}\n" for line in lines])


def _object_text(row: dict[str, Any]) -> str:
    """Returns a row as an item of a list of objects."""
    return "\n " + json_text(row).rstrip("\n").replace("\n", "\n ")


def form_of(kind: Format, choice: Choice = ALL, *, safe: bool = False) -> "Form":
    """Returns the form in which rows are read for a format. With `safe`, or with a choice of rows and digits,
    `csv_text` formats the cells."""
    if choice and kind is not Format.parquet:
        return "table"
    forms: dict[Format, Form] = {Format.csv: "csv", Format.json: "json", Format.parquet: "parquet"}
    return "table" if safe and kind is Format.csv else forms.get(kind, "table")


def print_rows(columns: Sequence[str], rows: Sequence[Sequence[Any]], *, as_json: bool) -> None:
    """Prints a verb's list: a table, or with `--json` a list of objects."""
    if as_json:
        print_json(as_objects(columns, rows))
    else:
        print_table(columns, rows)


def print_json(value: Any) -> None:
    """Prints one JSON document."""
    write_bytes(_encoded(json_text(value)), None)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Prints a table as wide as the terminal."""
    with _destination(None, is_stripped=True) as file:
        file.write(_encoded(table_text(columns, rows)))


def table_text(
    columns: Sequence[str], rows: Sequence[Sequence[Any]], *, width: int | None = None, num_rows: int = 0
) -> str:
    """Formats the rows as a table, each row on one line, with numbers aligned right.

    Args:
        num_rows: total number of rows, if these are only the first.
        width: characters of a line; None: the terminal's, or no limit if stdout is not a terminal. 0 means no limit.
    """
    from rich.box import SIMPLE_HEAD
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    from pipelines.terminal.console import SafeConsole

    on_terminal = width is None and sys.stdout.isatty()
    shown = rows[:MOST_TABLE_ROWS]
    buffer = io.StringIO()
    console = SafeConsole(file=buffer, force_terminal=on_terminal, width=None if on_terminal else width or 100_000)
    cells = [[Text(cell_text(value)) for value in row] for row in shown]
    widths = [max(map(cell_len, [name, *(row[i].plain for row in cells)])) for i, name in enumerate(columns)]
    widths = _fitting(widths, console.width)
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for index, (name, most) in enumerate(zip(columns, widths, strict=False)):
        justify: JustifyMethod = "right" if any(_is_number(row[index]) for row in shown) else "left"
        table.add_column(Text(name), justify=justify, no_wrap=True, overflow="ellipsis", max_width=most)
    for texts in cells:
        table.add_row(*texts[: len(widths)])
    console.print(table)
    if left_out := ", ".join(columns[len(widths) :]):
        print(f"the terminal is too narrow for: {left_out}; `| cat` shows all", file=sys.stderr)
    if hidden := max(len(rows), num_rows) - len(shown):
        print(f"{hidden} more rows are not shown; `--format csv` or `-o FILE` writes all rows", file=sys.stderr)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"


def _fitting(widths: Sequence[int], room: int) -> list[int]:
    """Returns the widths of as many columns as fit on a line, from the first on. The widest are cut first.

    >>> _fitting([22, 6, 8, 14, 19], room=80), _fitting([22, 107], room=60)
    ([22, 6, 8, 14], [22, 35])
    """
    fitting = list(widths)
    while len(fitting) > 1 and sum(min(width, _LEAST_WIDTH) for width in fitting) + _GAP * (len(fitting) - 1) > room:
        fitting.pop()
    while max(fitting, default=0) > 1 and sum(fitting) + _GAP * (len(fitting) - 1) > room:
        fitting[fitting.index(max(fitting))] -= 1
    return fitting


def cell_text(value: Any) -> str:
    """Returns a value on one line, without control characters, which recorded text may contain."""
    if value is None:
        return "NULL"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, datetime):
        return _finite(value).strftime("%Y-%m-%d %H:%M:%S")
    if isinstance(value, date):
        return _finite(value).isoformat()
    if isinstance(value, (list, tuple, dict)):
        value = json.dumps(plain(value), ensure_ascii=False)
    return stripped(str(value)).translate(_ON_ONE_LINE)


def table_for_papers(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    kind: TableFormat,
    *,
    caption: str = "",
    safe: bool = False,
) -> str:
    """Formats rows of texts as a LaTeX table (package booktabs), as Markdown, HTML or CSV. A line break in a cell is a
    space.

    Args:
        caption: stands above the table in LaTeX and HTML. Without a caption the LaTeX table does not float.
        safe: as for `csv_text`.
    """
    cells = [[" ".join(cell.split()) for cell in row] for row in rows]
    match kind:
        case TableFormat.latex:
            lines = [" & ".join(map(_latex, row)) + r" \\" for row in [columns, *cells]]
            head = rf"\begin{{tabular}}{{{'l' * len(columns)}}}"
            table = [head, r"\toprule", lines[0], r"\midrule", *lines[1:], r"\bottomrule", r"\end{tabular}"]
            if caption:
                float_ = [r"\begin{table}", r"\centering", rf"\caption{{{_latex(caption)}}}"]
                table = [*float_, *table, r"\end{table}"]
            return "\n".join([*table, ""])
        case TableFormat.markdown:
            lines = [f"| {' | '.join(map(markdown_cell, row))} |" for row in [columns, *cells]]
            return "\n".join([lines[0], "|" + "---|" * len(columns), *lines[1:], ""])
        case TableFormat.html:
            head, *body = (
                "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row) + "</tr>"
                for tag, row in [("th", columns), *(("td", row) for row in cells)]
            )
            title = [f"<caption>{escape(caption)}</caption>"] if caption else []
            lines = ["<table>", *title, f"<thead>{head}</thead>", "<tbody>", *body, "</tbody>", "</table>", ""]
            return "\n".join(lines)
        case TableFormat.csv:
            return csv_text([columns, *cells], safe=safe)
        case TableFormat.table | TableFormat.json:
            raise ValueError(f"this function does not write {kind}")
        case _:
            assert_never(kind)


_LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"} | {
    sign: f"\\{sign}" for sign in "&%$#_{}"
}


def _latex(text: str) -> str:
    """Escapes a text for LaTeX. A star that marks a difference becomes a superscript."""
    escaped = "".join(_LATEX.get(sign, sign) for sign in text)
    return f"{escaped[:-2]}$^{{*}}$" if escaped.endswith(" *") else escaped


def csv_text(rows: Iterable[Sequence[Any]], *, safe: bool = False) -> str:
    """Formats rows as RFC 4180; NULL is an empty field, times are ISO-8601, lists and structs are JSON.

    Args:
        safe: texts are escaped so that no spreadsheet reads one as a formula.
    """
    lines: list[str] = []
    # The csv module quotes a carriage return in a value only if its lines end with one.
    writer = csv.writer(SimpleNamespace(write=lambda line: lines.append(f"{line[:-2]}\n")), lineterminator="\r\n")
    for row in rows:
        fields = (_csv_field(value) for value in row)
        writer.writerow(spreadsheet_cell(field) if safe and isinstance(field, str) else field for field in fields)
    return "".join(lines)


def json_text(value: Any) -> str:
    """Returns indented JSON; NaN and infinities, which JSON lacks, are null."""
    return json.dumps(plain(value), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def as_objects(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[dict[str, Any]]:
    """Returns one object per row. A column with the name of an earlier column gets a number after its name."""
    from storage.statements.texts import distinct

    names = distinct(columns)
    return [dict(zip(names, row, strict=True)) for row in rows]


def plain(value: Any) -> Any:
    """Converts a value to JSON types."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Decimal):
        if value == value.to_integral_value():
            return int(value)
        return float(value) if Decimal(repr(float(value))) == value else str(value)
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (datetime, date)):
        return _finite(value).isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    return value if value is None or isinstance(value, (str, int, bool)) else str(value)


def _csv_field(value: Any) -> Any:
    if isinstance(value, (list, tuple, dict)):
        return json.dumps(plain(value), ensure_ascii=False)
    return _finite(value).isoformat() if isinstance(value, (datetime, date)) else value


def _finite(value: _Date) -> _Date:
    """Returns the date or time. Raises RpgError for the earliest and the latest one: Python converts DuckDB's infinite
    dates to these."""
    plain_value = value.replace(tzinfo=None) if isinstance(value, datetime) else value
    if plain_value in (type(plain_value).min, type(plain_value).max):
        raise RpgError(f"{value} may be an infinite time\n  hint: cast the column: `::VARCHAR`")
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, Decimal)) and not isinstance(value, bool)


def format_of(output: Path | None) -> Format:
    """Returns the format that a file's suffix names; `table` without a file."""
    if output is None:
        return Format.table
    suffix = output.suffix.lstrip(".")
    if suffix not in tuple(Format):
        raise RpgError(f"{output}: cannot infer the format from the name; add --format table, csv, json or parquet")
    return Format(suffix)


def _write_parquet(stream: "Stream", file: BinaryIO) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from storage.statements.texts import distinct

    if file.isatty():
        raise RpgError("a terminal cannot show Parquet; write it to a file with -o FILE")
    # DuckDB's sums of integers are decimals of 38 digits, which few programs read as integers.
    sums = pa.decimal128(38, 0)
    given, batches = stream.batches()
    names = distinct(given.names)
    types = [pa.int64() if kind == sums else kind for kind in given.types]
    schema = pa.schema(list(zip(names, types, strict=True)))
    with pq.ParquetWriter(file, schema, compression="zstd") as writer:
        for batch in batches:
            try:
                writer.write_batch(batch.rename_columns(names).cast(schema))
            except pa.ArrowInvalid as error:
                raise RpgError(f"{error}: cast integers of more than 64 bits to DOUBLE or VARCHAR") from error


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def write_bytes(content: bytes, output: Path | None) -> None:
    """Writes complete content to a file or to stdout."""
    with _destination(output) as file:
        file.write(content)


@contextlib.contextmanager
def _destination(output: Path | None, *, is_stripped: bool = False) -> Iterator[BinaryIO]:
    """Yields a new file that replaces `output` once it is complete, or stdout. The reader of stdout may stop early.

    Args:
        is_stripped: the text holds no terminal commands except styles.
    """
    if output is None:
        try:
            sys.stdout.flush()
            stdout = beneath(sys.stdout).buffer if is_stripped else sys.stdout.buffer
            yield stdout
            stdout.flush()
        except BrokenPipeError:
            sys.stderr.close()  # Python would complain there when it closes stdout
            raise SystemExit(0) from None
        return
    if os.path.lexists(output) and (output.is_symlink() or not output.is_file()):
        kind = "a link" if output.is_symlink() else "not a regular file"
        raise RpgError(f"{output} is {kind} and was not changed; name a new file or a regular file")
    aside = output.with_name(f".{output.name}.{secrets.token_hex(8)}.partial")
    try:
        with open(aside, "xb") as file:
            yield file
        aside.replace(output)
    except OSError as error:
        raise RpgError(f"{output} cannot be written: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):  # renamed, or never created
            aside.unlink()
