"""Flow runs on a real server, with records of dead and living flows: which state wins."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import pytest
from flow_site import Site, new_site
from live import SPEC
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    ArtifactCollectionFilter,
    ArtifactCollectionFilterKey,
    ArtifactFilter,
    ArtifactFilterId,
    ArtifactFilterKey,
)
from prefect.client.schemas.schedules import CronSchedule
from prefect.states import Cancelled, Cancelling, Completed, Crashed, Failed, Pending, Running, Scheduled, State
from waiting import wait_for

from pipelines.home.state import RunState
from pipelines.prefect.flows import frozen, submit
from pipelines.prefect.flows.workers import reconciliation
from pipelines.prefect.flows.workers.flow_process import FlowProcess
from pipelines.prefect.flows.workers.reconciliation import Reconciliation
from pipelines.prefect.flows.workers.worker import worker_name
from pipelines.prefect.server import client as server_client
from pipelines.prefect.server import outbox
from pipelines.prefect.server.api import client_settings
from pipelines.prefect.server.deployments import POOL, SCHEDULES, ensure_deployment
from pipelines.prefect.server.outbox import Outbox, unsent_file
from pipelines.processes.reap import ProcessRecord
from specs.loader import load_document
from specs.machine import liveness
from specs.machine.files import read_json, write_json
from specs.machine.lease import acquire


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with new_site(tmp_path_factory.mktemp("site")) as site:
        yield site


NO_LEASE, HELD, DEAD, OLD = "", "held", "dead", "an hour old"
"""The newest lease of a run: none, a living process's, a dead process's with a fresh heartbeat, or with an old one."""
SETTLED: list[tuple[State[Any], str, str, str, str]] = [
    # The state on the server, the status on record, the lease, and both after a round.
    *((before, "finished", DEAD, "COMPLETED", "finished") for before in (Running(), Crashed())),
    *((before, "failed", DEAD, "FAILED", "failed") for before in (Running(), Crashed())),
    *((before, "cancelled", DEAD, "CANCELLED", "cancelled") for before in (Running(), Crashed())),
    (Completed(), "cancelled", DEAD, "COMPLETED", "cancelled"),
    # Its process is gone: another worker resumes it, or it ends because it was cancelled.
    (Running(), "running", DEAD, "SCHEDULED", "pending"),
    (Cancelling(), "running", DEAD, "CANCELLED", "cancelled"),
    # A process executes it, whatever its flow run says.
    (Running(), "finished", HELD, "RUNNING", "finished"),
    (Crashed(), "finished", HELD, "RUNNING", "finished"),
    (Cancelling(), "finished", HELD, "CANCELLING", "finished"),
    (Failed(), "running", HELD, "FAILED", "running"),
    # A flow that has just begun gets time to take its lease; one without a record is of a worker of another home.
    (Running(), "finished", OLD, "RUNNING", "finished"),
    (Running(), "", NO_LEASE, "RUNNING", ""),
    # A worker of another home executes it, even if this home gave it back earlier.
    *((Cancelling(), "pending", lease, "CANCELLING", "pending") for lease in (NO_LEASE, OLD)),
    *((Running(), "pending", lease, "RUNNING", "pending") for lease in (NO_LEASE, OLD)),
    # It waits, or was completed elsewhere.
    (Scheduled(), "pending", NO_LEASE, "SCHEDULED", "pending"),
    (Completed(), "pending", NO_LEASE, "COMPLETED", "pending"),
    # Its flow ended before it could record that.
    *((Failed(message="no file"), status, NO_LEASE, "FAILED", "failed") for status in ("pending", "running")),
    *((Cancelled(), status, NO_LEASE, "CANCELLED", "cancelled") for status in ("pending", "running")),
]


@pytest.mark.parametrize(("state", "status", "lease", "after", "recorded"), SETTLED)
def test_a_flow_run_and_the_record_of_its_run_agree_after_a_round(
    site: Site, state: State[Any], status: str, lease: str, after: str, recorded: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = site.new_run()
    flow_run_id, directory = site.flow_run(run_id, state), site.home.run(run_id)
    if status:
        site.record(run_id, status, flow_run_id)
    if lease in (DEAD, OLD):
        site.lease(directory, seconds_ago=3600 * (lease == OLD))
    if state.name == "Running" and status == "pending":  # for longer than a flow takes to begin
        monkeypatch.setattr(reconciliation, "_STARTING", timedelta(0))
    with acquire(directory) if lease == HELD else nullcontext():
        site.compare()
    record = read_json(directory / "state.json")
    assert (site.kind(flow_run_id), record.get("status", "")) == (after, recorded)
    if state.name == "Failed" and not lease:
        assert (record["reason"], record["flow_run_id"]) == ("no file", str(flow_run_id))


@pytest.mark.parametrize(
    ("state", "lease", "after"),
    [
        (Running(), {}, "SCHEDULED"),
        (Cancelling(), {}, "CANCELLED"),
        # It has just ended, and gets time to tell the server.
        (Cancelling(), {"released": True}, "CANCELLING"),
        (Cancelling(), {"released": True, "seconds_ago": 20}, "CANCELLED"),
    ],
)
def test_a_study_without_a_process_is_settled_by_any_worker_of_its_pool(
    site: Site, state: State[Any], lease: dict[str, Any], after: str
) -> None:
    directory, flow_run_id = site.study_flow_run(state)
    site.lease(directory, **lease)
    site.compare()
    assert site.kind(flow_run_id) == after


def test_a_run_that_died_three_times_without_a_checkpoint_is_left_alone(site: Site) -> None:
    run_id, flow_run_id = site.new_flow_run(Running())
    directory = site.record(run_id, "running", flow_run_id)
    for number in (1, 2, 3):
        site.lease(directory, number)
    checkpoint = directory / "checkpoints" / "step-000002"
    checkpoint.mkdir(parents=True)
    os.utime(checkpoint, (0, 0))
    site.compare()
    assert site.kind(flow_run_id) == "CRASHED"
    # With a checkpoint of theirs it continues.
    flow_run_id = site.flow_run(run_id, Running())
    site.record(run_id, "running", flow_run_id)
    os.utime(checkpoint)
    site.lease(directory, 3)
    site.compare()
    assert site.kind(flow_run_id) == "SCHEDULED"


def test_a_study_that_is_executed_notices_a_cancel_by_itself(site: Site) -> None:
    directory, flow_run_id = site.study_flow_run(Cancelling())
    with acquire(directory):
        site.compare()
    assert site.kind(flow_run_id) == "CANCELLING"


def test_a_study_that_its_worker_claimed_and_never_began_is_scheduled_again(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, claimed = site.study_flow_run(Pending())
    site.compare()
    assert site.kind(claimed) == "PENDING", "its worker may be about to begin it"
    states = {
        site.study_flow_run(state)[1]: after
        for state, after in ((Cancelling(), "CANCELLED"), (Running(), "RUNNING"), (Crashed(), "CRASHED"))
    }
    monkeypatch.setattr(reconciliation, "_STARTING", timedelta(0))
    site.compare()
    assert site.kind(claimed) == "SCHEDULED"
    assert {each: site.kind(each) for each in states} == states, "one that runs may be that of another home"


def test_a_scheduled_submission_that_its_worker_never_began_is_scheduled_again(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment = ensure_deployment(site.client, SCHEDULES)
    created = site.client.create_flow_run_from_deployment(deployment, parameters={"experiment": "tiny"})
    site.client.set_flow_run_state(created.id, Pending(), force=True)
    site.compare()
    assert site.kind(created.id) == "PENDING"
    monkeypatch.setattr(reconciliation, "_STARTING", timedelta(0))
    site.compare()
    assert site.kind(created.id) == "SCHEDULED"


def test_a_study_whose_flow_crashes_again_and_again_before_it_can_begin_fails(site: Site) -> None:
    _, flow_run_id = site.study_flow_run(Crashed())
    for _ in range(2):
        site.dead_process(flow_run_id)
        site.compare()
        assert site.kind(flow_run_id) == "SCHEDULED"
        site.client.set_flow_run_state(flow_run_id, Crashed(message="terminated"), force=True)
    site.dead_process(flow_run_id)
    site.compare()
    assert site.kind(flow_run_id) == "FAILED"


def test_the_note_of_a_dead_flow_is_kept_until_its_own_pool_has_settled_it(site: Site) -> None:
    directory, flow_run_id = site.study_flow_run(Running(), pool="other")
    site.lease(directory)
    note = site.dead_process(flow_run_id)
    site.compare()
    assert note.exists()
    Reconciliation(site.home, "other").compare(site.client)
    assert site.kind(flow_run_id) == "SCHEDULED"
    assert not note.exists()


def test_records_of_runs_that_have_ended_are_read_once(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(3):
        run_id, flow_run_id = site.new_flow_run(Failed())
        site.record(run_id, "failed", flow_run_id)
    rounds, reads = Reconciliation(site.home, POOL), []
    monkeypatch.setattr(reconciliation, "_ENDINGS_SECONDS", 0.0)
    for _ in range(2):  # The first one settles open runs, which changes records.
        rounds.compare(site.client)
    monkeypatch.setattr(reconciliation, "read_json", lambda path: reads.append(path) or read_json(path))
    rounds.compare(site.client)
    assert not reads


def test_a_run_whose_flow_crashes_before_it_can_begin_is_scheduled_again_twice_and_then_fails(site: Site) -> None:
    run_id, flow_run_id = site.new_flow_run(Crashed(message="terminated"))
    directory = site.record(run_id, "pending", flow_run_id)
    for _ in range(2):
        site.compare()
        assert site.kind(flow_run_id) == "SCHEDULED"
        assert read_json(directory / "state.json")["status"] == "pending"
        site.client.set_flow_run_state(flow_run_id, Crashed(message="terminated"), force=True)
    site.compare()
    assert site.kind(flow_run_id) == "FAILED"
    record = read_json(directory / "state.json")
    assert (record["status"], record["reason"]) == ("failed", "its flow could not begin: terminated")


def test_a_suspended_run_that_is_resumed_on_the_server_is_scheduled_again(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id, flow_run_id = site.new_flow_run(Running())
    directory = site.record(run_id, "pending", flow_run_id)
    site.lease(directory, seconds_ago=3600)
    write_json(directory / "state.json", read_json(directory / "state.json") | {"reason": outbox.SUSPENDED})
    monkeypatch.setattr(reconciliation, "_STARTING", timedelta(0))
    site.compare()
    assert site.kind(flow_run_id) == "SCHEDULED"


def test_a_flow_that_was_killed_before_it_took_its_run_is_scheduled_again(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id, flow_run_id = site.new_flow_run(Running())
    site.record(run_id, "pending", flow_run_id)
    note = site.dead_process(flow_run_id)
    site.compare()
    assert site.kind(flow_run_id) == "RUNNING", "it may have just begun"
    assert note.exists(), "a later round settles it by its note"
    monkeypatch.setattr(reconciliation, "_STARTING", timedelta(0))
    site.compare()
    assert site.kind(flow_run_id) == "SCHEDULED"
    assert not note.exists()


def test_a_message_that_makes_the_server_fail_does_not_keep_runs_from_being_settled(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id, flow_run_id = site.new_flow_run(Running())
    site.lease(site.record(run_id, "finished", flow_run_id))
    unsent = unsent_file(site.home, str(flow_run_id))
    write_json(unsent, {"messages": [{"kind": "log", "fields": {}}]})
    request = httpx.Request("POST", "http://127.0.0.1/api/logs")
    error = httpx.HTTPStatusError("in trouble", request=request, response=httpx.Response(500, request=request))

    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(outbox, "send", fail)
    with pytest.raises(httpx.HTTPStatusError):
        site.compare()
    assert site.kind(flow_run_id) == "COMPLETED"
    unsent.unlink()


def test_a_text_is_sent_without_nul(site: Site) -> None:
    fields = {"key": "page", "type": "markdown", "data": "loss\0 1"}
    artifact = outbox.send(site.client, outbox.Message("artifact", fields))
    of_key = ArtifactFilter(id=ArtifactFilterId(any_=[artifact]))
    assert [page.data for page in site.client.read_artifacts(artifact_filter=of_key)] == ["loss 1"]


def test_an_experiments_page_is_one_page_that_is_renewed(site: Site) -> None:
    for number in range(3):
        fields = {"key": "sums", "type": "markdown", "data": f"# {number} runs", "description": "Runs of sums"}
        outbox.send(site.client, outbox.Message("page", fields))
    of_key = ArtifactFilter(key=ArtifactFilterKey(any_=["sums"]))
    assert [page.data for page in site.client.read_artifacts(artifact_filter=of_key)] == ["# 2 runs"]
    of_latest = ArtifactCollectionFilter(key=ArtifactCollectionFilterKey(any_=["sums"]))
    assert [page.data for page in site.client.read_latest_artifacts(artifact_filter=of_latest)] == ["# 2 runs"]


def artifacts_of(site: Site, flow_run_id: UUID, key: str) -> list[Any]:
    of_key = ArtifactFilter(key=ArtifactFilterKey(any_=[key]))
    found = site.client.read_artifacts(artifact_filter=of_key)
    return [artifact.data for artifact in found if artifact.flow_run_id == flow_run_id]


def test_what_a_flow_run_shows_again_and_again_is_one_artifact_that_is_renewed(site: Site) -> None:
    """However its flows end, and whatever they could not send."""
    _, flow_run_id = site.new_flow_run(Running())
    for attempt in range(2):
        with client_settings(site.home, str(site.client.api_url)):
            shown = Outbox(site.home, str(flow_run_id))
            for number in range(3):
                shown.artifact("curve", "markdown", f"# {attempt} {number}", "Curve")
                shown.artifact("bar", "progress", float(10 * attempt + number), "Bar")
                shown.artifact("results", "table", [{"attempt": attempt, "number": number}], "Results")
                shown._send_all(site.client)
    assert artifacts_of(site, flow_run_id, "curve") == ["# 1 2"]
    assert artifacts_of(site, flow_run_id, "bar") == [12.0]
    assert len(artifacts_of(site, flow_run_id, "results")) == 1
    fields = {"key": "curve", "type": "markdown", "data": "# late", "flow_run_id": str(flow_run_id)}
    write_json(unsent_file(site.home, "late"), {"messages": [{"kind": "artifact", "fields": fields}]})
    outbox.deliver(site.client, site.home)
    assert artifacts_of(site, flow_run_id, "curve") == ["# late"]
    _, other = site.new_flow_run(Running())
    outbox.send(site.client, outbox.Message("artifact", fields | {"data": "# other", "flow_run_id": str(other)}))
    assert artifacts_of(site, other, "curve") == ["# other"], "each flow run has its own"
    assert artifacts_of(site, flow_run_id, "curve") == ["# late"]


def test_a_document_is_fetched_from_a_server_that_answers_only_later(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = frozen.send(site.client, {"experiment": "tiny"}, "tiny")
    answer, calls = frozen._artifacts, []

    def away_at_first(client: SyncPrefectClient, digest: str) -> list[Any]:
        calls.append(digest)
        if len(calls) < 3:
            raise httpx.ConnectError("away")
        return answer(client, digest)

    monkeypatch.setattr(frozen, "_artifacts", away_at_first)
    monkeypatch.setattr(server_client, "_PAUSE_SECONDS", 0.01)
    with client_settings(site.home, str(site.client.api_url)):
        assert frozen.fetch(digest) == {"experiment": "tiny"}


def test_a_deployment_of_an_earlier_version_is_renewed_and_keeps_its_schedules(site: Site) -> None:
    earlier = site.client.create_deployment(
        flow_id=site.client.create_flow_from_name(SCHEDULES.flow),
        name=SCHEDULES.name,
        entrypoint="pipelines.earlier.submit",
        work_pool_name=POOL,
    )
    site.client.create_deployment_schedules(earlier, [(CronSchedule(cron="0 3 * * *"), True)])
    assert ensure_deployment(site.client, SCHEDULES) == earlier
    renewed = site.client.read_deployment(earlier)
    assert (renewed.entrypoint, renewed.job_variables) == (SCHEDULES.entrypoint, SCHEDULES.job)
    assert [schedule.schedule.cron for schedule in renewed.schedules] == ["0 3 * * *"]


def test_a_run_that_a_worker_finishes_before_it_is_recorded_as_submitted_stays_finished(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = submit._create_flow_runs

    def create_and_execute(*arguments: Any) -> list[str]:
        flow_run_ids = create(*arguments)
        for run, flow_run_id in zip(arguments[-1], flow_run_ids, strict=True):
            RunState(site.home, run.run_id).update(status="finished", flow_run_id=flow_run_id)
        return flow_run_ids

    monkeypatch.setattr(submit, "_create_flow_runs", create_and_execute)
    (tmp_path / "tiny.yaml").write_text(SPEC)
    (run,) = submit.submit_document(load_document(tmp_path / "tiny.yaml"), site.home, str(site.client.api_url))
    assert RunState(site.home, run.run_id).status == "finished"


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


def test_a_stopped_flow_is_killed_once_its_run_is_lost_and_its_worker_takes_another(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefect's worker waits for the process; one that was stopped would keep its place as long as it stays so."""
    run_id, flow_run_id = site.new_flow_run(Running())
    directory = site.record(run_id, "running", flow_run_id)
    flow = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        record = ProcessRecord.of(flow.pid, "flow")
        write_json(site.home.prefect / "flows" / f"{flow_run_id}.json", asdict(record) | {"host": socket.gethostname()})
        with acquire(directory) as lease:
            path, own = directory / "leases/0001.json", {"pid": flow.pid, "pid_started": record.started}
            write_json(path, read_json(path) | own)
            flow.send_signal(signal.SIGSTOP)
            wait_for(lambda: not FlowProcess("0", record, "").is_at_work, timeout=10, what="the stop")
            rounds = Reconciliation(site.home, POOL)
            rounds.compare(site.client)
            assert flow.poll() is None, "its heartbeat is fresh: it may go on in a moment"
            assert lease.number == 1
        write_json(
            directory / "leases/0001.json", read_json(directory / "leases/0001.json") | own | {"released": False}
        )
        monkeypatch.setattr(liveness, "LEASE_SECONDS", 0.0)
        rounds.compare(site.client)
        assert flow.wait(10) == -signal.SIGKILL
        rounds.compare(site.client)
        assert site.kind(flow_run_id) == "SCHEDULED"
    finally:
        flow.kill()
        flow.wait()


