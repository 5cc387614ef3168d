"""`rpg up --systemd`: the unit it writes, what its ExecStart starts, and how `rpg up` and `rpg down` use systemd."""

import json
import os
import shlex
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from live import Lab
from waiting import wait_for

from pipelines.home.home import Home
from pipelines.launchers.network import free_port
from pipelines.prefect.server.api import ServiceError, Services, is_healthy, running_services
from pipelines.prefect.services.at_boot import install
from pipelines.prefect.services.stack import Wanted, down
from pipelines.prefect.services.systemd import Unit
from pipelines.processes.reap import ProcessRecord
from specs.errors import RpgError
from specs.machine.files import read_json

SYSTEMCTL = """\
#!{python}
import os, pathlib, shlex, subprocess, sys
words = [word for word in sys.argv[1:] if word != "--user"]
here = pathlib.Path(__file__).parent
with (here / "calls").open("a") as calls:
    calls.write(shlex.join(words) + "\\n")
if words[0] in ("show-environment", "daemon-reload", "disable"):
    sys.exit()
(unit,) = pathlib.Path(os.environ["SYSTEMD_UNIT_PATH"]).glob("*.service")
fields = dict(line.split("=", 1) for line in unit.read_text().splitlines() if "=" in line)
pid_file = pathlib.Path(fields["PIDFile"])
if words[0] == "enable":
    sys.exit(subprocess.run(shlex.split(fields["ExecStart"]), env={{}}, cwd="/").returncode)
if words[0] == "is-active":
    sys.exit(0 if pid_file.exists() else 3)
if words[0] == "stop" and pid_file.exists():
    pid = int(pid_file.read_text())
    os.kill(pid, 15)
    os.system(f"tail --pid={{pid}} -f /dev/null")
"""
"""What a manager does with the one unit: this machine may have none."""


