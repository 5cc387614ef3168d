"""The record of a Prefect server's workers, read from here: where it is, and the runs that only the server knows of."""

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
"""Patience with the server's answer to where the record is."""


class ServerRecord:
    """A server's record as a home on this machine: a mirror, and in it the runs that no worker has begun yet."""

    def __init__(self, home: Home, profile: str) -> None:
        """Looks up where the record is. Nothing is read yet: call `refresh`.

        Args:
            home: of this command; it may know how to sign in at the server.
            profile: the URL of the server or of its record, or the name of a Prefect profile.
        Raises:
            SpecError: no server answers, it refuses, or it does not say where its record is.
        """
        self._own, self._url, self._place = home, "", profile.rstrip("/")
        self._source = _record_at(home, profile) or self._open_source(profile)
        self._mirror = Mirror(mirror_home(f"{self._url} {self._place}".strip()), self._source)
        self.home = self._mirror.home

    @property
    def root(self) -> Path:
        """Root directory of `home`."""
        return self.home.root

    def close(self) -> None:
        """Lets go of connections."""
        self._source.close()

    def refresh(self, tables: Collection[str] = SMALL, *, logs: bool = False, only: Collection[str] = ()) -> None:
        """Brings `home` up to what the record and the server say now.

        Args:
            tables, logs, only: as for `Mirror.pull`.
        Raises:
            RpgError: the record or the server cannot be read.
        """
        # Asked first: what a worker begins meanwhile is in the record by then.
        waiting = self._waiting()
        self._mirror.pull(tables, logs=logs, only=only)
        self._show_waiting(waiting)
        if tables and not only:
            _ingest(self.home)

    def _open_source(self, profile: str) -> Source:
        """The source that the server names. `_url` and `_place` are the server's and the source's from then on."""
        self._url = api_url(self._own, profile)
        shown = auth_string_for(self._own, self._url)
        named = _named_to_readers(self._url, shown) or self._variable()
        if not isinstance(named, str):
            hint = (
                f"set its variable {RECORD_VARIABLE} to the URL of `rpg report --serve` there, or of the object store"
            )
            raise SpecError(Issue(f"the server at {self._url} does not say where its workers' record is", hint=hint))
        self._place = named
        # What this home's processes show is for servers of this home, and the server may name any place.
        of_place = auth_string_for(self._own, named)
        return open_source(named, of_place or (auth_string(self._own) if shown else ""))

    def _variable(self) -> Any:
        """Value of the server's variable for the record's place; None where there is none."""
        with prefect_client(self._own, self._url) as client:
            variable = client.read_variable_by_name(RECORD_VARIABLE)
        return None if variable is None else variable.value

    def _waiting(self) -> list[WaitingRun]:
        """The runs that wait for a worker. Where the record's own server does not know them, its API is asked."""
        served = self._source.waiting()
        if served is None and self._url:
            with prefect_client(self._own, self._url) as client:
                return waiting_runs(lambda path, body: client.request("POST", path, json=body).json())  # type: ignore[arg-type]
        try:
            return [WaitingRun(**run) for run in served or ()]
        except TypeError as error:
            raise SourceError(f"what answers for the record is none: {error}") from error

    def _show_waiting(self, waiting: Sequence[WaitingRun]) -> None:
        """Gives each run that waits and has no record yet a directory, and removes those of earlier looks."""
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
    """The source of the record, where the address is that of its web application."""
    if not profile.startswith(("http://", "https://")):
        return None
    source = WebSource(profile, auth_string_for(home, profile.rstrip("/")))
    if source.is_record():
        return source
    source.close()
    return None


def _named_to_readers(url: str, shown: str) -> str | None:
    """The place of the record as a server of ours tells also who may only read; None where this server does not."""
    user, _, password = shown.partition(":")
    auth = (user, password) if shown else None
    with contextlib.suppress(httpx.HTTPError, ValueError, KeyError, TypeError):
        answer = httpx.get(url.removesuffix("/api") + RECORD_PATH, auth=auth, timeout=_SECONDS)
        return str(answer.json()["value"]) if answer.status_code == 200 else None
    return None


def _ingest(home: Home) -> None:
    """Brings the mirror's database up to date, unless another command does so just now."""
    from filelock import Timeout

    from storage.ingest import ingest

    with contextlib.suppress(Timeout):
        ingest(home.root, wait_seconds=0)
