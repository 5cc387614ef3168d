"""The embedded API server: up while it is needed, and ended with the process that started it."""

import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import ThreadingTCPServer

import psutil
import pytest
from live import Lab

from pipelines.home.home import Home
from pipelines.launchers.network import free_port
from pipelines.prefect.server import client as server_client
from pipelines.prefect.server.api import (
    Api,
    EmbeddedServer,
    ServiceError,
    Services,
    auth_string_for,
    client_settings,
    is_healthy,
    renew_passwords,
    running_services,
    wait_until_healthy,
)
from pipelines.prefect.server.client import prefect_client
from pipelines.prefect.server.credentials import make_passwords, own_string, password
from pipelines.prefect.server.settings import sqlite_file
from pipelines.prefect.services.backends import Postgres, Redis, _let_in
from pipelines.prefect.services.stack import _cancel_runs, next_port
from pipelines.prefect.services.supervisord import Program, Supervisor
from pipelines.processes.reap import ProcessRecord, reap
from pipelines.processes.supervisor import start
from specs.errors import SpecError
from specs.machine.files import read_json, write_json
from specs.machine.liveness import is_alive


def test_a_client_without_a_home_is_not_warned_of_that(tmp_path):
    code = f"""
from pathlib import Path
from pipelines.home.home import Home
from pipelines.prefect.server.api import client_settings
with client_settings(Home(Path({str(tmp_path / "home")!r})), "http://127.0.0.1:{free_port()}/api"):
    print("connected")
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (result.stdout, result.stderr) == ("connected\n", "")
    assert not (tmp_path / "home").exists()


@pytest.mark.more
def test_an_embedded_server_answers_and_is_gone_afterwards(tmp_path):
    server = EmbeddedServer(Home(tmp_path))
    server.start()
    try:
        server.wait()
        assert is_healthy(server.url)
        (record,) = tmp_path.glob("prefect/embedded-*.json")
        pid, started = read_json(record)["pid"], read_json(record)["started"]
        assert is_alive(pid, started)
    finally:
        server.stop()
    assert not is_alive(pid, started)
    assert not list(tmp_path.glob("prefect/embedded-*.json"))
    assert (tmp_path / "prefect" / "prefect.db").is_file()


class CrashLooping(Supervisor):
    """A supervisord one of whose workers has just ended, and which then does not answer any more."""

    def __init__(self, home: Home, pids: list[int]) -> None:
        super().__init__(home, 9)
        self._pids = pids

    def pids(self, program: str) -> list[int]:
        return self._pids if program == "worker" else []


def test_a_worker_that_has_just_ended_is_passed_over_and_none_is_left_suspended(tmp_path):
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        with pytest.raises(ServiceError, match="supervisord does not answer"):
            _cancel_runs(Home(tmp_path), CrashLooping(Home(tmp_path), [2**22 - 1, worker.pid]))
        assert worker.wait(timeout=10) == -signal.SIGKILL
    finally:
        worker.kill()
        worker.wait()


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone starts PostgreSQL as another user")
def test_a_home_that_is_for_a_group_stays_that_groups(tmp_path):
    home = Home(tmp_path / "home")
    data = home.services / "postgres"
    data.mkdir(parents=True)
    os.chown(home.root, -1, 4242)
    home.root.chmod(0o2770)
    with pytest.raises(
        ServiceError, match=r"but only a group can enter .*; do not run as root, or allow access: chmod"
    ):
        _let_in("nobody", home, data)
    assert (home.root.stat().st_gid, stat.S_IMODE(home.root.stat().st_mode)) == (4242, 0o2770)


def test_a_server_that_dies_while_starting_is_an_error_with_the_end_of_its_log(tmp_path):
    log = tmp_path / "server.log"
    process = start([sys.executable, "-c", "import sys; sys.exit('port is taken')"], log)
    with pytest.raises(ServiceError, match="port is taken"):
        wait_until_healthy("http://127.0.0.1:9/api", process, log)


@pytest.mark.more
def test_an_error_quotes_the_log_of_this_start_alone(tmp_path):
    home = Home(tmp_path)
    home.logs.mkdir()
    for name in ("prefect-server", "api", "supervisord"):
        (home.logs / f"{name}.log").write_text("an error of last week\n")
    sqlite_file(home).parent.mkdir()
    sqlite_file(home).write_bytes(b"no database")
    server = EmbeddedServer(home)
    server.start()
    try:
        with pytest.raises(ServiceError, match="ended while starting") as failed:
            server.wait()
    finally:
        server.stop()
    assert "file is not a database" in str(failed.value)
    assert "last week" not in str(failed.value)

    done = subprocess.run([sys.executable, "-c", BROKEN, tmp_path], capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("api ended while starting"), done.stderr
    assert "last week" not in done.stdout


BROKEN = """
import sys
from pathlib import Path
from pipelines.home.home import Home
from pipelines.prefect.server.api import ServiceError
from pipelines.prefect.services.supervisord import Program, end_supervisor, Supervisor
program = Program("api", [sys.executable, "-c", "raise SystemExit(3)"])
supervisor, process = Supervisor.start(Home(Path(sys.argv[1])), [program])
try:
    supervisor.run("api")
    supervisor.wait(program, lambda: False, timeout=60)
