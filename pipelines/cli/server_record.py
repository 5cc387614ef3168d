"""The record of a Prefect server's workers, read from here: where it is, and the runs that only the server knows of."""

import contextlib
import shutil
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.home import Home
from pipelines.remote.mirror import SMALL, Mirror, mirror_home, open_source
from pipelines.remote.record_files import is_recorded
from pipelines.remote.sources import Source
from pipelines.server.client import api_url, prefect_client
from pipelines.server.deployments import RECORD_VARIABLE
from pipelines.server.flow_runs import LIVE, flow_runs, has_begun, run_id_of
from rpg.files import write_json
from specs.errors import Issue, SpecError

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun


class ServerRecord:
    """A server's record as a home on this machine: a mirror, and in it the runs that no worker has begun yet."""

    def __init__(self, home: Home, profile: str) -> None:
        """Looks up where the record is. Nothing is read yet: call `refresh`.

        Args:
            home: of this command; it may know how to sign in at the server.
            profile: the server's URL or the name of a Prefect profile.
        Raises:
            SpecError: no server answers, it refuses, or it does not say where its record is.
        """
        self._own, self._url = home, api_url(home, profile)
        place, self._source = self._open_source()
        self._mirror = Mirror(mirror_home(f"{self._url} {place}"), self._source)
        self.home = self._mirror.home

    @property
    def root(self) -> Path:
        """Of `home`."""
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
        with prefect_client(self._own, self._url) as client:
            waiting = list(_waiting_runs(client))
        self._mirror.pull(tables, logs=logs, only=only)
        self._show_waiting(waiting)
        if tables and not only:
            _ingest(self.home)

    def _open_source(self) -> tuple[str, Source]:
        with prefect_client(self._own, self._url) as client:
            from prefect.settings import PREFECT_API_AUTH_STRING

            variable, password = client.read_variable_by_name(RECORD_VARIABLE), PREFECT_API_AUTH_STRING.value()
        if variable is None or not isinstance(variable.value, str):
            hint = (
                f"set its variable {RECORD_VARIABLE} to the URL of `rpg report --serve` there, or of the object store"
            )
            raise SpecError(Issue(f"the server at {self._url} does not say where its workers' record is", hint=hint))
        return variable.value, open_source(variable.value, password or "")

    def _show_waiting(self, waiting: "Iterable[FlowRun]") -> None:
        """Gives each run that waits and has no record yet a directory, and removes those of earlier looks."""
        recorded = self._mirror.units()
        by_unit = {f"runs/{run_id_of(flow_run)}": flow_run for flow_run in waiting}
        shown = {unit for unit in by_unit if unit not in recorded and is_recorded(f"{unit}/run.json")}
        for directory in self.home.root.glob("runs/*"):
            if f"runs/{directory.name}" not in recorded | shown:
                shutil.rmtree(directory, ignore_errors=True)
        for unit in shown:
            _write_documents(self.home.root / unit, by_unit[unit])


def _waiting_runs(client: "SyncPrefectClient") -> "Iterator[FlowRun]":
    """The flow runs of ours that have not ended, and those that were cancelled before a worker began them."""
    yield from (flow_run for flow_run in flow_runs(client, ["CANCELLED"]) if not has_begun(flow_run))
    yield from flow_runs(client, LIVE)


def _write_documents(directory: Path, flow_run: "FlowRun") -> None:
    """What a flow run tells of its run, where the mirror keeps run.json and state.json."""
    tags = dict(tag.partition(":")[::2] for tag in flow_run.tags)
    state = flow_run.state
    identity = {
        "run_id": directory.name,
        "experiment": tags.get("experiment"),
        "name": flow_run.name.partition(": ")[2],
        "seed": int(tags["seed"]) if tags.get("seed", "").isdecimal() else None,
        "objective": tags.get("objective"),
        "created_at": flow_run.created.isoformat() if flow_run.created else None,
    }
    cancelled = state is not None and state.type.value == "CANCELLED"
    standing = {
        "status": "cancelled" if cancelled else "pending",
        "reason": "cancelled before it began" if cancelled else f"on the server: {state.name if state else 'unknown'}",
        "flow_run_id": str(flow_run.id),
        "ended_at": state.timestamp.isoformat() if state and cancelled else None,
    }
    write_json(directory / "run.json", identity, durable=False)
    write_json(directory / "state.json", standing, durable=False)


def _ingest(home: Home) -> None:
    """Brings the mirror's database up to date, unless another command does so just now."""
    from filelock import Timeout

    from storage.ingest import ingest

    with contextlib.suppress(Timeout):
        ingest(home.root, wait_seconds=0)
