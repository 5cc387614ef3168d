"""Problems from a file of JSON objects: one per line, or one array of them."""

import gzip
import json
import zlib
from codecs import BOM_UTF8
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
    """A file with one JSON object per line, or with one JSON array of objects, plain or compressed with gzip."""

    path: str = names_path("file", min_length=1)
    """File, relative to the spec file."""

    def read(self) -> Iterator[SourceProblem]:
        """See Source."""
        file = existing_file(self.path)
        name = self.name or Path(file.name.removesuffix(".gz")).stem
        for where, row in rows_of(file):
            yield self.problem(row, name, where)


def rows_of(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields place and values of each row. Skips empty lines. Raises SpecError with the place of an error."""
    with _opened(file) as opened:
        lines, is_first = _lines(opened, file), True
        for number, line in enumerate(lines, 1):
            if not line.removeprefix(BOM_UTF8).strip():
                continue
            if is_first and line.removeprefix(BOM_UTF8).lstrip().startswith(b"["):
                items = _parsed(b"".join([line, *lines]), file.name)
                for place, item in enumerate(items, 1):
                    yield _row(item, f"{file.name}, item {place}")
                return
            is_first, where = False, f"{file.name}, line {number}"
            yield _row(_parsed(line.rstrip(), where), where)


def _parsed(text: bytes, where: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise _bad_line(f"{where}: {error}", text) from None


def _row(value: Any, where: str) -> tuple[str, dict[str, Any]]:
    if not isinstance(value, dict):
        raise _bad_line(f"{where}: not a JSON object", json.dumps(value).encode())
    return where, value


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
