"""Small Parquet files that hold, or claim to hold, far more than a machine has: written byte by byte."""

import gzip
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

_I32, _I64, _BINARY, _LIST, _STRUCT = 5, 6, 8, 9, 12
"""Types of Thrift's compact protocol."""
Field = tuple[int, int, object]
_BYTE_ARRAY, _INT64, _UTF8 = 6, 2, 0
_REQUIRED, _REPEATED = 0, 2
_PLAIN, _RLE, _RLE_DICTIONARY = 0, 3, 8
_GZIP = 2


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])


def _value(kind: int, value: object) -> bytes:
    match kind, value:
        case (5 | 6, int()):
            return _varint(value << 1 if value >= 0 else (-value << 1) - 1)
        case 8, bytes():
            return _varint(len(value)) + value
        case 9, (int() as inner, [*items]):
            size = bytes([len(items) << 4 | inner]) if len(items) < 15 else bytes([0xF0 | inner]) + _varint(len(items))
            return size + b"".join(_value(inner, item) for item in items)
        case 12, [*fields]:
            return _thrift(fields)  # type: ignore[arg-type]
    raise AssertionError(kind)


def _thrift(fields: Sequence[Field]) -> bytes:
    content, last = b"", 0
    for number, kind, value in fields:
        content += bytes([(number - last) << 4 | kind]) + _value(kind, value)
        last = number
    return content + b"\0"


def _run(count: int, width: int, value: int) -> bytes:
    """A run of one value, as RLE has it."""
    return _varint(count << 1) + value.to_bytes((width + 7) // 8, "little")


def _levels(content: bytes) -> bytes:
    return struct.pack("<I", len(content)) + content


@dataclass
class Column:
    """A column of one value, as often as there are rows."""

    name: str
    value: bytes | int
    rows: int
    """In its pages."""
    repeated: bool = False
    """All values are a list in one row."""
    compressed: bool = False
    claims: int | None = None
    """Number of values by the file's metadata, if that is false."""
    kind: int = field(init=False)

    def __post_init__(self) -> None:
        self.kind = _BYTE_ARRAY if isinstance(self.value, bytes) else _INT64

    def pages(self) -> tuple[bytes, int, int]:
        """The pages, the offset of the first with data, and the size that they unfold to."""
        value = self.value
        dictionary = struct.pack("<I", len(value)) + value if isinstance(value, bytes) else struct.pack("<q", value)
        rows = b"\1" + _run(self.rows, 1, 0)
        if self.repeated:  # repetition: 0, then 1 as often; definition: 1
            rows = _levels(_run(1, 1, 0) + _run(self.rows - 1, 1, 1)) + _levels(_run(self.rows, 1, 1)) + rows
        first = self._page(2, dictionary, 7, [(1, _I32, 1), (2, _I32, _PLAIN)])
        levels = [(3, _I32, _RLE), (4, _I32, _RLE)]
        page = self._page(0, rows, 5, [(1, _I32, self.rows), (2, _I32, _RLE_DICTIONARY), *levels])
        return first + page, len(first), len(dictionary) + len(rows) + len(first) + len(page)

    def _page(self, kind: int, content: bytes, header: int, fields: list[Field]) -> bytes:
        stored = gzip.compress(content, 9) if self.compressed else content
        sizes: list[Field] = [(1, _I32, kind), (2, _I32, len(content)), (3, _I32, len(stored))]
        return _thrift([*sizes, (header, _STRUCT, fields)]) + stored

    def schema(self) -> list[Field]:
        repetition = _REPEATED if self.repeated else _REQUIRED
        named: list[Field] = [(1, _I32, self.kind), (3, _I32, repetition), (4, _BINARY, self.name.encode())]
        return [*named, (6, _I32, _UTF8)] if self.kind == _BYTE_ARRAY else named


def write(path: Path, *columns: Column, rows: int, metadata: dict[str, str] | None = None) -> Path:
    """Writes a file of one row group that claims this many rows."""
    content, chunks = b"PAR1", []
    for column in columns:
        pages, data_at, unfolded = column.pages()
        about: list[Field] = [
            (1, _I32, column.kind),
            (2, _LIST, (_I32, [_PLAIN, _RLE, _RLE_DICTIONARY])),
            (3, _LIST, (_BINARY, [column.name.encode()])),
            (4, _I32, _GZIP if column.compressed else 0),
            (5, _I64, column.rows if column.claims is None else column.claims),
            (6, _I64, unfolded),
            (7, _I64, len(pages)),
            (9, _I64, len(content) + data_at),
            (11, _I64, len(content)),
        ]
        chunks.append([(2, _I64, len(content)), (3, _STRUCT, about)])
        content += pages
    group: list[Field] = [(1, _LIST, (_STRUCT, chunks)), (2, _I64, len(content)), (3, _I64, rows)]
    root: list[Field] = [(4, _BINARY, b"schema"), (5, _I32, len(columns))]
    schema = [root, *(column.schema() for column in columns)]
    pairs = [[(1, _BINARY, key.encode()), (2, _BINARY, value.encode())] for key, value in (metadata or {}).items()]
    footer = _thrift(
        [
            (1, _I32, 1),
            (2, _LIST, (_STRUCT, schema)),
            (3, _I64, rows),
            (4, _LIST, (_STRUCT, [group])),
            (5, _LIST, (_STRUCT, pairs)),
        ]
    )
    path.write_bytes(content + footer + struct.pack("<I", len(footer)) + b"PAR1")
    return path
