"""`rpg up --foreground`, and the unit of docs/server.md that calls it."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from live import Lab, finished
from places import ROOT

from pipelines.launchers.network import free_port
from pipelines.prefect.server.api import is_healthy, running_services
from pipelines.prefect.services.supervisord import Supervisor, stop_seconds


def unit() -> str:
    """The unit that the page shows."""
    (found,) = re.findall(r"```text\n(\[Unit\].*?)```", (ROOT / "docs/server.md").read_text(), re.DOTALL)
    return str(found)


@pytest.mark.needs("systemd")
@pytest.mark.parametrize("broken", [False, True])
def test_systemd_takes_the_unit_of_the_docs_as_it_is_meant(tmp_path: Path, broken: bool) -> None:
    path = tmp_path / "rpg.service"
    path.write_text(
        unit().replace("/srv/venv/bin/rpg", sys.executable).replace("KillMode", "KillMood" * broken or "KillMode")
    )
    command = ["systemd-analyze", "verify", "--man=no", "--user", str(path)]
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert ("KillMood" in done.stdout + done.stderr) == broken
    assert broken or done.stdout + done.stderr == ""


def test_the_unit_waits_for_as_long_as_the_end_may_take() -> None:
    (seconds,) = re.findall("TimeoutStopSec=(.*)", unit())
    assert int(seconds) >= stop_seconds()


@pytest.mark.more
@pytest.mark.parametrize(("end", "code"), [("SIGTERM", 0), ("rpg down", 0), ("supervisord killed", 1)])
def test_what_the_unit_starts_stays_until_it_is_ended_and_tells_a_failure(lab: Lab, end: str, code: int) -> None:
    port = free_port()
    (words,) = re.findall("ExecStart=(.*)", unit())
    command = [*shlex.split(words)[1:], "--port", str(port), "--json"]
    staying = lab.start(*command, anew=True)
    url = f"http://127.0.0.1:{port}/api"
    assert isinstance(staying, subprocess.Popen)
    assert json.loads(staying.stdout.readline())["api"] == url
    assert is_healthy(url)
    services = running_services(lab.home)
    assert len(Supervisor(lab.home, services.control_port).pids("worker")) == 2
    assert staying.poll() is None
    if end == "SIGTERM":
        staying.send_signal(signal.SIGTERM)
    elif end == "rpg down":
        assert lab.rpg("down").code == 0
    else:
        os.kill(services.supervisor.pid, signal.SIGKILL)
    ended = finished(staying, timeout=240)
    assert ended.code == code, ended.err
    assert running_services(lab.home) is None
    lab.rpg("down")  # what a supervisord that was killed has left
    assert lab.processes() == []
