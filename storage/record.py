"""The record for notebooks, opened by `open_record`. It shows one snapshot until `refresh`."""

import os
import re
from collections.abc import Collection
from importlib.metadata import entry_points
from pathlib import Path
from types import TracebackType
from typing import Protocol

from specs.errors import RpgError
from specs.records import LARGE_TABLES, TABLES
from storage.statements.limits import QUERY_LIMITS, Limits, parse_memory
from storage.statements.statement import Params
from storage.store import Result, Store

SERVERS = "rpg.servers"
"""Group of the entry point that opens a server's record: a function from the server's URL to a ServerRecord."""


class ServerRecord(Protocol):
    """A server's record, copied to a home on this machine."""

    @property
    def root(self) -> Path:
        """Returns the root directory of the home with the copy."""
        ...

    def refresh(self, tables: Collection[str]) -> None:
        """Updates the home from the server's record, with the rows of these tables."""
        ...

    def close(self) -> None:
        """Closes connections."""
        ...


class Record:
    """Everything that runs have recorded, in the state at the first query. `refresh` moves to a later state.

    Threads may share a record; their queries run one after another.
    """

    def __init__(self, store: Store, server: ServerRecord | None = None) -> None:
        """Args: server: the server whose record the store's home copies, if any."""
        self._store = store
        self._server = server
        self._fetched = {*TABLES} - {*LARGE_TABLES}

    def __enter__(self) -> "Record":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def sql(self, query: str, params: Params = ()) -> Result:
        """Returns the answer to one read-only statement: `.arrow()`, `.df()` (pandas), `.pl()` (Polars), `.rows`.

        With a server's record, the first query that names `rollouts` or `tokens` fetches them, and moves to that
        moment.

        Args:
            params: values for each `?`, or by name for each `$name`.
        Raises:
            QueryError: the statement is wrong, is not read-only, reads outside the record, or exceeds a limit.
            RpgError: the server's record cannot be read.
        """
        self._fetch({table for table in LARGE_TABLES if re.search(rf"\b{table}\b", query, re.IGNORECASE)})
        return self._store.query(query, params)

    def refresh(self) -> None:
        """Moves to a later state: that of the next query."""
        if self._server:
            self._server.refresh(self._fetched)
        self._store.refresh()

    def close(self) -> None:
        """Closes the snapshot, and the server."""
        self._store.close()
        if self._server:
            self._server.close()

    def _fetch(self, tables: set[str]) -> None:
        """Fetches the rows of a server's tables that are not here yet."""
        if self._server and not tables <= self._fetched:
            self._fetched |= tables
            self.refresh()


def _open_server(url: str) -> ServerRecord:
    """Returns the record of a Prefect server, through the entry point of the package that accesses servers. This
    package does not.

    Raises:
        RpgError: no installed package has such an entry point; or the server does not name the address of its record.
    """
    openers = entry_points(group=SERVERS)
    if not openers:
        hint = "install rpg-experiments again (`make install`, or `pip install -e .`)"
        raise RpgError(f"cannot open {url}: no installed package has an entry point in `{SERVERS}`\n  hint: {hint}")
    (opener, *_) = openers
    server: ServerRecord = opener.load()(url)
    return server


def open_record(
    place: str | Path | None = None, *, timeout: float = QUERY_LIMITS.seconds, memory: str | None = None
) -> Record:
    """Opens the record of runs.

    Args:
        place: a home directory; or the URL of a Prefect server, for its workers' record; None means RPG_HOME, or `.rpg`
            in the working directory.
        timeout: time limit of each query, seconds; 0 for no limit.
        memory: memory limit of each query, such as `4GiB`; None for a quarter of the machine's memory.
    Raises:
        RpgError: the directory or the server does not exist, or the server does not name the address of its record.
    """
    limits = Limits(timeout, parse_memory(memory) if memory else 0)
    if isinstance(place, str) and "://" in place:
        server = _open_server(place)
        record = Record(Store.open(server.root, limits), server)
        record.refresh()
        return record
    root = Path(place or os.environ.get("RPG_HOME") or ".rpg")
    if place is not None and not root.is_dir():
        raise RpgError(f"{root} is not a directory; `open_record` takes a home, or the URL of a Prefect server")
    return Record(Store.open(root, limits))
