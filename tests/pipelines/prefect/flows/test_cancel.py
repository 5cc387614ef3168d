"""The way of a request to stop, and the messages about its result."""

import os
import pty
import signal
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import NoReturn
from uuid import uuid4

import pytest
from live import ELSEWHERE, Lab, finished
from prefect.client.schemas.objects import FlowRun, State
from prefect.states import Cancelling, Suspended
from waiting import wait_for

from pipelines.home.home import Home
from pipelines.home.state import RunState
from pipelines.prefect.flows import cancel, stop
from pipelines.prefect.flows.cancel import cancel_experiment, cancel_run
from pipelines.prefect.flows.flow import execute_run
from pipelines.prefect.flows.stop import NotStoppedError
from pipelines.prefect.flows.workers import flow_process
from pipelines.prefect.flows.workers.flow_process import FlowProcess, stop_flows
from pipelines.prefect.server.api import is_healthy
from pipelines.prefect.server.outbox import stop_request
from pipelines.processes.reap import ProcessRecord
from pipelines.processes.stop import (
    GRACE_SECONDS,
    WORKER_GRACE,
    Stop,
    cancel_message,
    clear_request,
    give_back_grace,
    is_cancelled,
    request_cancel,
)
from specs.errors import SpecError
from specs.machine import lease as leases
from specs.machine import liveness
from specs.machine.fence import lease_file
from specs.machine.files import read_json, write_json
from specs.machine.lease import Lease, acquire

pytestmark = pytest.mark.usefixtures("signals_arrive")


def test_a_request_is_for_one_run_and_carries_its_grace(tmp_path):
    home, stop = Home(tmp_path), Stop()
    request_cancel(home.run("run-1"), 0.5)
    request = stop.requested(home.run("run-1"))
    assert (request.reason, request.grace, request.whole_command) == ("cancelled", 0.5, False)
    assert stop.requested(home.run("run-2")) is None
    clear_request(home.run("run-1"))
    assert stop.requested(home.run("run-1")) is None


def test_a_cancel_counts_for_more_than_the_end_of_the_worker(tmp_path):
    stop, run = Stop(gives_back=True), Home(tmp_path).run("run-1")
    stop.note(signal.SIGTERM)
    assert (given_back := stop.requested(run)) is not None
    assert given_back.status == "pending"
    request_cancel(run, 0.5)
    assert (cancelled := stop.requested(run)) is not None
    assert (cancelled.status, cancelled.grace, cancelled.whole_command) == ("cancelled", 0.5, True)


def test_a_signal_to_a_flow_that_is_not_prepared_yet_is_noted(monkeypatch):
    noted = []

    def prepare(_run_id: str, _document: str, _until: int, stop: Stop) -> NoReturn:
        os.kill(os.getpid(), signal.SIGTERM)
        noted.append(stop.signalled)
        raise InterruptedError

    monkeypatch.setattr("pipelines.prefect.flows.flow._prepare", prepare)
    with pytest.raises(InterruptedError):
        execute_run.fn("tiny", "tiny-s0", "digest")
    assert noted == [signal.SIGTERM]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_noted_and_stops_the_whole_command(tmp_path, number):
    stop = Stop()
    with stop.on_signals():
        os.kill(os.getpid(), number)
        request = stop.requested(tmp_path)
    assert request.whole_command
    assert request.reason == f"interrupted by {number.name}"


@pytest.mark.parametrize(("chosen", "grace"), [("", 60.0), ("240", 240.0)])
def test_work_that_is_to_go_on_later_has_a_longer_grace_which_can_be_chosen(tmp_path, monkeypatch, chosen, grace):
    if chosen:
        monkeypatch.setenv(WORKER_GRACE, chosen)
    for number, seconds in ((signal.SIGTERM, grace), (signal.SIGHUP, grace), (signal.SIGINT, GRACE_SECONDS)):
        stop = Stop(gives_back=True, grace=give_back_grace())
        stop.note(number)
        request = stop.requested(tmp_path)
        assert (request.grace, request.status) == (seconds, "cancelled" if number == signal.SIGINT else "pending")
    suspended = stop_request(flow_run(Suspended()))
    assert suspended.grace == grace


