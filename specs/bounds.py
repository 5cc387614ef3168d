"""How much of everything a spec may hold, so that any file is answered within two seconds; and reading so much."""

import errno
import os
import stat
from collections.abc import Hashable, Iterable, Iterator
from typing import Any

MAX_BYTES = 1 << 18
"""Bytes of a spec file, and of a model's config.json, which is read to check it."""
MAX_DEPTH = 32
"""Levels of nesting."""
MAX_VALUES = 10_000
"""Keys, list items and sections of a file; an alias counts as often as it is used."""
MAX_DIGITS = 100
"""Digits of a whole number, to any base: a fraction can hold it."""
MAX_RANKS = 1 << 20
"""Ranks of a run; and its nodes."""
MAX_RUNS = 4096
"""Runs of an experiment: cells x seeds."""
MAX_COMBINATIONS = 4096
"""Combinations of a matrix, those that `exclude` leaves out included."""
MAX_EXCLUDED = 256
"""Entries of `exclude`."""
MAX_CHECKED_VALUES = 1 << 16
"""Checked values of all cells of a matrix together: each has all values of the spec."""
MAX_PARAMETERS = 32
"""Parameters of a study."""
MAX_CANDIDATES = 512
"""Candidates of one parameter that lists them."""
MAX_TRIED_VALUES = 1 << 15
"""Values of all trials together that show whether a study's candidates are possible: each has all values of the
spec."""
MAX_ISSUES = 100
"""Problems that are told of one file."""
MAX_TOLD = 2000
"""Characters of a line of a problem."""

BOUNDS = {
    "bytes of a file, and of a model's config.json": MAX_BYTES,
    "levels of nesting": MAX_DEPTH,
    "keys, sections and list items of a file, an alias counted as often as it is used": MAX_VALUES,
    "digits of a whole number": MAX_DIGITS,
    "`training.ranks`, nodes": MAX_RANKS,
    "runs of an experiment: cells x seeds": MAX_RUNS,
    "combinations of a matrix, those that `exclude` names too": MAX_COMBINATIONS,
    "entries of `exclude`": MAX_EXCLUDED,
    "values in all cells of a matrix: cells x keys, sections and list items of the file": MAX_CHECKED_VALUES,
    "parameters of a study": MAX_PARAMETERS,
    "candidates that one parameter lists": MAX_CANDIDATES,
    "values in all trials of which one is tried for each candidate": MAX_TRIED_VALUES,
}
"""Name -> bound, in the reference's words."""


class NotPlainError(OSError):
    """Something that may have no end stands in the place of a file."""


class TooLargeError(ValueError):
    """A file is larger than whoever reads it takes."""


def read_within(path: str, most: int = MAX_BYTES) -> bytes:
    """The content of a plain file.

    Raises:
        NotPlainError: it is a pipe or a device, which may have no end.
        TooLargeError: it is larger than `most` bytes.
        OSError: it cannot be read for another reason.
        ValueError: no file can have that name.
    """
    mode = os.stat(path).st_mode  # not of the open file: opening a pipe waits for a writer
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise NotPlainError(errno.EINVAL, "a pipe" if stat.S_ISFIFO(mode) else "a device, not a file", path)
    with open(path, "rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise TooLargeError(f"larger than {most} bytes")
    return data


def repeats(values: Iterable[Any]) -> Iterator[int]:
    """The places of values that stand earlier in the list too. 1, 1.0 and true are one value.

    >>> list(repeats([1, "a", {"low": [1]}, 2, {"low": [1.0]}, "a"]))
    [4, 5]
    """
    seen: set[Hashable] = set()
    for index, value in enumerate(values):
        key = comparable(value)
        if key in seen:
            yield index
        seen.add(key)


def comparable(value: Any) -> Hashable:
    """Plain data as a key, equal where the data are."""
    if isinstance(value, dict):
        return ("a mapping", frozenset((key, comparable(item)) for key, item in value.items()))
    if isinstance(value, (list, tuple)):
        return ("a list", tuple(comparable(item) for item in value))
    key: Hashable = value
    return key
