"""Problems from a file with one JSON object a line."""

from collections.abc import Iterator
from typing import IO

from rpg.data.columns import TableSource, existing_file
from rpg.data.problems import SourceProblem
from specs.documents.strict_json import parse_json
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
                    row = parse_json(line.rstrip())
                except ValueError as error:
                    raise _bad_line(f"{where}: {error}", line) from None
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