@pytest.mark.parametrize(
    ("message", "grace"),
    [(cancel_message(90.0), 90.0), (cancel_message(0.0), 0.0), ("Cancelled by a person", GRACE_SECONDS)],
)
def test_the_grace_of_a_cancel_reaches_a_flow_through_the_server(message, grace):
    request = stop_request(flow_run(Cancelling(message=message)))
    assert (request.reason, request.grace) == ("cancelled", grace)


def flow_run(state: State) -> FlowRun:
    return FlowRun(id=uuid4(), flow_id=uuid4(), state=state)


def test_a_flow_that_does_not_end_is_killed_when_its_grace_and_the_time_to_record_that_are_over(monkeypatch):
    monkeypatch.setattr(flow_process, "_CLOSING_SECONDS", 0.2)
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        process.stdout.readline()
        began = time.monotonic()
        stop_flows([FlowProcess("flow-1", ProcessRecord.of(process.pid), "")], signal.SIGTERM, 1.0)
        assert process.wait(10) == -signal.SIGKILL
        assert time.monotonic() - began > 1.2


def test_a_second_signal_interrupts_at_once():
    stop = Stop()
    with stop.on_signals():
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


CLOSED_TERMINAL = """
import sys, time
from pathlib import Path
from pipelines.processes.stop import Stop

stop = Stop()
with stop.on_signals():
    print("working", flush=True)
    while not stop.requested():
        time.sleep(0.05)
    print("saving", flush=True)
    Path(sys.argv[1]).write_text(stop.requested().reason)
"""


def test_work_whose_terminal_is_closed_stops_and_saves(tmp_path):
    terminal, end = pty.openpty()
    command = [sys.executable, "-c", CLOSED_TERMINAL, tmp_path / "saved"]
    with subprocess.Popen(command, preexec_fn=partial(os.login_tty, end), pass_fds=[end]) as process:
        try:
            os.close(end)
            shown = b""
            while b"working" not in shown:
                shown += os.read(terminal, 100)
            os.close(terminal)
            assert process.wait(20) == 0
        finally:
            process.kill()
    assert (tmp_path / "saved").read_text() == "interrupted by SIGHUP"


@pytest.mark.long
def test_a_tests_signals_arrive_where_the_tests_are_started_with_them_ignored():
    subject = f"{__file__}::{test_work_whose_terminal_is_closed_stops_and_saves.__name__}"
    ignoring = ["sh", "-c", 'trap \'\' INT HUP; exec "$0" "$@"']
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", subject]
    done = subprocess.run([*ignoring, *command], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout


def test_a_hangup_that_nohup_has_set_aside_stays_so():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with Stop().on_signals():
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    signal.signal(signal.SIGHUP, before)


def test_the_handlers_before_are_put_back():
    before = signal.getsignal(signal.SIGTERM)
    with Stop().on_signals():
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before


def executing(home: Home, run_id: str, *, host: str = "") -> Lease:
    """A run under way in this process, which says that it is of that host."""
    with pytest.MonkeyPatch.context() as patch:
        if host:
            patch.setattr(leases.socket, "gethostname", lambda: host)
        lease = acquire(home.run(run_id))
    RunState(home, run_id, lease.fence).update(status="running", host=host or None)
    return lease


def answering(home: Home, run_id: str, lease: Lease, *, status: str) -> threading.Thread:
    """A flow that ends its run when it is asked to stop."""

    def flow() -> None:
        wait_for((home.run(run_id) / "cancel.json").exists)
        RunState(home, run_id, lease.fence).update(status=status)
        lease.release()

    thread = threading.Thread(target=flow)
    thread.start()
    return thread


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ("cancelled", "run-1 is cancelled; `rpg resume run-1` continues from its last checkpoint"),
        ("finished", "run-1 finished before it could stop"),
    ],
)
@pytest.mark.parametrize("host", ["", "elsewhere"])
def test_a_run_that_is_asked_to_stop_ends_as_its_flow_says(tmp_path, status, words, host):
    home = Home(tmp_path)
    flow = answering(home, "run-1", executing(home, "run-1", host=host), status=status)
    assert cancel_run(home, "run-1", 0.0) == words
    flow.join()


