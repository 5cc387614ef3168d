"""The record that a Prefect server's workers share, read from another machine: its location, and the runs that only the
server knows."""

import contextlib
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import httpx

from pipelines.home.home import Home
from pipelines.prefect.server.api import auth_string_for
from pipelines.prefect.server.client import api_url, prefect_client
from pipelines.prefect.server.credentials import auth_string
from pipelines.prefect.server.deployments import RECORD_VARIABLE
from pipelines.prefect.server.settings import RECORD_PATH
from pipelines.prefect.server.waiting import WaitingRun, waiting_runs
from pipelines.remote.mirror import SMALL, Mirror, mirror_home, open_source
from pipelines.remote.record_files import is_recorded
from pipelines.remote.sources import Source, SourceError, WebSource
from specs.errors import Issue, SpecError
from specs.machine.files import write_json

_SECONDS = 20.0
"""Seconds to wait for the server's answer with the location of the record."""


class ServerRecord:
    """A server's record as a home on this machine: a mirror, with the runs that no worker has started yet."""

    def __init__(self, home: Home, profile: str) -> None:
        """Looks up the location of the record. Reads nothing yet: call `refresh`.

        Args:
            home: home of this command; it may have the login for the server.
            profile: the URL of the server or of its record, or the name of a Prefect profile.
        Raises:
            SpecError: no server answers, it refuses, or it does not publish the location of its record.
        """
        self._own, self._url, self._place = home, "", profile.rstrip("/")
        self._source = _record_at(home, profile) or self._open_source(profile)
        self._mirror = Mirror(mirror_home(f"{self._url} {self._place}".strip()), self._source)
        self.home = self._mirror.home

    @property
    def root(self) -> Path:
        """Returns the root directory of `home`."""
        return self.home.root

    def close(self) -> None:
        """Closes the connections."""
        self._source.close()

    def refresh(self, tables: Collection[str] = SMALL, *, logs: bool = False, only: Collection[str] = ()) -> None:
        """Updates `home` to the present state of the record and the server.

        Args:
            tables, logs, only: as for `Mirror.pull`.
        Raises:
            RpgError: the record or the server cannot be read.
        """
        # Read first: runs that a worker starts meanwhile are in the record by then.
        waiting = self._waiting()
        self._mirror.pull(tables, logs=logs, only=only)
        self._show_waiting(waiting)
        if tables and not only:
            _ingest(self.home)

    def _open_source(self, profile: str) -> Source:
        """Returns the source that the server names, and sets `_url` and `_place` to the addresses of the server and of
        the source."""
        self._url = api_url(self._own, profile)
        shown = auth_string_for(self._own, self._url)
        named = _named_to_readers(self._url, shown) or self._variable()
        if not isinstance(named, str):
            hint = (
                f"set the server's variable {RECORD_VARIABLE}"
                " to the URL of `rpg report --serve` there, or of the object store"
            )
            raise SpecError(Issue(f"the server at {self._url} does not publish its record's address", hint=hint))
        self._place = named
        # The credentials of this home's processes are for servers of this home, and the server may name any location.
        of_place = auth_string_for(self._own, named)
        return open_source(named, of_place or (auth_string(self._own) if shown else ""))

    def _variable(self) -> Any:
        """Returns the value of the server's variable that holds the record's location. None if it is not set."""
        with prefect_client(self._own, self._url) as client:
            variable = client.read_variable_by_name(RECORD_VARIABLE)
        return None if variable is None else variable.value

    def _waiting(self) -> list[WaitingRun]:
        """Returns the runs that wait for a worker, from the server's API if the record's own server
        does not know them."""
        served = self._source.waiting()
        if served is None and self._url:
            with prefect_client(self._own, self._url) as client:
                return waiting_runs(lambda path, body: client.request("POST", path, json=body).json())  # type: ignore[arg-type]
        try:
            return [WaitingRun(**run) for run in served or ()]
        except TypeError as error:
            raise SourceError(f"the answer is not a record: {error}") from error

    def _show_waiting(self, waiting: Sequence[WaitingRun]) -> None:
        """Gives each waiting run without a record a directory, and removes those from earlier calls."""
        recorded = self._mirror.units()
        units = {f"runs/{run.run_id}": run for run in waiting}
        shown = {unit for unit in units if unit not in recorded and is_recorded(f"{unit}/run.json")}
        for directory in self.home.root.glob("runs/*"):
            if f"runs/{directory.name}" not in recorded | shown:
                shutil.rmtree(directory, ignore_errors=True)
        for unit in shown:
            write_json(self.home.root / unit / "run.json", units[unit].run, durable=False)
            write_json(self.home.root / unit / "state.json", units[unit].state, durable=False)


def _record_at(home: Home, profile: str) -> WebSource | None:
    """Returns the source of the record if the address is that of the record's web application."""
    if not profile.startswith(("http://", "https://")):
        return None
    source = WebSource(profile, auth_string_for(home, profile.rstrip("/")))
    if source.is_record():
        return source
    source.close()
    return None


def _named_to_readers(url: str, shown: str) -> str | None:
    """Returns the location of the record. Our servers also return it to clients with read access only. None for other
    servers.
    """
    user, _, password = shown.partition(":")
    auth = (user, password) if shown else None
    with contextlib.suppress(httpx.HTTPError, ValueError, KeyError, TypeError):
        answer = httpx.get(url.removesuffix("/api") + RECORD_PATH, auth=auth, timeout=_SECONDS)
        return str(answer.json()["value"]) if answer.status_code == 200 else None
    return None


def _ingest(home: Home) -> None:
    """Updates the mirror's database, unless another command is doing so."""
    from filelock import Timeout

    from storage.ingest import ingest

    with contextlib.suppress(Timeout):
        ingest(home.root, wait_seconds=0)
