"""Orphans are found by pid and start time, and no other process is touched."""

import os
import signal
import subprocess
import sys
from dataclasses import replace

import psutil
import pytest

from pipelines.home.home import Home
from pipelines.processes.reap import ProcessRecord, end, reap
from specs.machine.fence import lease_file
from specs.machine.files import read_json, write_json
from specs.machine.lease import acquire
from specs.machine.liveness import is_alive, start_of, status_of


@pytest.fixture
def sleeper():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    yield process
    process.kill()
    process.wait()


def note(home: Home, record: ProcessRecord, *, flow: dict[str, object]) -> None:
    record.write(home.run("run-1") / "process.json")
    write_json(home.run("run-1") / "state.json", {"status": "running"} | flow)


def test_a_stage_whose_flow_is_gone_is_ended(tmp_path, sleeper):
    home = Home(tmp_path)
    note(home, ProcessRecord.of(sleeper.pid, "train"), flow={"pid": 2**22 - 1, "pid_started": "boot:1"})
    assert [record.pid for record in reap(home)] == [sleeper.pid]
    assert not psutil.pid_exists(sleeper.pid)
    assert not (home.run("run-1") / "process.json").exists()


def test_a_stage_whose_flow_lives_is_left_alone(tmp_path, sleeper):
    home = Home(tmp_path)
    me = psutil.Process()
    flow = {"pid": me.pid, "pid_started": start_of(me.pid)}
    note(home, ProcessRecord.of(sleeper.pid, "train"), flow=flow)
    assert reap(home) == []
    assert sleeper.poll() is None


def test_a_stage_whose_flow_runs_on_another_host_is_left_alone(tmp_path, sleeper):
    home = Home(tmp_path)
    flow = {"pid": 2**22 - 1, "pid_started": "boot:1", "host": "another"}
    note(home, ProcessRecord.of(sleeper.pid, "train"), flow=flow)
    assert reap(home) == []
    assert sleeper.poll() is None


def test_a_stage_whose_run_somebody_has_just_taken_is_left_to_that_one(tmp_path, sleeper):
    home = Home(tmp_path)
    note(home, ProcessRecord.of(sleeper.pid, "train"), flow={"pid": 2**22 - 1, "pid_started": "boot:1"})
    with acquire(home.run("run-1")):
        assert reap(home) == []
        assert sleeper.poll() is None
    assert [record.pid for record in reap(home)] == [sleeper.pid]


def test_a_stage_whose_flow_was_stopped_for_long_is_left_to_that_flow_until_another_takes_the_run(tmp_path, sleeper):
    home, run = Home(tmp_path), Home(tmp_path).run("run-1")
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as flow, acquire(run):
        lease = lease_file(run, 1)
        long_ago = {"pid": flow.pid, "pid_started": start_of(flow.pid), "at": "2020-01-01T00:00:00+00:00"}
        write_json(lease, read_json(lease) | long_ago)
        note(home, ProcessRecord.of(sleeper.pid, "train"), flow={"pid": flow.pid, "pid_started": start_of(flow.pid)})
        flow.send_signal(signal.SIGSTOP)
        os.waitpid(flow.pid, os.WUNTRACED)
        assert status_of(run, {"status": "running"}) == "crashed"
        assert reap(home) == []
        assert sleeper.poll() is None
        flow.kill()
        flow.wait()
        assert [record.pid for record in reap(home)] == [sleeper.pid]


def test_a_process_of_another_containers_numbers_is_nobody_here(tmp_path, sleeper):
    home = Home(tmp_path)
    note(home, replace(ProcessRecord.of(sleeper.pid, "train"), pid_namespace="pid:[1]"), flow={"pid": None})
    record = ProcessRecord.read(home.run("run-1") / "process.json")
    assert record is not None
    assert not end(record)
    assert reap(home) == []
    assert sleeper.poll() is None
    assert (home.run("run-1") / "process.json").exists(), "for a command of that container"


def test_a_pid_that_is_someone_elses_now_is_left_alone(tmp_path, sleeper):
    home = Home(tmp_path)
    true = ProcessRecord.of(sleeper.pid, "train")
    note(home, ProcessRecord(true.pid, true.pgid, true.started + "0", "train"), flow={"pid": None})
    assert reap(home) == []
    assert sleeper.poll() is None


def test_a_process_is_known_by_its_start_time_as_well(sleeper):
    record = ProcessRecord.of(sleeper.pid)
    assert is_alive(record.pid, record.started)
    assert not is_alive(record.pid, record.started + "0")
    assert not is_alive(record.pid, None)
    sleeper.kill()
    sleeper.wait()
    assert not is_alive(record.pid, record.started)


def test_the_group_is_ended_when_its_leader_is_gone_already():
    code = "import subprocess, sys; print(subprocess.Popen(['sleep', '60']).pid, flush=True); sys.stdin.read()"
    leader = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    member = psutil.Process(int(leader.stdout.readline()))
    record = ProcessRecord.of(leader.pid)
    leader.kill()
    leader.wait()
    leader.stdin.close()
    leader.stdout.close()
    assert member.is_running()
    assert end(record, grace=1.0)
    assert not member.is_running() or member.status() == psutil.STATUS_ZOMBIE


def test_an_unreadable_record_is_removed(tmp_path):
    home = Home(tmp_path)
    path = home.run("run-1") / "process.json"
    path.parent.mkdir(parents=True)
    path.write_text('{"pid": ')
    assert reap(home) == []
    assert not path.exists()
