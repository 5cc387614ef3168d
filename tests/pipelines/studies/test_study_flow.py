"""A study's flow run on a real server, asked to stop while a trial is under way. What stands for the trial waits."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import FlowRun, State
from prefect.exceptions import Abort
from prefect.flow_engine import run_flow_sync
from prefect.states import AwaitingRetry, Cancelling, Crashed, Late, Paused, Pending, Running, Scheduled
from tiny_study import write_study

from pipelines.home.home import Home
from pipelines.home.state import RunState
from pipelines.prefect.flows import frozen
from pipelines.prefect.server.api import EmbeddedServer, client_settings
from pipelines.prefect.server.client import prefect_client
from pipelines.prefect.server.credentials import own_string
from pipelines.prefect.server.deployments import STUDIES, ensure_deployment
from pipelines.prefect.server.flow_runs import OPEN, flow_runs
from pipelines.prefect.server.outbox import SUSPENDED
from pipelines.processes.stop import GIVEN_BACK
from pipelines.studies import flow
from pipelines.studies.trials import StudyInterruptedError
from pipelines.studies.workers import StudyStop, cancel_study, study_named
from specs import load_study_document
from specs.machine.files import write_json
from specs.machine.lease import acquire
from specs.machine.liveness import newest_lease
from specs.study_document import StudyDocument

Call = Callable[..., tuple[int, str, str]]


class Site:
    """A server, and a study on it."""

    def __init__(self, home: Home, server: EmbeddedServer, client: SyncPrefectClient, document: dict[str, Any]) -> None:
        self.home = home
        self.server = server
        self.client = client
        self.document = document

    def flow_run(self) -> FlowRun:
        deployment = ensure_deployment(self.client, STUDIES)
        digest = frozen.send(self.client, self.document, "Frozen study clips")
        parameters = {"name": "study clips", "document": digest}
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
        return state.type.value

    def is_held(self, flow_run: FlowRun) -> bool:
        lease = newest_lease(self.home.study_flow("clips", str(flow_run.id)))
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


@pytest.mark.more
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


STATES = [Scheduled(), Late(scheduled_time=datetime.now(UTC)), AwaitingRetry(scheduled_time=datetime.now(UTC))]


def submit(site: Site, workers: int = 1) -> list[FlowRun]:
    """A study that has not started, as `rpg study submit` leaves it."""
    flow.submit_study(StudyDocument.from_json(site.document), site.home, site.server.url, workers=workers)
    return list(flow_runs(site.client, OPEN, study="clips"))


@pytest.mark.more
@pytest.mark.parametrize("far", [True, False], ids=["from a far client", "from the home"])
@pytest.mark.parametrize("verb", ["cancel", "study cancel"])
def test_a_submitted_study_that_nobody_has_begun_is_cancelled(
    site: Site, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch, verb: str, far: bool
) -> None:
    submitted = submit(site, workers=2)
    assert len(submitted) == 2
    begin_at(site, monkeypatch, tmp_path if far else site.home.root)
    code, _, err = call(*verb.split(), "clips", *(["--profile", site.server.url] if far else []))
    assert (code, err) == (0, "clips was waiting and is cancelled\n")
    assert {site.state(flow_run) for flow_run in submitted} == {"CANCELLED"}
    code, _, err = call(*verb.split(), "clips", *(["--profile", site.server.url] if far else []))
    assert code == 2, "there is nothing to cancel any more"


def begin_at(site: Site, monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    """The commands of this test are called in that home, by who knows the server's password."""
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", own_string(site.home))
    monkeypatch.setenv("RPG_HOME", str(home))


@pytest.mark.more
@pytest.mark.parametrize("name", ["clips", "clips-confirmation"])
def test_a_study_under_way_is_stopped_as_a_whole_from_a_far_client(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (flow_run,) = submit(site)
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", own_string(site.home))
    far, said = Home(tmp_path), []
    threads: list[threading.Thread] = []

    def cancel(_flow_run_id: UUID) -> None:
        def from_afar() -> None:
            study = study_named(far, name, site.server.url)
            said.append(cancel_study(far, study, 0.0, site.server.url))

        threads.append(threading.Thread(target=from_afar))
        threads[0].start()

    site.execute(flow_run, cancel, monkeypatch)
    threads[0].join()
    assert said == ["clips is cancelled; if run or submitted again, it continues from here"]
    assert site.state(flow_run) == "CANCELLED"


@pytest.mark.more
@pytest.mark.parametrize("state", [*STATES, Pending(), Running(), Paused(), Crashed()], ids=lambda state: state.name)
def test_a_study_is_cancelled_in_any_state_of_its_flow_run(site: Site, state: State[Any]) -> None:
    (flow_run,) = submit(site)
    for entered in (Running(), state):
        site.client.set_flow_run_state(flow_run.id, entered, force=True)
    acquire(site.home.study_flow("clips", str(flow_run.id))).release()  # A worker had it, and is gone.
    assert cancel_study(site.home, "clips", 0.0).startswith("clips is cancelled")
    assert site.state(flow_run) == "CANCELLED"


def test_a_study_that_a_command_runs_here_is_stopped_and_waited_for(tmp_path: Path) -> None:
    home = Home(tmp_path)
    write_json(home.study("clips") / "study.json", {"name": "clips"})
    write_json(home.experiment("clips") / "experiment.json", {"current": ["clips-s0"]})
    lease = acquire(home.run("clips-s0"))
    state = RunState(home, "clips-s0", lease.fence)
    state.begin(pid=os.getpid())
    stop, seen = StudyStop(home, "clips"), []
    time.sleep(0.01)  # Times are kept in milliseconds.

    def trial() -> None:
        while (request := stop.requested()) is None:
            time.sleep(0.05)
        seen.append(request.reason)
        state.end("cancelled", request.reason)
        lease.release()

    thread = threading.Thread(target=trial)
    thread.start()
    assert study_named(home, "clips") == "clips"
    assert cancel_study(home, "clips", 0.0) == "clips is cancelled; if run or submitted again, it continues from here"
    thread.join(timeout=0.5)
    assert seen == ["cancelled with its study"]


@pytest.mark.more
def test_a_study_whose_worker_is_stopped_while_the_server_is_away_does_not_fail(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow_run = site.flow_run()

    def terminate_in_an_outage(flow_run_id: UUID) -> None:
        site.server.stop()
        terminate(flow_run_id)

    begun = time.monotonic()
    with pytest.raises(Abort, match="its pending updates are kept"):
        site.execute(flow_run, terminate_in_an_outage, monkeypatch)
    assert time.monotonic() - begun < 60
    assert not site.is_held(flow_run), "reconciliation finds it, and schedules it again"
