"""Orphans are found by pid and start time, and nobody else is touched."""

import subprocess
import sys

import psutil
import pytest

from pipelines.home import Home
from pipelines.processes.lease import acquire
from pipelines.processes.reap import ProcessRecord, end, reap
from rpg.files import write_json
from storage.liveness import is_alive, start_of


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
    assert leader.stdout is not None
    assert leader.stdin is not None
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