except ServiceError as error:
    print(error)
finally:
    end_supervisor(process)
"""


def test_the_dashboard_keeps_its_port_while_that_is_free(tmp_path):
    home = Home(tmp_path)
    port = free_port()
    write_json(home.services / "port.json", {"port": port})
    assert next_port(home) == port
    with socket.create_server(("127.0.0.1", port)):
        assert next_port(home) != port
    assert next_port(home) == port


@pytest.mark.long
def test_up_takes_the_port_again_that_it_had_before(lab: Lab) -> None:
    port = free_port()
    try:
        for arguments in (("--port", str(port)), ()):
            assert f":{port}\n" in lab.rpg("up", *arguments).out
            assert lab.rpg("down").code == 0
    finally:
        lab.rpg("down")


def test_a_server_whose_call_was_killed_is_ended_by_the_next_command(tmp_path):
    home = Home(tmp_path)
    orphan = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    try:
        gone = {"parent": 2**22 - 1, "parent_started": "boot:1"}
        write_json(home.prefect / "embedded-1.json", asdict(ProcessRecord.of(orphan.pid, "server")) | gone)
        assert [record.stage for record in reap(home)] == ["server"]
        assert not psutil.pid_exists(orphan.pid)
    finally:
        orphan.kill()
        orphan.wait()


def test_services_whose_server_is_gone_are_not_running(tmp_path):
    home = Home(tmp_path)
    assert running_services(home) is None
    Services("http://127.0.0.1:9/api", ProcessRecord(2**22 - 1, 2**22 - 1, "boot:1", "supervisord"), 9).write(home)
    assert running_services(home) is None


def test_a_command_starts_its_own_server_where_the_one_that_is_up_does_not_answer(tmp_path):
    home, me = Home(tmp_path), psutil.Process()
    Services("http://127.0.0.1:9/api", ProcessRecord.of(me.pid, "supervisord"), 9).write(home)
    with Api(home) as api:
        assert api.url != "http://127.0.0.1:9/api"


def test_a_server_that_takes_long_to_answer_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(server_client, "_SILENT_SECONDS", 0.2)
    monkeypatch.setattr(server_client, "_LOOK_SECONDS", 0.05)

    class Slow(BaseHTTPRequestHandler):
        def do_GET(self):
            time.sleep(0.8 if self.path.endswith("slow") else 0.0)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Slow) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/api"
        with prefect_client(Home(tmp_path), url) as client:
            client.request("GET", "/slow")
            for _ in range(10):
                client.request("GET", "/fast")
        server.shutdown()
    said = [f"waiting for the Prefect server at {url}: no answer for {seconds} s" for seconds in ("0.2", "0.4")]
    assert capsys.readouterr().err.splitlines()[:2] == said


@contextmanager
def as_another_user() -> Iterator[Callable[[Callable[[], None]], int]]:
    """What runs a function in a process of another user's, and that process' number; it ends with the block."""
    children: list[int] = []

    def run(what: Callable[[], None]) -> int:
        if (child := os.fork()) == 0:
            code = 1
            try:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
                what()
                code = 0
            finally:
                os._exit(code)
        children.append(child)
        return child

    try:
        yield run
    finally:
        for child in children:
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)


@pytest.fixture
def taken(tmp_path) -> Iterator[tuple[int, Path]]:
    """A port at which another user says to everybody that all is well, and what has been asked of him there."""
    asked = tmp_path / "asked"
    asked.touch()
    asked.chmod(0o666)
    tmp_path.chmod(0o755)
    read, write = os.pipe()
    log = os.open(asked, os.O_WRONLY | os.O_APPEND)

    class Welcoming(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            os.write(log, f"{self.path} {dict(self.headers)}\n".encode())
            self.send_response(200)
            self.end_headers()

        def do_POST(self) -> None:
            self.do_GET()

        def log_message(self, *_arguments: object) -> None:
            pass

    def listen() -> None:
        with ThreadingTCPServer(("127.0.0.1", 0), Welcoming) as server:
            os.write(write, str(server.server_address[1]).encode())
            server.serve_forever()

    with as_another_user() as run:
        run(listen)
        os.close(write)
        yield int(os.read(read, 5)), asked
    os.close(read)
    os.close(log)


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="root alone can start a process as another user")


@as_root
def test_who_has_taken_the_port_of_a_server_of_ours_is_shown_no_password(tmp_path, taken):
    (port, asked), home = taken, Home(tmp_path / "home")
    url = f"http://127.0.0.1:{port}/api"
    record = asdict(ProcessRecord.of(os.getpid(), "server")) | {"url": url}
    write_json(home.prefect / "embedded-1.json", record)
    for ours in (url, url + "/", url.replace("127.0.0.1", "localhost")):
        with pytest.raises(ServiceError, match=f"port {port} of this machine has been taken by another user"):
            auth_string_for(home, ours)
    with pytest.raises(ServiceError, match="taken by another user"), client_settings(home, url):
        pass
    process = start([sys.executable, "-c", "import time; time.sleep(60)"], tmp_path / "log")
    try:
        with pytest.raises(ServiceError, match="taken by another user"):
            wait_until_healthy(url, process, tmp_path / "log")
    finally:
        process.kill()
        process.wait()
    assert "Authorization" not in asked.read_text()


class WithoutWorkers(Supervisor):
    """A supervisord whose programs do not end."""

    def pids(self, _program: str) -> list[int]:
        return [1]


@as_root
def test_rpg_up_takes_no_other_users_answer_for_its_own_program(tmp_path, taken):
    (port, asked), home = taken, Home(tmp_path / "home")
    assert not Supervisor(home, port).answers()
    with pytest.raises(ServiceError, match="taken by another user"):
        WithoutWorkers(home, 9).wait_for_address(Program("api", [], address=f"http://127.0.0.1:{port}/api/ready"))
    assert "Authorization" not in asked.read_text()


@as_root
def test_no_database_of_another_user_is_shown_a_password(tmp_path, taken):
    (port, _), home = taken, Home(tmp_path / "home")
    for backend in (Redis(home, "redis-server", port), Postgres(home, tmp_path, port)):
        with pytest.raises(ServiceError, match="taken by another user"):
            backend.answers()
    # PostgreSQL runs as a user of its own where root starts it: root's listener is another user's.
    with socket.create_server(("127.0.0.1", 0)) as roots:
        port = roots.getsockname()[1]
        with pytest.raises(ServiceError, match="taken by another user"):
            Postgres(home, tmp_path, port).answers()


@as_root
def test_no_other_user_can_take_the_port_of_a_command_while_it_lasts(tmp_path):
    server = EmbeddedServer(Home(tmp_path))
    port = int(server.url.split(":")[2].removesuffix("/api"))

    def bind() -> None:
        with socket.socket() as attempt:
            attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            attempt.bind(("", port))
            attempt.listen()

    with as_another_user() as run:
        assert os.waitpid(run(bind), 0)[1] != 0
        server.start()
        try:
            server._process.kill()
            server._process.wait()
            assert os.waitpid(run(bind), 0)[1] != 0
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port), timeout=10)
        finally:
            server.stop()
        assert os.waitpid(run(bind), 0)[1] == 0


def test_localhost_is_the_machine_that_a_server_of_this_home_is_on(tmp_path):
    home = Home(tmp_path)
    record = asdict(ProcessRecord.of(os.getpid(), "server")) | {"url": "http://127.0.0.1:9/api"}
    write_json(home.prefect / "embedded-1.json", record)
    for name in ("127.0.0.1", "localhost", "LOCALHOST", "[::1]"):
        assert auth_string_for(home, f"http://{name}:9/api") == own_string(home), name
    for other in ("http://localhost:10/api", "http://localhost:9/other", "http://localhost.example:9/api"):
        assert auth_string_for(home, other) == "", other


@pytest.mark.parametrize(
    "url",
    [
        "http://[::1",
        "http://host:port",
        "http://127.0.0.1:99999",
        "http://",
        f"http://{'a' * 64}.de/api",
        "http://me:topsecret@host:port",
    ],
)
def test_what_is_no_address_is_refused_in_a_line_without_its_password(tmp_path, url: str):
    with pytest.raises(SpecError, match="not the address of a server") as caught:
        auth_string_for(Home(tmp_path), url)
    assert "topsecret" not in str(caught.value)


def test_new_passwords_are_for_the_homes_processes_too_unless_a_server_is_up(tmp_path):
    home = Home(tmp_path)
    make_passwords(home)
    former = {name: password(home, name) for name in ("auth", "reader", "own")}
    record = asdict(ProcessRecord.of(os.getpid(), "server")) | {"url": "http://127.0.0.1:9/api"}
    write_json(home.prefect / "embedded-1.json", record)
    renew_passwords(home)
    assert [name for name in former if password(home, name) == former[name]] == ["own"]
    (home.prefect / "embedded-1.json").unlink()
    renew_passwords(home)
    assert password(home, "own") != former["own"]


@pytest.mark.more
def test_new_passwords_take_effect_where_what_is_up_does_not_answer(tmp_path):
    lab = Lab(tmp_path / "home", tmp_path / "none.yaml")
    make_passwords(lab.home)
    former = [password(lab.home, name) for name in ("auth", "reader")]
    with subprocess.Popen(["sleep", "60"]) as deaf:
        Services("http://127.0.0.1:9/api", ProcessRecord.of(deaf.pid, "supervisord"), 9).write(lab.home)
        result = lab.rpg("up", "--new-password")
        deaf.kill()
    assert (result.code, "does not answer" in result.err) == (1, True), result.err
    assert not {password(lab.home, name) for name in ("auth", "reader")} & {*former}
