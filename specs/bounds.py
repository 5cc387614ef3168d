"""Limits on the size of specs, so that any file is checked within two seconds, and a reader that enforces such
limits."""

import errno
import os
import stat
from collections.abc import Hashable, Iterable, Iterator
from typing import Any

MAX_BYTES = 1 << 18
"""Largest number of bytes of a spec file, and of a model's config.json, which is read to check the spec."""
MAX_DEPTH = 32
"""Levels of nesting."""
MAX_VALUES = 10_000
"""Keys, list items and sections of a file. An alias counts as often as it is used."""
MAX_DIGITS = 100
"""Digits of a whole number, in any base, so that a float can represent it."""
MAX_RANKS = 1 << 20
"""Ranks of a run, and its nodes."""
MAX_RUNS = 4096
"""Runs of an experiment: cells x seeds."""
MAX_COMBINATIONS = 4096
"""Combinations of a matrix, including those that `exclude` leaves out."""
MAX_EXCLUDED = 256
"""Entries of `exclude`."""
MAX_CHECKED_VALUES = 1 << 16
"""Checked values of all cells of a matrix together. Each cell has all values of the spec."""
MAX_PARAMETERS = 32
"""Parameters of a study."""
MAX_CANDIDATES = 512
"""Candidates that one parameter lists."""
MAX_TRIED_VALUES = 1 << 15
"""Values of all trials together that are checked to find out whether a study's candidates are possible. Each trial has
all values of the spec."""
MAX_ISSUES = 100
"""Problems reported for one file."""
MAX_TOLD = 2000
"""Characters of a reported line."""

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
"""Name in the reference -> bound."""


class NotPlainError(OSError):
    """Error: the path is a pipe or a device, which may have no end."""


class TooLargeError(ValueError):
    """Error: the file is larger than its reader allows."""


def read_within(path: str) -> bytes:
    """Returns the content of a plain file.

    Raises:
        NotPlainError: the file is a pipe or a device, which may have no end.
        TooLargeError: it is larger than MAX_BYTES.
        OSError: it cannot be read for another reason.
        ValueError: no file can have that name.
    """
    mode = os.stat(path).st_mode  # before opening the file: opening a pipe waits for a writer
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise NotPlainError(errno.EINVAL, "a pipe" if stat.S_ISFIFO(mode) else "a device, not a file", path)
    with open(path, "rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise TooLargeError(f"larger than {MAX_BYTES} bytes")
    return data


def repeats(values: Iterable[Any]) -> Iterator[int]:
    """Yields the places of values that occur earlier in the list. 1, 1.0 and true are one value.

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
    """Returns a key for plain data; keys are equal if the data are equal."""
    if isinstance(value, dict):
        return ("a mapping", frozenset((key, comparable(item)) for key, item in value.items()))
    if isinstance(value, (list, tuple)):
        return ("a list", tuple(comparable(item) for item in value))
    key: Hashable = value
    return key
