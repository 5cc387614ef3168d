"""A copy of a live home on the same host: its commands end nothing of the original, and believe none of its claims."""

import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest
from live import Lab
from waiting import wait_for

from pipelines.home.home import Home
from pipelines.home.runs import status_of
from pipelines.home.state import RunState
from pipelines.launchers.slurm.job_files import JobFiles
from pipelines.launchers.slurm.queue import submitted_job
from pipelines.prefect.flows import cancel
from pipelines.prefect.flows.cancel import cancel_run
from pipelines.prefect.flows.workers.flow_process import flow_processes
from pipelines.prefect.server.api import Services, auth_string_for, is_healthy, running_services
from pipelines.prefect.server.credentials import make_passwords
from pipelines.prefect.services.stack import down
from pipelines.processes.reap import ProcessRecord, end_left_process, reap
from specs.machine import lease as leases
from specs.machine import liveness
from specs.machine.files import read_json, write_json
from specs.machine.lease import acquire
from specs.machine.liveness import newest_lease, place_of

DEAD = {"parent": 2**22 - 1, "parent_started": "boot:1"}
URL = "http://127.0.0.1:9/api"


@pytest.fixture
def started() -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """Starts a process that does nothing, in the place of a home's server or trainer."""
    processes: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        processes.append(subprocess.Popen(["sleep", "600"], start_new_session=True))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait()


@pytest.fixture
def original(tmp_path: Path, started: Callable[[], subprocess.Popen[bytes]]) -> Iterator[Home]:
    """A home with a run under way, which this process holds, a server, a worker's flow and servers of commands."""
    home = Home(tmp_path / "home")
    make_passwords(home)
    home.prefect.mkdir(parents=True)
    with acquire(home.run("run-1")) as lease:
        RunState(home, "run-1", lease.fence).begin(pid=os.getpid(), host=socket.gethostname())
        ProcessRecord.of(started().pid, "train").write(home.run("run-1") / "process.json")
        Services(URL, ProcessRecord.of(started().pid, "supervisord"), 9).write(home)
        server = asdict(ProcessRecord.of(started().pid, "server", home.prefect))
        write_json(home.prefect / "embedded-1.json", server | DEAD | {"url": "http://127.0.0.1:10/api"})
        flows = home.prefect / "flows"
        flows.mkdir()
        flow = asdict(ProcessRecord.of(started().pid, "flow", flows))
        write_json(flows / "0.json", flow | {"host": socket.gethostname(), "supervisor": "4194303 boot:1"})
        files = JobFiles.of(home.run("run-1"))
        files.directory.mkdir()
        write_json(files.submitted, {"job": "7", "place": place_of(files.directory)})
        yield home


def copy_of(home: Home) -> Home:
    return Home(Path(shutil.copytree(home.root, home.root.with_name("copy"))))


def living(home: Home) -> int:
    """How many of the processes that a home has on record live."""
    paths = [home.run("run-1") / "process.json", home.prefect / "embedded-1.json", home.prefect / "flows/0.json"]
    records = [*map(read_json, paths), read_json(home.prefect / "server.json")["supervisor"]]
    return sum(liveness.is_alive(record["pid"], record["started"]) for record in records)


@pytest.mark.parametrize("ends", [reap, down, lambda home: end_left_process(home.run("run-1"))])
def test_what_a_copy_ends_leaves_the_originals_processes_alone(original: Home, ends: Callable[[Home], object]) -> None:
    assert not ends(copy_of(original)), "nothing of it was up"
    assert living(original) == 4
    assert ends(original) or ends is reap, "its own are ended"


def test_the_claims_of_the_original_do_not_count_in_a_copy(original: Home) -> None:
    copy = copy_of(original)
    for home, is_own in ((original, True), (copy, False)):
        assert (running_services(home) is not None) == is_own
        assert [flow.flow_run_id for flow in flow_processes(home)] == ["0"] * is_own
        assert submitted_job(home.run("run-1")) == "7" * is_own
        assert bool(auth_string_for(home, URL)) == is_own, "its password is shown to its own server alone"
        lease = newest_lease(home.run("run-1"))
        assert lease.is_of_this_host == is_own


def test_a_run_is_cancelled_in_a_copy_and_goes_on_in_the_original(
    original: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "STILL_SECONDS", 0.5)
    monkeypatch.setattr(cancel, "CLOSING_SECONDS", 1.0)
    copy = copy_of(original)
    (copy.prefect / "server.json").unlink()  # No server listens there.
    path = copy.run("run-1") / "leases" / "0001.json"
    write_json(path, read_json(path) | {"at": "2026-01-01T00:00:00+00:00"})  # It was copied a while ago.
    assert status_of(copy, "run-1") == "crashed"
    assert cancel_run(copy, "run-1", 0.0) == "run-1 had crashed; it is marked cancelled"
    assert status_of(original, "run-1") == "running"
    assert not (original.run("run-1") / "cancel.json").exists()
    assert living(original) == 4


def test_a_home_that_was_renamed_is_itself(original: Home) -> None:
    renamed = Home(original.root.rename(original.root.with_name("renamed")))
    assert running_services(renamed) is not None
    assert status_of(renamed, "run-1") == "running"
    assert end_left_process(renamed.run("run-1"))


def test_a_copy_that_happens_to_have_the_same_inode_number_is_a_copy(tmp_path: Path) -> None:
    """Directories of two file systems may have one number."""
    (tmp_path / "original").mkdir()
    (tmp_path / "copy").mkdir()
    number = (tmp_path / "copy").stat().st_ino
    assert not liveness.is_place(f"{number} {tmp_path / 'original'}", tmp_path / "copy")
    assert liveness.is_place(f"{number} {tmp_path / 'moved away'}", tmp_path / "copy")
    assert liveness.is_place("", tmp_path / "copy"), "earlier versions recorded none"


@pytest.mark.long
def test_down_and_cancel_in_a_copy_leave_a_server_its_worker_and_its_trainer_alone(lab: Lab, tmp_path: Path) -> None:
    assert lab.rpg("up").code == 0
    try:
        long = ("training.steps=2000", "training.checkpoint.every_steps=500")
        assert lab.rpg("submit", str(lab.spec), overrides=long).code == 0
        (run_id,) = lab.run_ids()
        wait_for(lambda: lab.progress(run_id) >= 2, timeout=240, what="step 2 in the worker")
        services = running_services(lab.home)
        trainer = psutil.Process(lab.training_pid())
        copy = Lab(Path(shutil.copytree(lab.root, tmp_path / "copy")), lab.spec)
        copy.rpg("cancel", run_id)
        assert copy.rpg("down").err == "no services were running\n"
        assert is_healthy(services.url)
        before = lab.progress(run_id)
        wait_for(lambda: lab.progress(run_id) > before, timeout=60, what="another step")
        assert trainer.is_running()
        assert lab.state(run_id)["status"] == "running"
    finally:
        lab.rpg("down")