@pytest.fixture
def units(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where units are written; what they have started is down afterwards."""
    monkeypatch.setenv("SYSTEMD_UNIT_PATH", str(tmp_path / "units"))
    yield tmp_path / "units"
    lab.rpg("down", "--systemd")


def verified(path: Path, *options: str) -> str:
    """What systemd has to say of a unit file: nothing where it is right."""
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed")
    command = [analyze, "verify", "--man=no", *options, str(path)]
    # That variable would hide the units that come with systemd.
    environment = {name: value for name, value in os.environ.items() if name != "SYSTEMD_UNIT_PATH"}
    environment["XDG_RUNTIME_DIR"] = str(path.parent)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("name", ["home", 'a "home" of 100% $HOME\\s'])
@pytest.mark.parametrize("is_system", [True, False])
def test_systemd_takes_the_unit_as_it_is_meant(tmp_path, monkeypatch, name, is_system):
    monkeypatch.setenv("SYSTEMD_UNIT_PATH", str(tmp_path / "units"))
    unit = Unit(Home(tmp_path / name), is_system)
    unit.write()
    assert verified(unit.path, *(() if is_system else ("--user",))) == ""
    unit.path.write_text(unit.text().replace("KillMode=", "KillMood="))
    assert "KillMood" in verified(unit.path, *(() if is_system else ("--user",)))


def test_a_home_that_would_add_lines_to_its_unit_is_refused(tmp_path):
    with pytest.raises(RpgError, match="control characters"):
        Unit(Home(tmp_path / "a\nExecStartPre=true")).text()


def test_each_home_has_a_unit_where_its_manager_looks(tmp_path, monkeypatch):
    monkeypatch.delenv("SYSTEMD_UNIT_PATH", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    one, other = Unit(Home(tmp_path / "one"), False), Unit(Home(tmp_path / "other"), False)
    assert one.path.parent == tmp_path / "systemd/user"
    assert one.name != other.name
    assert Unit(one.home, True).path == Path("/etc/systemd/system") / one.name
    assert "WantedBy=default.target" in one.text()
    assert "WantedBy=multi-user.target" in Unit(one.home, True).text()


@pytest.mark.parametrize("boots", [0, *(pytest.param(boots, marks=pytest.mark.long) for boots in (1, 2))])
def test_without_a_manager_the_unit_is_written_and_what_it_runs_serves_after_every_boot(lab, units, monkeypatch, boots):
    port = str(free_port())
    monkeypatch.setenv("HF_TOKEN", "hf_told_at_the_first_call")
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    written = lab.rpg("up", "--systemd", "--port", port)
    assert written.code == 0, written.err
    (unit,) = units.iterdir()
    assert f"enable --now {unit.name}" in written.out
    assert "no systemd answers here" in written.err
    assert running_services(lab.home) is None
    assert "hf_told" not in unit.read_text()
    (starting,) = (line for line in unit.read_text().splitlines() if line.startswith("ExecStart="))
    told = lab.home.services / "at-boot.json"
    assert stat.S_IMODE(told.stat().st_mode) == 0o600

    url = f"http://127.0.0.1:{port}/api"
    for _ in range(boots):
        # A manager's environment has nothing of a shell's.
        command = shlex.split(starting.removeprefix("ExecStart="))
        subprocess.run(command, env={}, cwd="/", check=True, timeout=240, stdout=subprocess.DEVNULL)
        assert is_healthy(url)
        supervisor = int((lab.home.services / "supervisord.pid").read_text())
        services = running_services(lab.home)
        assert services is not None
        assert (services.url, services.supervisor.pid) == (url, supervisor), "PIDFile names the main process"
        told_there = Path(f"/proc/{supervisor}/environ").read_bytes().split(b"\0")
        assert b"HF_TOKEN=hf_told_at_the_first_call" in told_there
        os.kill(supervisor, signal.SIGKILL)
        # What it has started still ends, and holds the port: the next start waits for that.
        wait_for(lambda: running_services(lab.home) is None, what="the supervisor's end")

    down = lab.rpg("down", "--systemd")
    assert down.code == 0, down.err
    assert not list(units.iterdir())
    assert lab.processes() == []


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a systemctl of the tests writes how it was called."""
    systemctl = tmp_path / "systemctl"
    systemctl.write_text(SYSTEMCTL.format(python=sys.executable))
    systemctl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path / "calls"


def test_what_was_started_without_systemd_is_not_started_twice(tmp_path, monkeypatch, calls):
    monkeypatch.setenv("SYSTEMD_UNIT_PATH", str(tmp_path / "units"))
    home = Home(tmp_path / "home")
    Services("http://127.0.0.1:9/api", ProcessRecord.of(os.getpid(), "supervisord"), 9).write(home)
    with pytest.raises(ServiceError, match="was not started by systemd; `rpg down`, then `rpg up --systemd`"):
        install(home, Wanted())
    assert not (tmp_path / "units").exists()
    assert "enable" not in calls.read_text()


@pytest.mark.long
def test_with_a_manager_the_unit_is_started_and_stopped_through_it(lab, units, calls):

    def said() -> list[str]:
        words = calls.read_text().splitlines()
        calls.unlink()
        return [call for call in words if call.split()[0] in ("daemon-reload", "enable", "disable", "stop")]

    name, port = Unit(lab.home).name, free_port()
    up = lab.rpg("up", "--systemd", "--port", str(port), "--json")
    assert up.code == 0, up.err
    assert is_healthy(json.loads(up.out)["api"])
    assert said() == ["daemon-reload", f"enable --now {name}"]

    again = lab.rpg("up", "--json")
    assert again.out == up.out, again.err
    assert said() == ["daemon-reload", f"enable --now {name}"]

    down = lab.rpg("down")
    assert f"{units / name} starts it at the next boot" in down.err
    assert said() == [f"stop {name}"]
    assert running_services(lab.home) is None
    assert read_json(lab.home.services / "at-boot.json")["wanted"]["port"] == port
    lab.rpg("down", "--systemd")
    assert said() == [f"stop {name}", f"disable {name}", "daemon-reload"]
    assert not (units / name).exists()


def test_down_ends_what_is_up_where_systemd_refuses_to_stop_its_unit(tmp_path, monkeypatch, calls):
    monkeypatch.setenv("SYSTEMD_UNIT_PATH", str(tmp_path / "units"))
    home = Home(tmp_path / "home")
    Unit(home).write()
    systemctl = (tmp_path / "systemctl").read_text()
    refusing = systemctl.replace('if words[0] == "stop"', 'if words[0] == "stop":\n    sys.exit("not loaded")\nif True')
    (tmp_path / "systemctl").write_text(refusing)
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as left:
        Services("http://127.0.0.1:9/api", ProcessRecord.of(left.pid, "supervisord"), 9).write(home)
        with pytest.raises(ServiceError, match="not loaded"):
            down(home)
        try:
            assert left.wait(10) == -signal.SIGTERM
        finally:
            left.kill()
    assert "stop" in calls.read_text()
    assert running_services(home) is None


def test_a_unit_that_was_never_written_is_removed_without_a_word_to_systemd(tmp_path, monkeypatch, calls):
    monkeypatch.setenv("SYSTEMD_UNIT_PATH", str(tmp_path / "units"))
    Unit(Home(tmp_path / "home")).remove()
    assert not calls.exists()


def test_a_dollar_in_the_name_of_a_home_is_doubled_in_the_command_alone(tmp_path):
    lines = Unit(Home(tmp_path / "$HOME")).text().splitlines()
    (mounts,) = [line for line in lines if line.startswith("RequiresMountsFor=")]
    (command,) = [line for line in lines if line.startswith("ExecStart=")]
    assert mounts == f'RequiresMountsFor="{tmp_path}/$HOME"'
    assert command.endswith(f'"{tmp_path}/$$HOME"')
