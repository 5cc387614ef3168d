"""A run has one holder at a time; who died, stopped or fell silent is followed by another and finds that out."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from live import SPEC

from pipelines.home.home import Home
from pipelines.planning.plan import make_plan
from pipelines.prefect.flows.flow import _do_plainly, _hold_and_execute
from pipelines.prefect.server.outbox import Outbox
from pipelines.processes.stop import request_cancel
from pipelines.running.run import WORKER, RunExecution
from specs.loader import load_document
from specs.machine import lease as leases
from specs.machine import liveness
from specs.machine.fence import SupersededError, lease_file
from specs.machine.files import DiskError, read_json, write_json
from specs.machine.lease import Lease, RunBusyError, acquire
from specs.machine.liveness import LEASE_SECONDS, LeaseWatch, is_executed, newest_lease, start_of, status_of

HOLD = """
import sys, time
from pathlib import Path
from specs.machine.lease import RunBusyError, acquire
try:
    lease = acquire(Path(sys.argv[1]), worker="w1")
except RunBusyError:
    print("busy", flush=True)
else:
    print("held", flush=True)
    while not lease.superseded:
        time.sleep(0.01)
    print("superseded", flush=True)
"""
Start = Callable[[], "subprocess.Popen[str]"]
LONG_AGO = (datetime.now(UTC) - timedelta(hours=1)).isoformat()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run-1"


@pytest.fixture
def hold(run: Path) -> Iterator[Start]:
    """Starts a process that takes the run and reports it, or `busy` if it cannot."""
    holders: list[subprocess.Popen[str]] = []

    def start() -> "subprocess.Popen[str]":
        holders.append(subprocess.Popen([sys.executable, "-c", HOLD, str(run)], stdout=subprocess.PIPE, text=True))
        return holders[-1]

    yield start
    for holder in holders:
        holder.kill()
        holder.communicate()


def said(holder: "subprocess.Popen[str]") -> str:
    return holder.stdout.readline().strip()


def rewrite(run: Path, number: int = 1, **fields: Any) -> None:
    """Changes a lease as its holder would have written it elsewhere or at another time."""
    path = lease_file(run, number)
    write_json(path, read_json(path) | fields)


def test_of_several_processes_that_want_a_run_at_once_one_has_it(run: Path, hold: Start) -> None:
    assert sorted(said(holder) for holder in [hold() for _ in range(4)]) == ["busy", "busy", "busy", "held"]
    assert [path.name for path in (run / "leases").glob("*")] == ["0001.json"]


def test_a_run_that_was_given_back_is_free_and_its_numbers_go_on(run: Path) -> None:
    with acquire(run) as first:
        assert (first.number, first.is_takeover, is_executed(run, {})) == (1, False, True)
        with pytest.raises(RunBusyError, match=f"run-1 is being run by process {os.getpid()}; `rpg watch run-1`"):
            acquire(run)
    assert not is_executed(run, {})
    with acquire(run) as second:
        assert (second.number, second.is_takeover, first.superseded) == (2, False, True)
    with acquire(run):
        first.release()
        assert is_executed(run, {}), "a holder that was superseded gives nothing back"


def test_a_holder_that_was_killed_is_followed_at_once(run: Path, hold: Start) -> None:
    holder = hold()
    assert said(holder) == "held"
    record = newest_lease(run)
    assert (record.pid, record.worker) == (holder.pid, "w1")
    holder.kill()
    holder.wait()
    assert status_of(run, {"status": "running"}) == "crashed"
    with acquire(run) as lease:
        assert (lease.number, lease.is_takeover) == (2, True)


def test_a_stopped_holder_is_followed_once_its_heartbeat_is_old_and_finds_that_out_when_it_wakes(
    run: Path, hold: Start
) -> None:
    holder = hold()
    assert said(holder) == "held"
    holder.send_signal(signal.SIGSTOP)
    assert is_executed(run, {})
    rewrite(run, at=LONG_AGO)
    with acquire(run) as lease:
        holder.send_signal(signal.SIGCONT)
        assert said(holder) == "superseded"
        assert not lease.superseded


def test_a_living_process_of_this_host_holds_its_run_whatever_the_clock_says(run: Path) -> None:
    with acquire(run):
        rewrite(run, at=LONG_AGO)
        assert is_executed(run, {})


def test_a_holder_of_another_host_holds_its_run_while_its_heart_beats(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "STILL_SECONDS", 0.5)
    with acquire(run):
        rewrite(run, host="elsewhere", worker="w1")
        with pytest.raises(RunBusyError, match=rf"by process {os.getpid()} of elsewhere \(worker w1\) since 20"):
            acquire(run)
        rewrite(run, at=LONG_AGO)
        assert status_of(run, {"status": "running"}) == "crashed"
        with acquire(run) as second:
            assert second.is_takeover


def test_a_heartbeat_of_another_host_whose_clock_is_off_is_watched_before_its_run_is_taken(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "STILL_SECONDS", 60.0)
    with acquire(run):
        rewrite(run, host="elsewhere", at=LONG_AGO)
        beating = threading.Timer(0.2, rewrite, (run,), {"beat": 1, "at": LONG_AGO})
        beating.start()
        with pytest.raises(RunBusyError, match="of elsewhere"):
            acquire(run)
        beating.join()
        given_back = threading.Timer(0.2, rewrite, (run,), {"released": True})
        given_back.start()
        started = time.monotonic()
        with acquire(run) as second:
            assert time.monotonic() - started < 30.0, "nothing is left to watch"
            assert not second.is_takeover
        given_back.join()


def test_a_process_of_another_pid_namespace_is_judged_by_its_heartbeat(run: Path) -> None:
    with acquire(run):
        rewrite(run, pid=2**22 - 1)
        assert not is_executed(run, {})
        rewrite(run, pid_namespace="pid:[1]")
        assert is_executed(run, {})
        rewrite(run, at=LONG_AGO)
        assert not is_executed(run, {})
        rewrite(run, pid=os.getpid(), pid_namespace="")
        assert is_executed(run, {}), "a lease of an earlier version names none"


def test_a_watch_counts_heartbeats_by_its_own_clock(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 1000.0
    monkeypatch.setattr(liveness.time, "monotonic", lambda: clock)
    watch = LeaseWatch()
    with acquire(run):
        rewrite(run, host="elsewhere", at=LONG_AGO)
        assert watch.is_executed(run, {}), "on first sight"
        clock += LEASE_SECONDS - 1
        assert watch.is_executed(run, {})
        rewrite(run, beat=1)
        clock += LEASE_SECONDS - 1
        assert watch.is_executed(run, {})
        clock += LEASE_SECONDS - 1
        assert watch.is_executed(run, {}), "since the beat was seen"
        clock += 2
        assert not watch.is_executed(run, {})


def test_the_heart_beats_until_the_run_is_given_back_or_taken(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "BEAT_SECONDS", 0.01)

    def beat(lease: Lease) -> int:
        return int(json.loads(lease_file(run, lease.number).read_text())["beat"])

    with acquire(run) as lease:
        deadline = time.monotonic() + 10
        while beat(lease) < 3:
            assert time.monotonic() < deadline
        lease_file(run, 2).write_text("{}")
        time.sleep(0.2)
        last = beat(lease)
        time.sleep(0.2)
        assert beat(lease) == last
        with pytest.raises(SupersededError, match=r"run-1 was taken over \(lease 1 is superseded\)"):
            lease.fence.check()


def test_a_disk_that_is_away_for_a_while_neither_ends_the_heartbeat_nor_supersedes_anybody(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "BEAT_SECONDS", 0.01)
    with acquire(run) as lease:
        leases_directory, stat = run / "leases", os.stat

        def stale(path: Any, *arguments: Any, **options: Any) -> os.stat_result:
            if str(path).startswith(str(leases_directory)):
                raise OSError(errno.ESTALE, "Stale file handle")
            return stat(path, *arguments, **options)

        with monkeypatch.context() as away:
            away.setattr(os, "stat", stale)
            assert not lease.superseded
            time.sleep(0.1)
        beat = read_json(lease_file(run, 1))["beat"]
        time.sleep(0.2)
        assert read_json(lease_file(run, 1))["beat"] > beat
        lease_file(run, 2).write_text("{}")
        assert lease.superseded
        leases_directory.rename(run / "away")
        assert lease.superseded, "what was once seen holds"


@pytest.mark.parametrize(("worker", "stops"), [("w1", True), ("", False)])
def test_a_request_to_stop_that_a_dead_flow_left_holds_for_a_worker_and_not_for_who_resumes_the_run(
    tmp_path: Path, hold: Start, run: Path, monkeypatch: pytest.MonkeyPatch, worker: str, stops: bool
) -> None:
    (tmp_path / "tiny.yaml").write_text(SPEC)
    document, home = load_document(tmp_path / "tiny.yaml"), Home(tmp_path)
    execution = RunExecution(document, make_plan(document, home).runs[0].run_id, home)
    execution.directory.parent.mkdir()
    execution.directory.symlink_to(run)
    holder = hold()
    assert said(holder) == "held"
    request_cancel(execution.directory, 1.0)
    holder.kill()
    holder.wait()
    if worker:
        monkeypatch.setenv(WORKER, worker)
    with execution.held():
        assert bool(execution.stop_requested()) is stops
    with execution.held():
        assert not execution.stop_requested(), "it was for the execution before"


def test_a_second_process_of_a_flow_run_leaves_its_state_to_the_first_which_began_meanwhile(
    tmp_path: Path, hold: Start, run: Path
) -> None:
    (tmp_path / "tiny.yaml").write_text(SPEC)
    document, home = load_document(tmp_path / "tiny.yaml"), Home(tmp_path)
    execution = RunExecution(document, make_plan(document, home).runs[0].run_id, home)
    execution.directory.parent.mkdir()
    execution.directory.symlink_to(run)
    assert said(hold()) == "held"
    write_json(run / "state.json", {"status": "running", "flow_run_id": "ours"})
    execution.outbox = Outbox(home, "ours")
    assert _hold_and_execute(execution, _do_plainly) is None
    execution.outbox = Outbox(home, "another")
    busy = _hold_and_execute(execution, _do_plainly)
    assert (busy.type.value, busy.name) == ("FAILED", "Busy")


def test_a_run_of_an_earlier_version_is_held_by_the_process_in_its_state(run: Path) -> None:
    me = {"status": "running", "pid": os.getpid(), "pid_started": start_of(os.getpid())}
    write_json(run / "state.json", me)
    with pytest.raises(RunBusyError, match=f"by process {os.getpid()};"):
        acquire(run)
    write_json(run / "state.json", me | {"pid_started": start_of(os.getpid()) + "0"})
    with acquire(run) as lease:
        assert lease.number == 1


def test_on_a_full_disk_a_run_is_given_back_though_the_process_that_held_it_lives_on(
    tmp_path: Path, full_disk: Callable[..., None]
) -> None:
    run = tmp_path / "disk" / "run-1"
    write_json(run / "state.json", {"status": "running", "host": None, "pid": 2**22 - 1, "pid_started": "0"})
    held = acquire(run)
    full_disk()
    held.release()
    assert not is_executed(run, read_json(run / "state.json"))
    assert not LeaseWatch().is_executed(run, {})
    full_disk()
    with pytest.raises(DiskError, match="no space is left on the device"):
        acquire(run)
    (tmp_path / "disk" / "filler").unlink()
    began = time.monotonic()
    with acquire(run) as lease:
        assert (lease.number, lease.is_takeover, held.superseded) == (2, True, True)
    assert time.monotonic() - began < leases.STILL_SECONDS, "there is no heartbeat to watch"
