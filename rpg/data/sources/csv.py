"""Problems from a CSV file."""

import csv
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from pydantic import Field

from rpg.data.columns import TableSource, existing_file
from rpg.data.problems import SourceProblem
from specs.errors import Issue, SpecError
from specs.machine.foreign.tables import OversizedError, lines_of
from specs.schema.base import names_path

DELIMITERS = (",", ";", "\t", "|")
"""Characters that spreadsheets and pandas put between values."""
_LOOKED_AT = 50
"""Number of lines that are read to detect the delimiter."""


class CsvSource(TableSource):
    """A CSV file in UTF-8 whose first line names the columns. Columns without a name are left out. Every value is
    text."""

    path: str = names_path("file", min_length=1)
    """File, relative to the spec file."""
    delimiter: str = Field(",", min_length=1, max_length=1)
    """Character between two values."""

    def read(self) -> Iterator[SourceProblem]:
        """See Source; skips empty lines."""
        file = existing_file(self.path)
        for line, row in rows_of(file, self.delimiter):
            yield self.problem(row, self.name or file.stem, f"{file.name}, line {line}")


def rows_of(file: Path, delimiter: str) -> Iterator[tuple[int, dict[str, str]]]:
    """Yields line and values by column of each row. Raises SpecError with the line that is wrong.

    The index that pandas writes has no name and is left out; so is an empty value after a separator at a line's end.
    """
    with file.open(encoding="utf-8-sig", newline="") as lines:
        rows = csv.reader(lines_of(lines), delimiter=delimiter, strict=True)
        try:
            header = next(rows, [])
            named = [name for name in header if name]
            if not named or len(set(named)) < len(named):
                raise _bad(f"{file.name}: its first line must name the columns, each once", ", ".join(header))
            if len(header) == 1 and (other := delimiter_of(file, delimiter)) != delimiter:
                message, hint = (
                    f"{file.name}: its values are not separated by {delimiter!r}",
                    f"write `delimiter: {json.dumps(other)}`",
                )
                raise _bad(message, header[0][:80], hint, "delimiter")
            for row in rows:
                if len(row) == len(header) + 1 and not row[-1]:
                    row.pop()
                if not row:
                    continue
                if len(row) != len(header):
                    hint = "put a value that contains a delimiter or a line break in double quotes"
                    message = f"{file.name}, line {rows.line_num}: {len(row)} values for {len(header)} columns"
                    raise _bad(message, delimiter.join(row)[:80], hint)
                yield rows.line_num, {name: value for name, value in zip(header, row, strict=True) if name}
        except OversizedError as error:
            raise _bad(f"{file.name}, {error}", "") from None
        except csv.Error as error:
            raise _bad(f"{file.name}, line {rows.line_num}: not CSV: {error}", "") from None
        except UnicodeDecodeError:
            raise _bad(f"{file.name}, near line {rows.line_num + 1}: not UTF-8", "") from None


def delimiter_of(file: Path, default: str = ",") -> str:
    """Returns the delimiter that gives the file's first lines the most columns, with the same number in each line;
    `default` if no delimiter gives more than one."""
    counts = {delimiter: _num_columns(file, delimiter) for delimiter in DELIMITERS}
    best = max(DELIMITERS, key=counts.__getitem__)
    return best if counts[best] > 1 else default


def _num_columns(file: Path, delimiter: str) -> int:
    """Returns how many columns the first lines have with a delimiter; 0 if the lines differ."""
    with file.open(encoding="utf-8-sig", newline="") as lines:
        try:
            rows = [
                row for row in islice(csv.reader(lines_of(lines), delimiter=delimiter, strict=True), _LOOKED_AT) if row
            ]
        except (csv.Error, OversizedError, UnicodeDecodeError):
            return 0
    counts = {len(row) - (not row[-1] and len(row) == len(rows[0]) + 1) for row in rows}
    return counts.pop() if len(counts) == 1 else 0


def _bad(message: str, given: str, hint: str = "", key: str = "path") -> SpecError:
    return SpecError(Issue(message, path=(key,), given=given, hint=hint))
