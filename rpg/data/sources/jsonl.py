"""Problems from a file with one JSON object per line."""

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

from rpg.data.columns import TableSource, existing_file
from rpg.data.problems import SourceProblem
from specs.documents.strict_json import parse_json
from specs.errors import Issue, SpecError
from specs.machine.foreign.tables import OversizedError, lines_of, require_size
from specs.schema.base import names_path

_GZIP = b"\x1f\x8b"


class JsonlSource(TableSource):
    """A file with one JSON object per line, plain or compressed with gzip."""

    path: str = names_path("file", min_length=1)
    """File, relative to the spec file."""

    def read(self) -> Iterator[SourceProblem]:
        """See Source; skips empty lines."""
        file = existing_file(self.path)
        for where, row in json_rows(file):
            yield self.problem(row, self.name or Path(file.name.removesuffix(".gz")).stem, where)


def json_rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields each object of a JSON Lines file with its place, `train.jsonl, line 3`; skips empty lines.

    Raises:
        SpecError: a line is not a JSON object, or the file cannot be unpacked; at the path of the source's `path`.
    """
    with _opened(file) as lines:
        for number, line in enumerate(_lines(lines, file), 1):
            if not line.strip():
                continue
            where = f"{file.name}, line {number}"
            try:
                row = parse_json(line.rstrip())
            except ValueError as error:
                raise _bad_line(f"{where}: {error}", line) from None
            if not isinstance(row, dict):
                raise _bad_line(f"{where}: not a JSON object", line)
            yield where, row


def _opened(file: Path) -> IO[bytes]:
    """Returns a file's bytes, decompressed if it is a gzip file."""
    with file.open("rb") as raw:
        packed = raw.read(len(_GZIP)) == _GZIP
    return cast("IO[bytes]", gzip.open(file)) if packed else file.open("rb")


def _lines(opened: IO[bytes], file: Path) -> Iterator[bytes]:
    size, unfolded = file.stat().st_size, 0
    try:
        for number, line in enumerate(lines_of(opened)):
            unfolded += len(line)
            require_size(size, values=number, unfolded=unfolded)
            yield line
    except OversizedError as error:
        raise SpecError(Issue(f"{file.name}, {error}", path=("path",))) from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        hint = "pack or copy it again"
        raise SpecError(Issue(f"{file.name} cannot be unpacked: {error}", path=("path",), hint=hint)) from None


def _bad_line(message: str, line: bytes) -> SpecError:
    return SpecError(Issue(message, path=("path",), given=line.decode("utf-8", "replace").strip()[:80]))
