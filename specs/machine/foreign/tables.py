"""Limits for files of rows that other people wrote. All readers of such files keep them."""

from collections.abc import Iterator
from itertools import islice
from typing import IO, Any, AnyStr, TypeVar

from specs.machine.foreign.limited import limited_memory

_FREE_VALUES, _VALUES_PER_BYTE = 4 << 20, 200
"""Number of values that a file may have: the first number, plus the second for each of its bytes. Recorded tokens have
one or two values per byte."""
_FREE_BYTES, _BYTES_PER_BYTE = 1 << 30, 1000
"""Number of bytes to which a file may decompress: the first number, plus the second for each of its bytes."""
_FREE_MEMORY, _MEMORY_PER_BYTE = 4 << 30, 100
LONGEST_LINE = 64 << 20
"""Longest line of CSV or JSON, in bytes or characters."""
_AT_ONCE = 256
Item = TypeVar("Item")


class OversizedError(ValueError):
    """Error for a file that decompresses to more than its size allows. `str()` gives both numbers."""


def allowed_memory(size: int) -> int:
    """Returns the bytes of memory that may be taken to read files of `size` bytes."""
    return _FREE_MEMORY + _MEMORY_PER_BYTE * size


def require_size(size: int, *, values: int, unfolded: int) -> None:
    """Raises OversizedError if a file of `size` bytes holds more values or bytes than it may."""
    most_values, most_bytes = _FREE_VALUES + _VALUES_PER_BYTE * size, _FREE_BYTES + _BYTES_PER_BYTE * size
    if values > most_values or unfolded > most_bytes:
        found = f"{values} values" if values > most_values else f"{unfolded} decompressed bytes"
        allowed = f"{most_values} values" if values > most_values else f"{most_bytes} bytes"
        raise OversizedError(f"{found} in a file of {size} bytes; at most {allowed} are allowed: write the file again")


def require_parquet(size: int, metadata: Any) -> None:
    """Raises OversizedError if a Parquet file's metadata states more than the file may hold.

    Args:
        metadata: pyarrow's FileMetaData.
    """
    groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
    chunks = [group.column(index) for group in groups for index in range(group.num_columns)]
    values = max([metadata.num_rows, sum(chunk.num_values for chunk in chunks)])
    require_size(size, values=values, unfolded=sum(chunk.total_uncompressed_size for chunk in chunks))


def within_memory(items: Iterator[Item], most: int) -> Iterator[Item]:
    """Yields the items. While an item is made, this process may take at most `most` further bytes of memory."""
    while True:
        with limited_memory(most):
            some = list(islice(items, _AT_ONCE))
        if not some:
            return
        yield from some


def lines_of(file: IO[AnyStr]) -> Iterator[AnyStr]:
    """Yields the lines of a file. Raises OversizedError at a line longer than LONGEST_LINE."""
    number = 0
    while line := file.readline(LONGEST_LINE + 1):
        number += 1
        if len(line) > LONGEST_LINE:
            raise OversizedError(f"line {number} is longer than {LONGEST_LINE} bytes")
        yield line
