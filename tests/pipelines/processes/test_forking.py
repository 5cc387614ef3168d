"""Forks compared with new processes: every property that a stage can observe is the same in both."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from waiting import wait_for

from pipelines.processes import fork_server, forking
from pipelines.processes.reap import ProcessRecord
from pipelines.processes.stop import StopRequest
from pipelines.processes.supervisor import Child, StageStoppedError, _record_of, supervise
from specs.machine.liveness import is_alive
from tests import forks

ROOM = Path(__file__).parent
SAYS = "says_what_it_is"
"""A program that prints its argument, and the properties of a process: see the module of that name."""


@pytest.fixture(autouse=True)
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A server of each test's own, with few imports, ends with the test."""
    path = [str(tmp_path), str(ROOM), os.environ.get("PYTHONPATH")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
    monkeypatch.delenv(forking.FORK_STAGES, raising=False)
    monkeypatch.setattr(forking, "_ACCELERATORS", ())
    monkeypatch.setattr(forking, "PRELOAD", "preload_of_test")
    monkeypatch.setattr(forking, "start_server", forks._start_server)
    monkeypatch.setattr(fork_server, "READ_LATE", forks._READ_LATE)
    server_imports(tmp_path, "json")
    forking.end_server()
    yield
    forking.end_server()


def server_imports(directory: Path, *modules: str) -> None:
    code = f"from pipelines.processes.fork_server import prepare\nprepare({modules})\n"
    (directory / "preload_of_test.py").write_text(code)


def child(directory: Path, *program: str, **fields: object) -> Child:
    directory.mkdir(exist_ok=True)
    command = [sys.executable, "-P", "-m", *program]
    return Child("train", command, directory / "log", directory / "process.json", **{"forks": True, **fields})


def never() -> None:
    return None


def said(job: Child) -> dict:
    assert supervise(job, stop=never, tick=never) == 0, job.log.read_text()
    return json.loads(job.log.read_text().splitlines()[-1])


def is_fork(said: dict) -> bool:
    """Whether a process was begun by the server and has not replaced itself."""
    return said["parent"] == forking._server._forkserver_pid and "-c" in said["begun"]


def test_a_fork_is_what_a_new_process_would_be(tmp_path):
    forked = said(child(tmp_path / "fork", SAYS, "word", environment={"ADDED": "1"}))
    new = said(child(tmp_path / "new", SAYS, "word", environment={"ADDED": "1"}, forks=False))
    assert is_fork(forked)
    assert new.pop("parent") == os.getpid() != forked.pop("parent")
    assert new.pop("begun") != forked.pop("begun")
    assert forked == new
    assert forked["leads_its_group"]
    assert forked["leads_its_session"]


def test_a_fork_whose_output_is_a_pipe_does_not_take_it_for_a_file(tmp_path):
    """Its output is one where a variable of its environment is a secret, which is taken out of the log."""
    secret = {"HF_TOKEN": "hf_abcdefghijklmnop"}
    forked = said(child(tmp_path / "fork", SAYS, "word", environment=secret))
    new = said(child(tmp_path / "new", SAYS, "word", environment=secret, forks=False))
    assert forked["seekable"] == new["seekable"] == [False, False]


def test_a_fork_leaves_nothing_to_the_next(tmp_path):
    before = said(child(tmp_path / "before", SAYS, "alone"))
    spoils = child(tmp_path / "spoils", SAYS, "spoil", environment={"ADDED": "1"})
    assert supervise(spoils, stop=never, tick=never) == 7
    after = said(child(tmp_path / "after", SAYS, "alone"))
    assert before == after


def test_random_numbers_that_nobody_has_seeded_differ_between_forks(tmp_path):
    server_imports(tmp_path, "numpy.random", "torch")
    drawn = [said(child(tmp_path / str(number), SAYS, "draw")) for number in range(2)]
    assert all(map(is_fork, drawn))
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
        seen.append((record, os.getpgid(record.pid), process.ppid(), process.cmdline()))

    with pytest.raises(StageStoppedError):
        supervise(job, stop=stop, tick=look)
    record, group, parent, words = seen[-1]
    assert record.pid == record.pgid == group
    assert parent == forking._server._forkserver_pid
    assert " ".join(words).split() == [sys.executable, "-P", "-m", SAYS, "wait"]
    assert "saved" in job.log.read_text()
    assert not job.record.exists()


def test_the_signal_that_killed_a_fork_is_its_exit_code(tmp_path):
    assert supervise(child(tmp_path, SAYS, "kill"), stop=never, tick=never) == -signal.SIGSEGV


def test_a_fork_ends_with_its_server_and_the_next_one_has_another(tmp_path):
    job = child(tmp_path, SAYS, "wait")

    def kill_server() -> None:
        os.kill(forking._server._forkserver_pid, signal.SIGKILL)

    assert supervise(job, stop=never, tick=kill_server) == -signal.SIGKILL
    assert is_fork(said(child(tmp_path / "next", SAYS, "alone")))


@pytest.mark.more
@pytest.mark.parametrize("ends", ["killed", "of itself"])
def test_server_and_forks_end_with_their_command(tmp_path, ends):
    program = (
        "import sys; from pathlib import Path; from pipelines.processes import forking\n"
        "from pipelines.processes.supervisor import Child, supervise\n"
        "forking._ACCELERATORS, forking.PRELOAD = (), 'preload_of_test'\n"
        "place = Path(sys.argv[1])\n"
        "job = Child('train', [sys.executable, '-P', '-m', 'says_what_it_is', 'wait'], place / 'log',"
        " place / 'process.json', forks=True)\n"
        "supervise(job, stop=lambda: (place / 'end').exists() and sys.exit(), tick=lambda: None)"
    )
    command = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)])
    log = tmp_path / "log"
    wait_for(lambda: command.poll() is not None or (log.exists() and "ready" in log.read_text()))
    assert command.poll() is None
    family = psutil.Process(command.pid).children(recursive=True)
    assert len(family) == 3  # the tracker of multiprocessing's resources among them
    if ends == "killed":
        command.kill()
    else:
        (tmp_path / "end").touch()
    command.wait()
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive


