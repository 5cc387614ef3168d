"""A study's flow run on a real server, asked to stop while a trial is under way. What stands for the trial waits."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any
from uuid import UUID

import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import FlowRun
from prefect.exceptions import Abort
from prefect.flow_engine import run_flow_sync
from prefect.states import Cancelling, Paused
from tiny_study import write_study

from pipelines.home.home import Home
from pipelines.prefect_server.api import EmbeddedServer, client_settings
from pipelines.prefect_server.client import prefect_client
from pipelines.prefect_server.deployments import STUDIES, ensure_deployment
from pipelines.prefect_server.outbox import SUSPENDED
from pipelines.processes.stop import GIVEN_BACK
from pipelines.studies import flow
from pipelines.studies.trials import StudyInterruptedError
from pipelines.studies.workers import StudyStop
from specs import load_study_document
from specs.machine.liveness import newest_lease


class Site:
    """A server, and a study on it."""

    def __init__(self, home: Home, server: EmbeddedServer, client: SyncPrefectClient, document: dict[str, Any]) -> None:
        self.home = home
        self.server = server
        self.client = client
        self.document = document

    def flow_run(self) -> FlowRun:
        deployment = ensure_deployment(self.client, STUDIES)
        parameters = {"name": "study clips", "document": self.document}
        return self.client.create_flow_run_from_deployment(deployment, parameters=parameters)

    def execute(self, flow_run: FlowRun, meanwhile: Callable[[UUID], None], monkeypatch: pytest.MonkeyPatch) -> None:
        """Executes the flow run in this process, as a worker does; `meanwhile` happens while a trial is under way."""

        def work(_document: Any, _home: Home, stop: StudyStop, **_: Any) -> dict[str, Any]:
            with stop.on_signals():
                meanwhile(flow_run.id)
                deadline = time.monotonic() + 30
                while time.monotonic() < deadline:
                    if stop.requested() is not None:
                        raise StudyInterruptedError
                    time.sleep(0.1)
            raise AssertionError("nothing asked to stop")

        monkeypatch.setattr(flow, "work", work)
        monkeypatch.setenv("RPG_HOME", str(self.home.root))
        with client_settings(self.home, self.server.url):
            run_flow_sync(flow.run_study_flow, flow_run=flow_run, parameters=flow_run.parameters, return_type="state")

    def state(self, flow_run: FlowRun) -> str:
        state = self.client.read_flow_run(flow_run.id).state
        assert state is not None
        return state.type.value

    def is_held(self, flow_run: FlowRun) -> bool:
        lease = newest_lease(self.home.study_flow("clips", str(flow_run.id)))
        assert lease is not None
        return lease.is_held()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    directory = tmp_path_factory.mktemp("site")
    home = Home(directory / "home")
    document = load_study_document(write_study(directory / "specs")).to_json()
    server = EmbeddedServer(home)
    server.start()
    try:
        server.wait()
        with prefect_client(home, server.url) as client:
            yield Site(home, server, client, document)
    finally:
        server.stop()


def test_a_study_that_is_cancelled_on_the_dashboard_ends(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    flow_run = site.flow_run()

    def cancel(flow_run_id: UUID) -> None:
        assert site.is_held(flow_run)
        site.client.set_flow_run_state(flow_run_id, Cancelling(), force=True)

    site.execute(flow_run, cancel, monkeypatch)
    assert site.state(flow_run) == "CANCELLED"
    assert not site.is_held(flow_run)


def test_a_study_that_is_suspended_on_the_dashboard_stays_so(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    flow_run = site.flow_run()

    def suspend(flow_run_id: UUID) -> None:
        site.client.set_flow_run_state(flow_run_id, Paused(), force=True)

    with pytest.raises(Abort, match=SUSPENDED):
        site.execute(flow_run, suspend, monkeypatch)
    assert site.state(flow_run) == "PAUSED"


def terminate(_flow_run_id: UUID) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_study_whose_worker_is_stopped_is_given_back(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    flow_run = site.flow_run()
    with pytest.raises(Abort, match=GIVEN_BACK):
        site.execute(flow_run, terminate, monkeypatch)
    assert site.state(flow_run) == "SCHEDULED", "any worker of the pool goes on with it"


def test_a_study_whose_worker_is_stopped_while_the_server_is_away_does_not_fail(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow_run = site.flow_run()

    def terminate_in_an_outage(flow_run_id: UUID) -> None:
        site.server.stop()
        terminate(flow_run_id)

    begun = time.monotonic()
    with pytest.raises(Abort, match="what it was not told is kept for it"):
        site.execute(flow_run, terminate_in_an_outage, monkeypatch)
    assert time.monotonic() - begun < 60
    assert not site.is_held(flow_run), "reconciliation finds it, and schedules it again"
