"""Problems from a file with one JSON object a line."""

import json
from collections.abc import Iterator
from typing import IO

from rpg.data.columns import TableSource, existing_file
from rpg.data.problems import SourceProblem
from specs.errors import Issue, SpecError
from specs.machine.foreign.tables import OversizedError, lines_of
from specs.schema.base import names_path


class JsonlSource(TableSource):
    """A file with one JSON object a line."""

    path: str = names_path("file", min_length=1)
    """File, relative to the spec file."""

    def read(self) -> Iterator[SourceProblem]:
        """See Source; empty lines are passed over."""
        file = existing_file(self.path)
        with file.open("rb") as lines:
            for number, line in enumerate(_lines(lines, file.name), 1):
                if not line.strip():
                    continue
                where = f"{file.name}, line {number}"
                try:
                    row = json.loads(line.decode("utf-8-sig").rstrip())
                except UnicodeDecodeError:
                    raise _bad_line(f"{where}: not UTF-8", line) from None
                except json.JSONDecodeError as error:
                    raise _bad_line(f"{where}: not JSON: {error.msg} at character {error.pos + 1}", line) from None
                except RecursionError:
                    raise _bad_line(f"{where}: nested too deeply", line) from None
                if not isinstance(row, dict):
                    raise _bad_line(f"{where}: not a JSON object", line)
                yield self.problem(row, self.name or file.stem, where)


def _lines(file: IO[bytes], name: str) -> Iterator[bytes]:
    try:
        yield from lines_of(file)
    except OversizedError as error:
        raise SpecError(Issue(f"{name}, {error}", path=("path",))) from None


def _bad_line(message: str, line: bytes) -> SpecError:
    return SpecError(Issue(message, path=("path",), given=line.decode("utf-8", "replace").strip()[:80]))