def test_a_run_that_is_given_back_while_it_is_to_be_cancelled_is_cancelled_on_its_server(tmp_path):
    home = Home(tmp_path)
    lease = executing(home, "run-1")
    nowhere = {"flow_run_id": str(uuid4()), "api_url": "http://127.0.0.1:1/api"}
    RunState(home, "run-1", lease.fence).update(**nowhere)
    answer = answering(home, "run-1", lease, status="pending")
    with pytest.raises(
        SpecError, match=r"the Prefect server at http://127\.0\.0\.1:1/api, which has the run, does not"
    ):
        cancel_run(home, "run-1", 0.0)
    answer.join()


def test_a_run_whose_host_fell_silent_is_taken_from_it_and_marked(tmp_path, monkeypatch):
    home = Home(tmp_path)
    monkeypatch.setattr(leases, "STILL_SECONDS", 0.5)
    lost = executing(home, "run-1", host="elsewhere")
    path = lease_file(home.run("run-1"), 1)
    write_json(path, read_json(path) | {"at": (datetime.now(UTC) - timedelta(minutes=1)).isoformat()})
    assert cancel_run(home, "run-1", 5.0) == "run-1 had crashed; it is marked cancelled"
    assert lost.superseded
    assert RunState(home, "run-1").status == "cancelled"
    assert not (home.run("run-1") / "cancel.json").exists()
    with pytest.raises(SpecError, match="the run is not running but cancelled"):
        cancel_run(home, "run-1", 5.0)


@pytest.mark.parametrize("answers", [True, False])
def test_a_run_on_a_host_whose_clock_is_off_is_asked_to_stop(tmp_path, monkeypatch, answers):
    home = Home(tmp_path)
    monkeypatch.setattr(leases, "STILL_SECONDS", 1.0)
    monkeypatch.setattr(leases, "_LOOK_SECONDS", 0.05)
    monkeypatch.setattr(liveness, "LEASE_SECONDS", 1.0)
    monkeypatch.setattr(cancel, "CLOSING_SECONDS", 1.0)
    executing(home, "run-1", host="elsewhere").release()
    asked, over = threading.Event(), threading.Event()

    def holder() -> None:
        path = lease_file(home.run("run-1"), 1)
        for beat in range(2**16):
            at = (datetime.now(UTC) - timedelta(minutes=1)).isoformat()
            if (home.run("run-1") / "cancel.json").exists():
                asked.set()
            if asked.is_set() and answers:
                RunState(home, "run-1").update(status="cancelled")
            write_json(path, read_json(path) | {"beat": beat, "at": at, "released": asked.is_set() and answers})
            if over.wait(0.1) or (asked.is_set() and answers):
                return

    thread = threading.Thread(target=holder)
    thread.start()
    wait_for(lambda: not read_json(lease_file(home.run("run-1"), 1))["released"], timeout=10, what="a heartbeat")
    try:
        if answers:
            assert cancel_run(home, "run-1", 0.0).startswith("run-1 is cancelled")
        else:
            with pytest.raises(
                NotStoppedError, match="run-1 did not answer: the node elsewhere executes it, but that node's clock"
            ):
                cancel_run(home, "run-1", 0.0)
            assert (home.run("run-1") / "cancel.json").exists(), "it stops when it sees that"
        assert asked.is_set()
    finally:
        over.set()
        thread.join()


def test_a_request_that_meets_another_command_which_just_ends_the_run_is_none_for_the_next_execution(tmp_path):
    home = Home(tmp_path)
    lease = acquire(home.run("run-1"), settles=True)
    ends = answering(home, "run-1", lease, status="cancelled")
    cancel_run(home, "run-1", 0.0)
    ends.join()
    assert not (home.run("run-1") / "cancel.json").exists()


