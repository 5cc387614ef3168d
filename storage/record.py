"""The record as a notebook opens it: `open_record`, one snapshot until `refresh`."""

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
        """Root directory of that home."""
        ...

    def refresh(self, tables: Collection[str]) -> None:
        """Brings the home up to the server's record, with the rows of these tables."""
        ...

    def close(self) -> None:
        """Lets go of connections."""
        ...


class Record:
    """Everything that runs have recorded, as it was at one moment: that of the first query, until `refresh`.

    Threads may share a record; their queries run one after another.
    """

    def __init__(self, store: Store, server: ServerRecord | None = None) -> None:
        """`server`: where the store's home is a copy of a server's record."""
        self._store = store
        self._server = server
        self._fetched = {*TABLES} - {*LARGE_TABLES}

    def __enter__(self) -> "Record":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def sql(self, query: str, params: Params = ()) -> Result:
        """Returns the answer to one statement that reads: `.arrow()`, `.df()` (pandas), `.pl()` (Polars), `.rows`.

        Of a server's record, the first query that names `rollouts` or `tokens` fetches them, and moves to that moment.

        Args:
            params: values for each `?`, or by name for each `$name`.
        Raises:
            QueryError: the statement is wrong, does not read, touches what is not recorded, or passes a limit.
            RpgError: the server's record cannot be read.
        """
        self._fetch({table for table in LARGE_TABLES if re.search(rf"\b{table}\b", query, re.IGNORECASE)})
        return self._store.query(query, params)

    def refresh(self) -> None:
        """From here on queries see a later moment: that of the next query."""
        if self._server:
            self._server.refresh(self._fetched)
        self._store.refresh()

    def close(self) -> None:
        """Lets go of the snapshot, and of the server."""
        self._store.close()
        if self._server:
            self._server.close()

    def _fetch(self, tables: set[str]) -> None:
        """Fetches the rows of a server's tables that are not here yet."""
        if self._server and not tables <= self._fetched:
            self._fetched |= tables
            self.refresh()


def _open_server(url: str) -> ServerRecord:
    """Returns the record of a Prefect server, by the entry point of whoever speaks to servers: this package does not.

    Raises:
        RpgError: no installed package offers one; or the server does not say where its record is.
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
    """Opens what runs have recorded.

    Args:
        place: a home directory; or the URL of a Prefect server, whose workers' record it is; None: RPG_HOME, or `.rpg`
            in the working directory.
        timeout: of each query, seconds; 0: none.
        memory: of each query, as `4GiB`; None: a quarter of the machine's.
    Raises:
        RpgError: there is no such directory, or no server that says where its record is.
    """
    limits = Limits(timeout, parse_memory(memory) if memory else 0)
    if isinstance(place, str) and "://" in place:
        server = _open_server(place)
        record = Record(Store.open(server.root, limits), server)
        record.refresh()
        return record
    root = Path(place or os.environ.get("RPG_HOME") or ".rpg")
    if place is not None and not root.is_dir():
        raise RpgError(f"{root} is no directory; `open_record` takes a home, or the URL of a Prefect server")
    return Record(Store.open(root, limits))
