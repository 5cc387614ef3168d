"""The supervisor against real processes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from waiting import wait_for

from pipelines.processes.reap import ProcessRecord
from pipelines.processes.stop import StopRequest
from pipelines.processes.supervisor import Child, StageError, StageStoppedError, failure, supervise
from specs.machine.liveness import is_alive

STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(60)"
)
POLITE = (
    "import signal, sys, time\n"
    "signal.signal(signal.SIGTERM, lambda *_: (print('saved', flush=True), sys.exit(143)))\n"
    "print('ready', flush=True)\n"
    "time.sleep(60)"
)


def child(tmp_path: Path, code: str, **fields: object) -> Child:
    return Child("train", [sys.executable, "-c", code], tmp_path / "train.log", tmp_path / "process.json", **fields)


def never() -> None:
    return None


def when_ready(log: Path, grace: float):
    """A stop request as soon as the child says that it is ready."""

    def stop() -> StopRequest | None:
        ready = log.exists() and "ready" in log.read_text()
        return StopRequest("cancelled", grace, whole_command=False) if ready else None

    return stop


def test_the_exit_code_is_returned_and_the_output_is_in_the_log(tmp_path):
    job = child(tmp_path, "import sys; print('out'); print('err', file=sys.stderr); sys.exit(7)")
    assert supervise(job, stop=never, tick=never) == 7
    assert sorted(job.log.read_text().split()) == ["err", "out"]


def test_the_child_is_on_record_while_it_lives_and_leads_a_group_of_its_own(tmp_path):
    seen = []
    job = child(tmp_path, "import time; time.sleep(0.5)")
    supervise(job, stop=never, tick=lambda: seen.append(ProcessRecord.read(job.record)))
    assert seen[0].stage == "train"
    assert seen[0].pgid == seen[0].pid != os.getpgid(0)
    assert not job.record.exists()
    assert not is_alive(seen[0].pid, seen[0].started)


def test_a_stop_request_gives_the_child_its_grace(tmp_path):
    job = child(tmp_path, POLITE)
    with pytest.raises(StageStoppedError, match="cancelled"):
        supervise(job, stop=when_ready(job.log, 10.0), tick=never)
    assert "saved" in job.log.read_text()


def test_a_child_that_ignores_the_request_is_killed_after_the_grace(tmp_path):
    job = child(tmp_path, STUBBORN)
    started = time.monotonic()
    with pytest.raises(StageStoppedError):
        supervise(job, stop=when_ready(job.log, 0.5), tick=never)
    assert time.monotonic() - started < 30  # it would go on for a minute


def test_a_time_limit_ends_the_child(tmp_path):
    job = child(tmp_path, "import time; time.sleep(60)", timeout_seconds=0.3)
    with pytest.raises(StageError, match=r"train ran longer than 0\.3 s"):
        supervise(job, stop=never, tick=never)


def test_an_exception_in_the_tick_leaves_no_child(tmp_path):
    records = []
    job = child(tmp_path, "import time; time.sleep(60)")

    def interrupt() -> None:
        records.append(ProcessRecord.read(job.record))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        supervise(job, stop=never, tick=interrupt)
    assert not is_alive(records[0].pid, records[0].started)


def test_a_launchers_ranks_get_the_signal_and_the_launcher_waits_for_them(tmp_path):
    launcher = (
        "import signal, subprocess, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('launcher signalled', flush=True))\n"
        f"sys.exit(subprocess.run([sys.executable, '-c', {POLITE!r}]).returncode)"
    )
    job = child(tmp_path, launcher, signal_children=True)
    with pytest.raises(StageStoppedError):
        supervise(job, stop=when_ready(job.log, 10.0), tick=never)
    assert "saved" in job.log.read_text()
    assert "launcher signalled" not in job.log.read_text()


def test_the_child_dies_with_a_supervisor_that_is_killed(tmp_path):
    code = (
        "import sys; from pathlib import Path; from pipelines.processes.supervisor import Child, supervise\n"
        "job = Child('train', [sys.executable, '-c', 'import time; time.sleep(60)'], Path(sys.argv[1]) / 'log',"
        " Path(sys.argv[1]) / 'process.json')\n"
        "supervise(job, stop=lambda: None, tick=lambda: None)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)])
    record = wait_for(lambda: ProcessRecord.read(tmp_path / "process.json"), what="the child's record")
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    psutil.wait_procs([psutil.Process(record.pid)] if psutil.pid_exists(record.pid) else [], timeout=5)
    assert not is_alive(record.pid, record.started)


def test_a_failure_shows_the_exit_and_the_last_lines_of_this_attempt(tmp_path):
    log = tmp_path / "base.log"
    log.write_text("old attempt\n")
    before = log.stat().st_size
    log.write_text("old attempt\n" + "".join(f"line {n}\n" for n in range(30)))
    error = failure("base", -9, log, since=before)
    assert str(error).startswith(f"base was killed by SIGKILL; the end of {log}:\n")
    assert "line 29" in str(error)
    assert "line 14" not in str(error)
    assert "old attempt" not in str(failure("base", 1, log, since=before))


def test_a_stage_gets_no_password_of_a_server_or_of_the_database_of_studies(tmp_path, monkeypatch):
    for name in ("PREFECT_API_AUTH_STRING", "RPG_READER_AUTH_STRING", "RPG_STUDIES_URL", "RPG_OTHER"):
        monkeypatch.setenv(name, "said")
    job = child(tmp_path, "import os; print(sorted(name for name in os.environ if os.environ[name] == 'said'))")
    assert supervise(job, stop=never, tick=never) == 0
    assert job.log.read_text().splitlines()[-1] == "['RPG_OTHER']"
