"""The server of a command as a fork of it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from live import SPEC

STUDY = """\
name: rates
experiment: tiny.yaml
parameters: {training.optimizer.learning_rate: {float: [1.0e-5, 1.0e-3], log: true}}
goal: {dataset: held_out, metric: mean@2}
trials: 4
"""
FORKED = """\
import os, sys, time
from pathlib import Path
from pipelines.home.home import Home
from pipelines.prefect.server.api import EmbeddedServer
from pipelines.prefect.server.client import prefect_client
from pipelines.processes.forking import Forked

home = Home(Path(sys.argv[1]))
server = EmbeddedServer(home, forks=True)
opened = open(sys.argv[0])
server.start()
try:
    server.wait()
    assert isinstance(server._process, Forked), server._process
    with prefect_client(home, server.url) as client:
        assert client.read_flows() == []
    print(server._process.pid, flush=True)
    sys.stdin.readline()
finally:
    server.stop()
print(server._process.returncode)
"""


def a_command(directory: Path) -> tuple[subprocess.Popen[str], psutil.Process]:
    """A command that has a forked server which answers with the home's password, and the server's process."""
    program = directory / "command.py"
    program.write_text(FORKED)
    pipe = subprocess.PIPE
    command = subprocess.Popen([sys.executable, program, directory / "home"], stdin=pipe, stdout=pipe, text=True)
    said = command.stdout.readline()
    assert said, (directory / "home" / "logs" / "prefect-server.log").read_text()
    return command, psutil.Process(int(said))


@pytest.mark.more
def test_a_forked_server_answers_in_a_group_of_its_own_and_holds_no_file_of_its_command(tmp_path):
    command, server = a_command(tmp_path)
    with command:
        assert os.getpgid(server.pid) == server.pid
        names = {file.path for file in server.open_files()}
        assert not [name for name in names if name.endswith((".py", ".lock"))]
        assert str(tmp_path / "home" / "logs" / "prefect-server.log") in names
        said, _ = command.communicate("\n")
    assert (command.returncode, said.strip()) == (0, str(-signal.SIGTERM))


@pytest.mark.more
def test_a_forked_server_dies_with_its_command(tmp_path):
    command, server = a_command(tmp_path)
    with command:
        command.kill()
    server.wait(60)


UNTIL_THE_SERVER = """\
import sys
from pipelines.cli import main
from pipelines.prefect.server.api import EmbeddedServer

def tell(server):
    print(type(server._process).__name__)
    sys.exit(0)

EmbeddedServer.wait = tell
main()
"""


@pytest.mark.more
@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("run", "tiny.yaml"), id="run"),
        pytest.param(("study", "run", "study.yaml"), id="study", marks=pytest.mark.long),
    ],
)
def test_a_commands_server_is_a_fork_as_nothing_that_the_command_imports_before_it_has_a_thread(tmp_path, words):
    """DuckDB has one, so that a verb that imported it first paid for a second import of Prefect."""
    (tmp_path / "tiny.yaml").write_text(SPEC)
    (tmp_path / "study.yaml").write_text(STUDY)
    command = [sys.executable, "-c", UNTIL_THE_SERVER, *words]
    environment = {**os.environ, "RPG_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "Forked\n"), done.stderr
