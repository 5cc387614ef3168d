"""Forks, held against new processes: what a stage could be told from one by is the same in both."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from waiting import wait_for

from pipelines.processes import forking
from pipelines.processes.reap import ProcessRecord
from pipelines.processes.stop import StopRequest
from pipelines.processes.supervisor import Child, StageStoppedError, _record_of, supervise

ROOM = Path(__file__).parent
SAYS = "says_what_it_is"
"""A program that prints its argument, and what a process is: see the module of that name."""


@pytest.fixture(autouse=True)
def server(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOM), os.environ.get("PYTHONPATH")])))
    monkeypatch.delenv(forking.FORK_STAGES, raising=False)
    monkeypatch.setattr(forking, "_ACCELERATORS", ())
    yield
    forking.end_server()


def child(directory: Path, *program: str, **fields: object) -> Child:
    directory.mkdir(exist_ok=True)
    fields = {"imports": ("json",)} | fields
    command = [sys.executable, "-P", "-m", *program]
    return Child("train", command, directory / "log", directory / "process.json", **fields)


def never() -> None:
    return None


def said(job: Child) -> dict:
    assert supervise(job, stop=never, tick=never) == 0, job.log.read_text()
    return json.loads(job.log.read_text().splitlines()[-1])


def is_fork(pid: int) -> bool:
    return forking._servers[0]._process.pid == psutil.Process(pid).ppid()


def test_a_fork_is_what_a_new_process_would_be(tmp_path):
    forked = said(child(tmp_path / "fork", SAYS, "word", environment={"ADDED": "1"}))
    new = said(child(tmp_path / "new", SAYS, "word", environment={"ADDED": "1"}, imports=None))
    assert forked.pop("parent") != new.pop("parent") == os.getpid()
    assert forked == new
    assert forked["leads_its_group"]
    assert forked["leads_its_session"]


def test_a_fork_whose_output_is_a_pipe_does_not_take_it_for_a_file(tmp_path):
    """Its output is one where a variable of its environment is a secret, which is taken out of the log."""
    secret = {"HF_TOKEN": "hf_abcdefghijklmnop"}
    forked = said(child(tmp_path / "fork", SAYS, "word", environment=secret))
    new = said(child(tmp_path / "new", SAYS, "word", environment=secret, imports=None))
    assert forked["seekable"] == new["seekable"] == [False, False]


def test_a_fork_leaves_nothing_to_the_next(tmp_path):
    before = said(child(tmp_path / "before", SAYS, "alone"))
    spoils = child(tmp_path / "spoils", SAYS, "spoil", environment={"ADDED": "1"})
    assert supervise(spoils, stop=never, tick=never) == 7
    after = said(child(tmp_path / "after", SAYS, "alone"))
    assert before == after


def test_random_numbers_that_nobody_has_seeded_differ_between_forks(tmp_path):
    imports = ("numpy.random", "torch")
    drawn = [said(child(tmp_path / str(number), SAYS, "draw", imports=imports)) for number in range(2)]
    assert all(drawn[0][source] != drawn[1][source] for source in ("random", "numpy", "torch"))


def test_a_fork_is_on_record_with_a_group_of_its_own_and_stops_when_asked(tmp_path):
    job, seen = child(tmp_path, SAYS, "wait"), []

    def stop() -> StopRequest | None:
        ready = job.log.exists() and "ready" in job.log.read_text()
        return StopRequest("cancelled", 60.0, whole_command=False) if ready and seen else None

    def look() -> None:
        record = ProcessRecord.read(job.record)
        process = psutil.Process(record.pid)
        assert process.environ()["PYTHONPATH"] == os.environ["PYTHONPATH"]
        seen.append((record, os.getpgid(record.pid), is_fork(record.pid), process.cmdline()))

    with pytest.raises(StageStoppedError):
        supervise(job, stop=stop, tick=look)
    record, group, forked, words = seen[0]
    assert record.pid == record.pgid == group != forking._servers[0]._process.pid
    assert forked
    assert " ".join(words).split() == [sys.executable, "-P", "-m", SAYS, "wait"]
    assert "saved" in job.log.read_text()
    assert not job.record.exists()


def test_the_signal_that_killed_a_fork_is_its_exit_code(tmp_path):
    assert supervise(child(tmp_path, SAYS, "kill"), stop=never, tick=never) == -signal.SIGSEGV


def test_a_fork_ends_with_its_server_and_the_next_one_has_another(tmp_path):
    job = child(tmp_path, SAYS, "wait")

    def kill_server() -> None:
        forking._servers[0]._process.kill()

    assert supervise(job, stop=never, tick=kill_server) == -signal.SIGKILL
    assert said(child(tmp_path / "next", SAYS, "alone"))


def test_server_and_forks_end_with_a_command_that_is_killed(tmp_path):
    program = (
        "import sys; from pathlib import Path; from pipelines.processes import forking\n"
        "from pipelines.processes.supervisor import Child, supervise\n"
        "forking._ACCELERATORS = ()\n"
        "place = Path(sys.argv[1])\n"
        "job = Child('train', [sys.executable, '-P', '-m', 'says_what_it_is', 'wait'], place / 'log',"
        " place / 'process.json', imports=())\n"
        "supervise(job, stop=lambda: None, tick=lambda: None)"
    )
    command = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)])
    log = tmp_path / "log"
    wait_for(lambda: command.poll() is not None or (log.exists() and "ready" in log.read_text()))
    assert command.poll() is None
    family = psutil.Process(command.pid).children(recursive=True)
    assert len(family) == 2
    command.kill()
    command.wait()
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive


@pytest.mark.parametrize(
    "imports", [("a_module_with_a_thread",), ("a_module_that_fails",)], ids=["leaves a thread", "fails"]
)
def test_a_process_begins_anew_where_its_imports_allow_no_fork(tmp_path, imports):
    (tmp_path / "a_module_with_a_thread.py").write_text(
        "import threading, time; threading.Thread(target=time.sleep, args=(600,), daemon=True).start()"
    )
    (tmp_path / "a_module_that_fails.py").write_text("raise SystemExit(3)")
    os.environ["PYTHONPATH"] += os.pathsep + str(tmp_path)
    assert said(child(tmp_path / "new", SAYS, "alone", imports=imports))["parent"] == os.getpid()


def test_code_that_has_changed_since_it_was_imported_is_imported_anew(tmp_path):
    module = tmp_path / "changing.py"
    os.environ["PYTHONPATH"] += os.pathsep + str(tmp_path)
    module.write_text("VALUE = 1")
    assert said(child(tmp_path / "before", SAYS, "changing", imports=("changing",)))["changing"] == 1
    module.write_text("VALUE = 22")
    assert said(child(tmp_path / "after", SAYS, "changing", imports=("changing",)))["changing"] == 22


def test_another_environment_has_another_server(tmp_path, monkeypatch):
    said(child(tmp_path / "before", SAYS, "alone"))
    first = forking._servers[0]
    monkeypatch.setenv("READ_BY_AN_IMPORT", "1")
    said(child(tmp_path / "after", SAYS, "alone"))
    assert not first.alive
    assert forking._servers[0].alive


def test_nothing_is_forked_where_there_is_a_gpu_or_it_is_forbidden(tmp_path, monkeypatch):
    monkeypatch.setattr(forking, "_ACCELERATORS", (str(tmp_path),))
    assert not forking.may_fork()
    monkeypatch.setattr(forking, "_ACCELERATORS", ())
    assert forking.may_fork()
    monkeypatch.setenv(forking.FORK_STAGES, "0")
    assert not forking.may_fork()


def test_a_fork_that_ended_at_once_is_recorded_as_what_it_was(tmp_path):
    """Its server has waited for it before the command looks at it."""
    with (tmp_path / "log").open("wb") as output:
        process = forking.fork(["keyword"], (), output, inherited=dict(os.environ), environment={})
    assert process is not None
    wait_for(lambda: not psutil.pid_exists(process.pid))
    record = _record_of(process, "train")
    assert (record.pid, record.pgid) == (process.pid, process.pid)
    assert record.started