@pytest.mark.parametrize("module", ["a_module_with_a_thread", "a_module_that_fails"])
def test_a_process_begins_anew_where_the_imports_allow_no_fork(tmp_path, module):
    (tmp_path / "a_module_with_a_thread.py").write_text(
        "import threading, time; threading.Thread(target=time.sleep, args=(600,), daemon=True).start()"
    )
    (tmp_path / "a_module_that_fails.py").write_text("raise SystemExit(3)")
    server_imports(tmp_path, module)
    forked = said(child(tmp_path / "fork", SAYS, "alone"))
    new = said(child(tmp_path / "new", SAYS, "alone", forks=False))
    assert forked.pop("parent") == forking._server._forkserver_pid != new.pop("parent")
    assert forked == new


def test_code_that_has_changed_since_it_was_imported_is_imported_anew(tmp_path):
    module = tmp_path / "changing.py"
    module.write_text("VALUE = 1")
    server_imports(tmp_path, "changing")
    before = said(child(tmp_path / "before", SAYS, "changing"))
    module.write_text("VALUE = 22")
    after = said(child(tmp_path / "after", SAYS, "changing"))
    assert (before["changing"], is_fork(before)) == (1, True)
    assert (after["changing"], is_fork(after)) == (22, False)


def test_a_variable_that_an_import_may_have_read_has_a_process_begin_anew(tmp_path, monkeypatch):
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    assert is_fork(said(child(tmp_path / "before", SAYS, "alone")))
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:10/api")
    late = said(child(tmp_path / "late", SAYS, "alone"))
    assert is_fork(late)
    assert late["environment"]["PREFECT_API_URL"] == "http://127.0.0.1:10/api"
    monkeypatch.setenv("READ_BY_AN_IMPORT", "1")
    after = said(child(tmp_path / "after", SAYS, "alone"))
    assert not is_fork(after)
    assert after["environment"]["READ_BY_AN_IMPORT"] == "1"


def test_the_server_has_no_password_and_imports_nothing_from_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "admin:secret")
    monkeypatch.setenv("RPG_STUDIES_URL", "postgresql://secret")
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "json.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path / "work")
    assert is_fork(said(child(tmp_path / "fork", SAYS, "alone")))
    server = psutil.Process(forking._server._forkserver_pid)
    assert "secret" not in str(server.environ())
    assert os.environ["RPG_STUDIES_URL"] == "postgresql://secret"


@pytest.mark.parametrize(
    ("then", "said"),
    [
        ("fork_server.show_as('a title'); print(' '.join(psutil.Process().cmdline()).strip())", "a title"),
        ("own = multiprocessing.get_context('forkserver').Process(target=print, args=['hi']); own.start()", "hi"),
    ],
    ids=["has a title", "has a fork server of its own"],
)
def test_a_command_that_has_forked_can_do_what_it_could(then, said):
    program = (
        "import multiprocessing, os, psutil, sys; from pipelines.processes import fork_server, forking\n"
        "forking._ACCELERATORS, forking.PRELOAD = (), 'preload_of_test'\n"
        "forked = forking.fork(['keyword'], sys.stdout.buffer, inherited=dict(os.environ), environment={})\n"
        f"assert forked.wait() == 0\n{then}"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == f"{said}\n"


@pytest.mark.parametrize(("word", "code"), [("leave", 3), ("complain", 1), ("fail", 1), ("", 0)])
def test_a_fork_ends_as_a_new_process_does(tmp_path, word, code):
    logs = []
    for kind in ("fork", "new"):
        job = child(tmp_path / kind, SAYS, "end", word, forks=kind == "fork")
        assert supervise(job) == code
        logs.append(job.log.read_text().splitlines())
    assert [lines[-2:] for lines in logs[:1]] == [lines[-2:] for lines in logs[1:]]
    assert "said at the end" in logs[0]


def test_nothing_is_forked_where_there_is_a_gpu_or_it_is_forbidden(tmp_path, monkeypatch):
    monkeypatch.setattr(forking, "_ACCELERATORS", (str(tmp_path),))
    assert not forking.may_fork()
    monkeypatch.setattr(forking, "_ACCELERATORS", ())
    assert forking.may_fork()
    monkeypatch.setenv(forking.FORK_STAGES, "0")
    assert not forking.may_fork()


def test_a_fork_that_ended_at_once_is_on_record_as_one_that_lives_no_more(tmp_path):
    """The server may have waited for it before the command looks at it."""
    with (tmp_path / "log").open("wb") as output:
        process = forking.fork(["keyword"], output, inherited=dict(os.environ), environment={})
    assert process.wait() == 0
    late = forking.Forked(process.pid, lambda: 0)
    record = _record_of(late, "train")
    assert (record.pid, record.pgid, record.started) == (process.pid, process.pid, "")
    assert not is_alive(record.pid, record.started)
