"""Flow runs on a real server, records as dead and living flows leave them: who is right in the end."""

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from live import wait_for
from prefect.client.orchestration import SyncPrefectClient
from prefect.states import Cancelling, Completed, Crashed, Running, State

from pipelines.home import Home
from pipelines.processes.lease import Lease, acquire
from pipelines.processes.reap import ProcessRecord
from pipelines.server.api import EmbeddedServer
from pipelines.server.client import prefect_client
from pipelines.server.deployments import EXPERIMENTS, POOL, STUDIES, ensure_deployment
from pipelines.workers.flow_process import FlowProcess
from pipelines.workers.reconciliation import Reconciliation
from rpg.files import read_json, write_json
from storage.liveness import start_of

BOOT = start_of(os.getpid()).partition(":")[0]
GONE = {"host": socket.gethostname(), "pid": 2**22 - 1, "pid_started": f"{BOOT}:1"}
"""A process of this host that lives no more."""


class Site:
    """A home, a server, and what a worker of the home does with the server."""

    def __init__(self, home: Home, client: SyncPrefectClient) -> None:
        self.home = home
        self.client = client
        self.deployment = ensure_deployment(client, EXPERIMENTS)
        self.runs = 0

    def flow_run(self, state: State[Any], run_id: str = "") -> tuple[str, UUID]:
        """A flow run of a run that has a record. Returns their ids."""
        self.runs += 1
        run_id = run_id or f"tiny-s0-{self.runs:08}"
        parameters = {"name": "tiny", "run_id": run_id, "document": "0"}
        created = self.client.create_flow_run_from_deployment(self.deployment, parameters=parameters)
        for entered in (Running(), state):
            self.client.set_flow_run_state(created.id, entered, force=True)
        return run_id, created.id

    def study_flow_run(self, state: State[Any], *, pool: str = POOL) -> tuple[Path, UUID]:
        """A flow run of a study: the directory of its lease, and its id."""
        deployment = ensure_deployment(self.client, STUDIES, pool)
        parameters = {"name": "study clips", "document": "0"}
        created = self.client.create_flow_run_from_deployment(deployment, parameters=parameters)
        for entered in (Running(), state):
            self.client.set_flow_run_state(created.id, entered, force=True)
        return self.home.study_flow("clips", str(created.id)), created.id

    def dead_process(self, flow_run_id: UUID) -> Path:
        """The note of a flow of this host that was killed."""
        note = self.home.prefect / "flows" / f"{flow_run_id}.json"
        write_json(note, asdict(ProcessRecord.of(os.getpid(), "flow")) | {"host": socket.gethostname(), "started": "0"})
        return note

    def record(self, run_id: str, status: str, flow_run_id: UUID | None) -> Path:
        directory = self.home.run(run_id)
        write_json(directory / "state.json", {"status": status, "reason": "", "flow_run_id": str(flow_run_id)} | GONE)
        return directory

    def dead_lease(self, directory: Path, number: int = 1, *, seconds_ago: float = 0.0) -> None:
        at = (datetime.now(UTC) - timedelta(seconds=seconds_ago)).isoformat()
        write_json(directory / f"leases/{number:04}.json", GONE | {"number": number, "since": at, "at": at})

    def compare(self) -> None:
        Reconciliation(self.home, POOL).compare(self.client)

    def state(self, flow_run_id: UUID) -> str:
        state = self.client.read_flow_run(flow_run_id).state
        assert state is not None
        return state.type.value


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    home = Home(tmp_path_factory.mktemp("site"))
    server = EmbeddedServer(home)
    server.start()
    try:
        server.wait()
        with prefect_client(home, server.url) as client:
            yield Site(home, client)
    finally:
        server.stop()


@pytest.mark.parametrize(
    ("status", "state"), [("finished", "COMPLETED"), ("failed", "FAILED"), ("cancelled", "CANCELLED")]
)
def test_a_flow_run_gets_the_state_in_which_its_run_ended(site: Site, status: str, state: str) -> None:
    for before in (Running(), Crashed()):
        run_id, flow_run_id = site.flow_run(before)
        site.dead_lease(site.record(run_id, status, flow_run_id))
        site.compare()
        assert site.state(flow_run_id) == state


def test_a_run_whose_process_is_gone_is_scheduled_again(site: Site) -> None:
    run_id, flow_run_id = site.flow_run(Running())
    site.dead_lease(site.record(run_id, "running", flow_run_id))
    site.compare()
    assert site.state(flow_run_id) == "SCHEDULED"


def test_a_run_that_is_executed_goes_on_whatever_its_flow_run_says(site: Site) -> None:
    for before, after in ((Running(), "RUNNING"), (Crashed(), "RUNNING"), (Cancelling(), "CANCELLING")):
        run_id, flow_run_id = site.flow_run(before)
        lease: Lease
        with acquire(site.record(run_id, "finished", flow_run_id)) as lease:
            site.compare()
            assert site.state(flow_run_id) == after
        assert lease.number == 1


