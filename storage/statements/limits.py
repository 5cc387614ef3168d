"""Limits of a query: time, memory, and disk for data that do not fit into memory."""

import contextlib
import os
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import duckdb

from specs.machine.foreign.limited import limited_memory
from specs.machine.scratch import Scratch
from storage.database import as_pattern, quoted
from storage.errors import QueryError

_Answer = TypeVar("_Answer")
_UNITS = {"KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_BESIDE_DUCKDB_BYTES = 2**29
"""Memory in bytes of a querying process in addition to DuckDB's: rows of the answer, and threads' stacks."""
_STOPPING_SECONDS = 2.0
"""Seconds to wait for a query to stop, because a single call of a function on a large value is not interrupted."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one query."""

    seconds: float = 0
    """Seconds within DuckDB. 0 for no limit."""
    memory_bytes: int = 0
    """Memory of DuckDB, which moves larger data to disk if it can, and of an answer that is kept whole. 0 for a quarter
    of the memory of this machine or container."""


_scratches: "weakref.WeakSet[Scratch]" = weakref.WeakSet()
"""Directories of this process's queries."""
_stuck: "list[Future[Any]]" = []
"""Parts of queries that did not stop on request."""
DEFAULT_LIMITS = Limits()
"""Limits of the product's own queries: no time limit, and a quarter of the memory."""
QUERY_LIMITS = Limits(seconds=60)
"""Limits of a user's query."""


def parse_memory(text: str) -> int:
    """Returns a size such as `4GiB` in bytes. Raises QueryError for an invalid size."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]i?B)", text.strip(), re.IGNORECASE)
    if not match or not float(match[1]):
        raise QueryError(f"{text!r} is not a memory size; write it as 4GiB or 500MB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def memory_text(num_bytes: int) -> str:
    """Returns a readable size."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"


def confine(connection: duckdb.DuckDBPyConnection, root: Path, limits: Limits) -> Callable[[], object]:
    """Sets a connection's limits, lets it access only the files of runs and their packs, and locks its settings.

    Data that do not fit into memory go to a directory that only this user can read. The returned function removes it;
    call it once the connection is closed. Otherwise it is removed with the connection.
    """
    scratch = Scratch(root, "query")
    remove_scratch = weakref.finalize(connection, scratch.remove)
    _scratches.add(scratch)
    places = [path for name in ("runs", "packs") for path in (root / name, (root / name).resolve())]  # maybe links
    allowed = {text for path in places for text in (str(path), as_pattern(path))}
    connection.execute(
        f"SET memory_limit = '{limits.memory_bytes or default_memory()}B'; SET temp_directory = {quoted(scratch.path)};"
        " SET autoload_known_extensions = false; SET autoinstall_known_extensions = false;"
        f" SET allowed_directories = [{', '.join(quoted(path) for path in sorted(allowed))}];"
        " SET enable_external_access = false; SET lock_configuration = true"
    )
    return remove_scratch


@cache
def default_memory() -> int:
    """Returns a quarter of the memory of this machine or container, in bytes."""
    with duckdb.connect() as connection:
        return int(memory_limit(connection) / 0.8 / 4)  # DuckDB's own default is 80 %


def memory_limit(connection: duckdb.DuckDBPyConnection) -> int:
    """Returns a connection's memory limit, in bytes."""
    row = connection.execute("SELECT current_setting('memory_limit')").fetchone()
    assert row
    return parse_memory(row[0])


@contextlib.contextmanager
def process_within(limits: Limits) -> Iterator[None]:
    """Keeps this process, whose only work is a query, within the memory limit. Does nothing except on Linux.

    DuckDB counts tables and sorts, but not the values that one call of a function makes: `repeat('a', 10**11)`. Memory
    that the system refuses is an ordinary error of the query.
    """
    memory = limits.memory_bytes or default_memory()
    try:
        with limited_memory(memory + _BESIDE_DUCKDB_BYTES):
            yield
    except MemoryError:
        raise QueryError(out_of_memory(memory)) from None


def out_of_memory(num_bytes: int) -> str:
    """Returns the message for a query that needs more memory than this limit."""
    return f"the query needs more than {memory_text(num_bytes)}, the memory limit\n  hint: `--memory SIZE` allows more"


class Stopwatch:
    """Runs the parts of one query within its time limit."""

    def __init__(self, connection: duckdb.DuckDBPyConnection, seconds: float) -> None:
        """Args: seconds: time limit of all parts together; 0 for no limit."""
        self._connection = connection
        self._seconds = seconds
        self._used = 0.0
        self.stuck = False
        """Whether a part did not stop on request. Its connection is then still in use and must not be closed."""

    def run(self, part: Callable[[], _Answer]) -> _Answer:
        """Runs a part in its own thread, so that Ctrl-C takes effect at once. Returns the part's answer.

        Raises:
            QueryError: the time limit is exceeded.
        """
        answer: Future[_Answer] = Future()
        began = time.monotonic()
        thread = threading.Thread(target=_settle, args=(answer, part), daemon=True)
        try:
            thread.start()  # in here: Ctrl-C may come during the wait for the thread, which has begun by then
            return answer.result(max(self._seconds - self._used, 0) if self._seconds else None)
        except TimeoutError:
            if answer.done():
                raise  # the part's own
            self._stop(answer)
            raise QueryError(
                f"the query was stopped after {self._seconds:g} seconds, its time limit\n"
                "  hint: `--timeout SECONDS` allows more; 0 means no limit"
            ) from None
        except KeyboardInterrupt:
            self._stop(answer)
            raise
        finally:
            self._used += time.monotonic() - began

    def _stop(self, answer: "Future[_Answer]") -> None:
        until = time.monotonic() + _STOPPING_SECONDS
        while not answer.done() and time.monotonic() < until:
            self._connection.interrupt()  # repeatedly: an interrupt between two statements is lost
            wait([answer], timeout=0.05)
        self.stuck = not answer.done()
        if self.stuck:
            _stuck.append(answer)


def exit_if_stuck(code: int) -> None:
    """Ends this process at once, with this exit code, if a query has not stopped on request.

    DuckDB's running threads would abort the interpreter at its end, and leave their files on disk.
    """
    if all(answer.done() for answer in _stuck):
        return
    for scratch in list(_scratches):
        scratch.remove()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _settle(answer: "Future[_Answer]", part: Callable[[], _Answer]) -> None:
    try:
        answer.set_result(part())
    except BaseException as error:  # passed to the waiting thread
        answer.set_exception(error)
