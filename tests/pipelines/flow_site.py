"""Flow runs on a real server, and runs with any record, for tests of the two together."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from guarded import PASSWORD, Server
from prefect.client.orchestration import SyncPrefectClient
from prefect.states import Pending, Running, State

from pipelines.home.home import Home
from pipelines.prefect.flows.workers.reconciliation import Reconciliation
from pipelines.prefect.server.client import prefect_client
from pipelines.prefect.server.deployments import EXPERIMENTS, POOL, STUDIES, Deployment, ensure_deployment
from pipelines.processes.reap import ProcessRecord
from specs.machine.files import read_json, write_json
from specs.machine.liveness import start_of, status_of

GONE = {"host": socket.gethostname(), "pid": 2**22 - 1, "pid_started": f"{start_of(os.getpid()).partition(':')[0]}:1"}
"""A process of this host that lives no more."""


class Site:
    """A home, a server with a password, and the rounds of a worker of its pool."""

    def __init__(self, home: Home, url: str, client: SyncPrefectClient) -> None:
        self.home, self.url, self.client = home, url, client
        self._numbers = count(1)

    def new_run(self) -> str:
        """The id of a run that is not yet."""
        return f"tiny-s0-{next(self._numbers):08}"

    def flow_run(self, run_id: str, state: State[Any], experiment: str = "tiny") -> UUID:
        parameters = {"name": "tiny", "run_id": run_id, "document": "0"}
        tags = {"name": f"{experiment}: {run_id}", "tags": [f"experiment:{experiment}"]}
        return self._flow_run(EXPERIMENTS, parameters, state, **tags)

    def new_flow_run(self, state: State[Any]) -> tuple[str, UUID]:
        """A flow run of a run that is not yet. Returns their ids."""
        run_id = self.new_run()
        return run_id, self.flow_run(run_id, state)

    def study_flow_run(self, state: State[Any], *, pool: str = POOL) -> tuple[Path, UUID]:
        """A flow run of a study: the directory of its lease, and its id."""
        created = self._flow_run(STUDIES, {"name": "study clips", "document": "0"}, state, pool)
        return self.home.study_flow("clips", str(created)), created

    def _flow_run(
        self, of: Deployment, parameters: dict[str, Any], state: State[Any], pool: str = POOL, **tags: Any
    ) -> UUID:
        deployment = ensure_deployment(self.client, of, pool)
        created = self.client.create_flow_run_from_deployment(deployment, parameters=parameters, **tags).id
        before = [] if state.is_scheduled() or state.is_pending() else [Pending(), Running()]
        for entered in (*before, state):
            self.client.set_flow_run_state(created, entered, force=True)
        return created

    def record(self, run_id: str, status: str, flow_run_id: UUID | None, **fields: Any) -> Path:
        """Writes a run's state; its process is gone. Returns its directory."""
        directory = self.home.run(run_id)
        known = {"status": status, "reason": "", "flow_run_id": flow_run_id and str(flow_run_id)}
        write_json(directory / "state.json", GONE | known | fields)
        return directory

    def lease(self, directory: Path, number: int = 1, *, seconds_ago: float = 0.0, released: bool = False) -> None:
        """Writes the lease of a process that is gone, last held then."""
        at = (datetime.now(UTC) - timedelta(seconds=seconds_ago)).isoformat()
        lease = GONE | {"number": number, "since": at, "at": at, "released": released}
        write_json(directory / f"leases/{number:04}.json", lease)

    def dead_process(self, name: UUID | str) -> Path:
        """The note of a flow of this host that was killed."""
        note = self.home.prefect / "flows" / f"{name}.json"
        write_json(note, asdict(ProcessRecord.of(os.getpid(), "flow")) | {"host": socket.gethostname(), "started": "0"})
        return note

    def compare(self) -> None:
        Reconciliation(self.home, POOL).compare(self.client)

    def kind(self, flow_run_id: UUID) -> str:
        state = self.client.read_flow_run(flow_run_id).state
        return str(state.type.value)

    def status(self, run_id: str) -> str:
        return status_of(self.home.run(run_id), read_json(self.home.run(run_id) / "state.json"))


@contextmanager
def new_site(directory: Path) -> Iterator[Site]:
    """A site with nothing in it, whose server's password is in the environment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREFECT_API_AUTH_STRING", PASSWORD)
        server = Server(Home(directory / "server"))
        try:
            with prefect_client(server.home, server.url) as client:
                yield Site(Home(directory / "home"), server.url, client)
        finally:
            server.stop()