def test_no_end_is_claimed_of_a_run_whose_host_lives_and_does_not_answer(tmp_path, monkeypatch):
    home = Home(tmp_path)
    monkeypatch.setattr(leases, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(liveness, "LEASE_SECONDS", 1.0)
    monkeypatch.setattr(cancel, "CLOSING_SECONDS", 0.1)
    with executing(home, "run-1", host="elsewhere"):
        expected = r"run-1 did not answer: the node elsewhere .* The lease ends at \d\d:\d\d:\d\d UTC unless"
        with pytest.raises(NotStoppedError, match=expected):
            cancel_run(home, "run-1", 0.0)
        assert RunState(home, "run-1").status == "running"
        assert (home.run("run-1") / "cancel.json").exists(), "it stops should it come back"


def test_an_experiments_runs_are_all_asked_at_once(tmp_path):
    home = Home(tmp_path)
    run_ids = ["sums-1", "sums-2", "sums-3"]
    write_json(home.experiment("sums") / "experiment.json", {"current": run_ids})
    flows = [answering(home, run_id, executing(home, run_id), status="cancelled") for run_id in run_ids[:2]]
    RunState(home, "sums-3").update(status="finished")
    for flow, line in zip(flows, cancel_experiment(home, "sums", 0.0), strict=True):
        assert line.endswith("continues from its last checkpoint")
        flow.join(timeout=0.5)
    assert not any(flow.is_alive() for flow in flows)
    with pytest.raises(SpecError, match="no run of the experiment is running or waits on a server"):
        next(cancel_experiment(home, "sums", 0.0))


def test_a_server_that_does_not_answer_is_waited_for_once_not_for_each_run(tmp_path, monkeypatch):
    home, asked = Home(tmp_path), []
    run_ids = ["sums-1", "sums-2", "sums-3"]
    write_json(home.experiment("sums") / "experiment.json", {"current": run_ids})
    for run_id in run_ids:
        gone = {"pid": 2**22 - 1, "pid_started": "boot:1", "api_url": "http://127.0.0.1:1/api"}
        RunState(home, run_id).update(status="running", flow_run_id=str(uuid4()), **gone)
    monkeypatch.setattr(stop, "is_healthy", lambda url, timeout: asked.append(url) or is_healthy(url, timeout))
    lines = list(cancel_experiment(home, "sums", 0.0))
    assert lines == [f"{run_id} had crashed; it is marked cancelled" for run_id in run_ids]
    assert asked == ["http://127.0.0.1:1/api"]


def test_a_request_for_one_version_of_an_experiment_is_none_for_another(tmp_path):
    request_cancel(tmp_path, 0.5, ["first-s0", "first-s1"])
    assert is_cancelled(tmp_path, ["first-s1", "first-s2"])
    assert not is_cancelled(tmp_path, ["second-s0"])
    request_cancel(tmp_path, 0.5)
    assert is_cancelled(tmp_path, ["second-s0"])


@pytest.mark.long
def test_an_experiment_is_cancelled_from_another_host_and_its_other_runs_are_not_begun(lab: Lab) -> None:
    run = lab.start("run", str(lab.spec), overrides=("seeds=[0, 1]", "training.steps=2000"))
    wait_for(lambda: any(lab.progress(run_id) for run_id in lab.run_ids()) or run.poll() is not None, what="a step")
    trainer = lab.training_pid()
    started = time.monotonic()
    cancelled = lab.rpg("cancel", "tiny", prefix=ELSEWHERE)
    assert cancelled.code == 0, cancelled.err
    assert " is cancelled; `rpg resume " in cancelled.err
    assert not lab.training_pid()
    assert trainer not in [process.pid for process in lab.processes()]
    assert time.monotonic() - started < 60, "the command's own start included"
    assert finished(run).code == 1
    assert [lab.state(run_id)["status"] for run_id in lab.run_ids()] == ["cancelled"]