def test_a_flow_run_that_nobody_executes_is_cancelled_with_its_run(site: Site) -> None:
    run_id, flow_run_id = site.flow_run(Cancelling())
    directory = site.record(run_id, "running", flow_run_id)
    site.dead_lease(directory)
    site.compare()
    assert site.state(flow_run_id) == "CANCELLED"
    assert read_json(directory / "state.json")["status"] == "cancelled"


def test_a_completed_flow_run_is_left_as_it_is(site: Site) -> None:
    run_id, flow_run_id = site.flow_run(Completed())
    site.dead_lease(site.record(run_id, "cancelled", flow_run_id))
    site.compare()
    assert site.state(flow_run_id) == "COMPLETED"


def test_a_flow_that_has_just_begun_gets_time_to_take_its_lease(site: Site) -> None:
    run_id, flow_run_id = site.flow_run(Running())
    site.dead_lease(site.record(run_id, "finished", flow_run_id), seconds_ago=3600)
    site.compare()
    assert site.state(flow_run_id) == "RUNNING"


def test_a_run_that_died_three_times_without_a_checkpoint_is_left_alone(site: Site) -> None:
    run_id, flow_run_id = site.flow_run(Running())
    directory = site.record(run_id, "running", flow_run_id)
    for number in (1, 2, 3):
        site.dead_lease(directory, number)
    checkpoint = directory / "checkpoints" / "step-000002"
    checkpoint.mkdir(parents=True)
    os.utime(checkpoint, (0, 0))
    site.compare()
    assert site.state(flow_run_id) == "CRASHED"
    # With a checkpoint of theirs it goes on.
    run_id, flow_run_id = site.flow_run(Running(), run_id)
    site.record(run_id, "running", flow_run_id)
    os.utime(checkpoint)
    site.dead_lease(directory, 3)
    site.compare()
    assert site.state(flow_run_id) == "SCHEDULED"


def test_a_flow_run_of_a_worker_with_a_home_of_its_own_is_left_to_that_worker(site: Site) -> None:
    _, flow_run_id = site.flow_run(Running())
    site.compare()
    assert site.state(flow_run_id) == "RUNNING"


def test_a_flow_run_that_makes_no_sense_does_not_keep_others_from_being_settled(site: Site) -> None:
    _, senseless = site.flow_run(Running(), "../../etc")
    run_id, flow_run_id = site.flow_run(Running())
    site.dead_lease(site.record(run_id, "finished", flow_run_id))
    site.compare()
    assert (site.state(senseless), site.state(flow_run_id)) == ("RUNNING", "COMPLETED")


def test_a_study_whose_process_is_gone_is_scheduled_again_by_any_worker_of_its_pool(site: Site) -> None:
    directory, flow_run_id = site.study_flow_run(Running())
    site.dead_lease(directory)
    site.compare()
    assert site.state(flow_run_id) == "SCHEDULED"


def test_a_study_that_nobody_executes_is_cancelled(site: Site) -> None:
    directory, flow_run_id = site.study_flow_run(Cancelling())
    with acquire(directory):
        site.compare()
        assert site.state(flow_run_id) == "CANCELLING", "its flow is at work, and notices by itself"
    directory, flow_run_id = site.study_flow_run(Cancelling())
    site.dead_lease(directory)
    site.compare()
    assert site.state(flow_run_id) == "CANCELLED"


def test_a_study_that_has_just_ended_gets_time_to_tell_the_server(site: Site) -> None:
    for seconds_ago, state in ((0, "CANCELLING"), (20, "CANCELLED")):
        directory, flow_run_id = site.study_flow_run(Cancelling())
        at = (datetime.now(UTC) - timedelta(seconds=seconds_ago)).isoformat()
        write_json(directory / "leases/0001.json", GONE | {"number": 1, "at": at, "released": True})
        site.compare()
        assert site.state(flow_run_id) == state


def test_the_note_of_a_dead_flow_is_kept_until_its_own_pool_has_settled_it(site: Site) -> None:
    directory, flow_run_id = site.study_flow_run(Running(), pool="other")
    site.dead_lease(directory)
    note = site.dead_process(flow_run_id)
    site.compare()
    assert note.exists()
    Reconciliation(site.home, "other").compare(site.client)
    assert site.state(flow_run_id) == "SCHEDULED"
    assert not note.exists()


def test_a_flow_that_was_stopped_runs_and_is_not_at_work() -> None:
    sleeper = subprocess.Popen(["sleep", "60"])
    try:
        flow = FlowProcess("0", ProcessRecord.of(sleeper.pid), "")
        assert flow.is_at_work
        sleeper.send_signal(signal.SIGSTOP)
        wait_for(lambda: not flow.is_at_work, timeout=10, what="the stop")
        assert flow.is_alive
    finally:
        sleeper.kill()
        sleeper.wait()
    assert not flow.is_alive
