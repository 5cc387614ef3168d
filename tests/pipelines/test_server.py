"""The embedded API server: up while it is needed, gone with whoever started it."""

import os
import signal
import stat
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import psutil
import pytest

from pipelines.home import Home
from pipelines.processes.reap import ProcessRecord, reap
from pipelines.processes.supervisor import start
from pipelines.server import client as server_client
from pipelines.server.api import (
    Api,
    EmbeddedServer,
    ServiceError,
    Services,
    is_healthy,
    running_services,
    services_file,
    wait_until_healthy,
)
from pipelines.server.client import prefect_client
from pipelines.services.backends import _let_in
from pipelines.services.stack import _cancel_runs, down
from pipelines.services.supervisord import Supervisor
from rpg.files import read_json, write_json
from storage.liveness import is_alive


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
    with pytest.raises(ServiceError, match=r"is for a group; run as another user than root, or let others pass: chmod"):
        _let_in("nobody", home, data)
    assert (home.root.stat().st_gid, stat.S_IMODE(home.root.stat().st_mode)) == (4242, 0o2770)


def test_a_server_that_dies_while_starting_is_an_error_with_the_end_of_its_log(tmp_path):
    log = tmp_path / "server.log"
    process = start([sys.executable, "-c", "import sys; sys.exit('port is taken')"], log)
    with pytest.raises(ServiceError, match="port is taken"):
        wait_until_healthy("http://127.0.0.1:9/api", process, log)


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


def test_down_ends_what_a_version_without_supervisord_has_left_up(tmp_path):
    home = Home(tmp_path)
    sleeping = [sys.executable, "-c", "import time; time.sleep(60)"]
    server, worker = (subprocess.Popen(sleeping, start_new_session=True) for _ in range(2))
    try:
        records = {"server": asdict(ProcessRecord.of(server.pid)), "worker": asdict(ProcessRecord.of(worker.pid))}
        write_json(services_file(home), {"url": "http://127.0.0.1:9/api", **records, "studies": None})
        assert down(home)
        assert not psutil.pid_exists(server.pid)
        assert not psutil.pid_exists(worker.pid)
        assert not down(home)
    finally:
        for process in (server, worker):
            process.kill()
            process.wait()


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
