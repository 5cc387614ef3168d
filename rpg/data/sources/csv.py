"""Problems from a CSV file."""

import csv
from collections.abc import Iterator

from pydantic import Field

from rpg.data.columns import TableSource, existing_file
from rpg.data.problems import SourceProblem
from specs.errors import Issue, SpecError
from specs.machine.foreign.tables import OversizedError, lines_of
from specs.schema.base import names_path


class CsvSource(TableSource):
    """A CSV file whose first line names the columns. Every value is text; UTF-8."""

    path: str = names_path("file", min_length=1)
    """File, relative to the spec file."""
    delimiter: str = Field(",", min_length=1, max_length=1)
    """Character between two values."""

    def read(self) -> Iterator[SourceProblem]:
        """See Source; skips empty lines."""
        file = existing_file(self.path)
        with file.open(encoding="utf-8-sig", newline="") as lines:
            rows = csv.reader(lines_of(lines), delimiter=self.delimiter, strict=True)
            try:
                names = next(rows, [])
                if len(set(names)) < len(names) or not all(names):
                    raise _bad(f"{file.name}: its first line must name the columns, each once", ", ".join(names))
                for row in rows:
                    where = f"{file.name}, line {rows.line_num}"
                    if not row:
                        continue
                    if len(row) != len(names):
                        hint = "a value with a delimiter or a line break in it stands in double quotes"
                        message = f"{where}: {len(row)} values for {len(names)} columns"
                        raise _bad(message, self.delimiter.join(row)[:80], hint)
                    yield self.problem(dict(zip(names, row, strict=True)), self.name or file.stem, where)
            except OversizedError as error:
                raise _bad(f"{file.name}, {error}", "") from None
            except csv.Error as error:
                raise _bad(f"{file.name}, line {rows.line_num}: not CSV: {error}", "") from None
            except UnicodeDecodeError:
                raise _bad(f"{file.name}, near line {rows.line_num + 1}: not UTF-8", "") from None


def _bad(message: str, given: str, hint: str = "") -> SpecError:
    return SpecError(Issue(message, path=("path",), given=given, hint=hint))