def test_a_stopped_flow_that_makes_no_sense_does_not_keep_others_from_being_settled(site: Site) -> None:
    senseless = site.flow_run("../../etc", Running())
    run_id, flow_run_id = site.new_flow_run(Running())
    site.lease(site.record(run_id, "finished", flow_run_id))
    flow = subprocess.Popen(["sleep", "60"], start_new_session=True)
    notes = [site.home.prefect / "flows" / f"{senseless}.json", site.dead_process("notes")]
    try:
        record = ProcessRecord.of(flow.pid, "flow")
        write_json(notes[0], asdict(record) | {"host": socket.gethostname()})
        flow.send_signal(signal.SIGSTOP)
        wait_for(lambda: not FlowProcess("0", record, "").is_at_work, timeout=10, what="the stop")
        site.compare()
        assert (site.kind(senseless), site.kind(flow_run_id)) == ("RUNNING", "COMPLETED")
    finally:
        flow.kill()
        flow.wait()
        for note in notes:
            note.unlink()


@pytest.mark.more
def test_workers_of_one_host_have_names_of_their_own_and_one_that_is_started_again_has_its_old_one() -> None:
    pool = f"pool-{os.getpid()}"
    host = socket.gethostname()
    program = f"""
import sys
from pipelines.prefect.flows.workers.worker import worker_name
with worker_name({pool!r}) as name:
    print(name, flush=True)
    sys.stdin.read()
"""

    def worker() -> tuple["subprocess.Popen[str]", str]:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        process = subprocess.Popen([sys.executable, "-c", program], text=True, **pipes)
        return process, process.stdout.readline().strip()

    workers = [worker() for _ in range(3)]
    assert [name for _, name in workers] == [f"{host}-{pool}", f"{host}-{pool}-2", f"{host}-{pool}-3"]
    workers[1][0].kill()
    workers[1][0].communicate()
    again, name = worker()
    assert name == f"{host}-{pool}-2"
    for process, _ in [workers[0], workers[2], (again, "")]:
        process.communicate(timeout=30)
    with worker_name(pool) as name:
        assert name == f"{host}-{pool}"
