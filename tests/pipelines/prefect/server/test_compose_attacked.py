"""The commands of docker-compose.yml that listen, as processes over a real PostgreSQL and Redis, and attacked."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest
import websockets
from postgres import postgres
from ruamel.yaml import YAML
from server_profile import BACKENDS
from test_api_proxy import FOREIGN, basic, status
from test_compose import ROOT, filled_in
from waiting import wait_for

from pipelines.launchers.network import free_port
from pipelines.prefect.server.api import answers
from pipelines.prefect.server.settings import API_PROCESSES

pytestmark = [
    pytest.mark.more,
    pytest.mark.usefixtures("signals_arrive"),
    pytest.mark.needs(*BACKENDS),
]
PROXY = "prefect.example.org"
PAGES = {"server": "4200", "studies": "4201", "record": "4202"}
"""What listens, and where in its container."""


class Containers:
    """The services of the file as processes of this machine: other addresses and ports, all else as it stands."""

    def __init__(self, directory: Path, databases: str) -> None:
        """`databases`: where PostgreSQL answers, `host:port`."""
        self._directory = directory
        self._services = YAML(typ="safe").load(ROOT / "docker-compose.yml")["services"]
        self.ports = {name: free_port() for name in PAGES}
        redis = f"127.0.0.1:{free_port()}"
        self._places = {
            **{f"{place}:{port}": f"127.0.0.1:{self.ports[place]}" for place, port in PAGES.items()},
            "postgres:5432": databases,
            "redis:6379": redis,
            "port 6379": f"port {redis.partition(':')[2]}",
            "bind * -::*": "bind 127.0.0.1",
            "/var/lib/rpg": str(directory / "home"),
            "/tmp/": f"{directory}/tmp/",
            "$$": "$",
        }
        subprocess.run([str(ROOT / "docker/make-secrets"), str(directory / "made")], check=True, timeout=60)
        self.secrets = {path.name: self._here(path.read_text()) for path in (directory / "made").iterdir()}

    def _here(self, text: str) -> str:
        for there, here in self._places.items():
            text = text.replace(there, here)
        return text

    def start(self, name: str) -> "subprocess.Popen[bytes]":
        """Starts the command of a service."""
        service, given = self._services[name], self._directory / name
        given.mkdir()
        for secret in service["secrets"]:
            (given / secret).write_text(self.secrets[secret])
        entrypoint = [self._here(word).replace("/run/secrets", str(given)) for word in service.get("entrypoint", [])]
        port = PAGES.get(name)
        command = [str(self.ports[name]) if word == port else word for word in service["command"]]
        command = [word.replace("/run/secrets", str(given)) for word in command]
        proxied = {"RPG_TRUSTED_HOSTS": PROXY, "PREFECT_SERVER_UI_API_URL": f"https://{PROXY}/api"}
        environment = {
            key: self._here(filled_in(str(value), **proxied)) for key, value in service.get("environment", {}).items()
        }
        if "RPG_WEB_PORT" in environment:
            environment["RPG_WEB_PORT"] = str(self.ports[name])
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        log = (self._directory / f"{name}.log").open("wb")
        with log:
            return subprocess.Popen(
                [*entrypoint, *command],
                env={"PATH": path, "PYTHONPATH": str(ROOT)} | environment,
                cwd=self._directory,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def url(self, name: str, path: str = "") -> str:
        """Address of a service on this machine."""
        return f"http://127.0.0.1:{self.ports[name]}{path}"


@pytest.fixture(scope="module")
def containers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Containers]:
    directory = tmp_path_factory.mktemp("containers")
    (directory / "tmp").mkdir()
    with ExitStack() as stack:
        cluster = stack.enter_context(postgres())
        made = Containers(directory, f"127.0.0.1:{cluster.port}")
        import psycopg

        with psycopg.connect(cluster.url, autocommit=True) as administrator:
            for statement in made.secrets["databases.sql"].split(";\n"):
                administrator.execute(statement)
        processes = [made.start("redis")]
        stack.callback(lambda: [end(process) for process in reversed(processes)])
        assert made.start("migrate").wait(300) == 0, (directory / "migrate.log").read_text()
        for name, port in PAGES.items():
            ready = made.url(name, "/api/ready" if port == "4200" else "/ready")
            processes.append(process := made.start(name))
            wait_for(lambda ready=ready, process=process: process.poll() is not None or answers(ready), what=name)
            assert process.poll() is None, (directory / f"{name}.log").read_text()
        yield made


def end(process: "subprocess.Popen[bytes]") -> None:
    """Ends a service as Docker does: its first process gets a signal to end, and remaining processes are killed after a
    while."""
    children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(10)
    process.kill()
    process.wait()
    for child in children:
        if child.is_running():
            child.kill()


ASKED = {"server": "/api/admin/version", "studies": "/api/studies", "record": "/"}


@pytest.mark.parametrize("name", PAGES)
def test_only_who_shows_a_password_is_let_in(containers: Containers, name: str) -> None:
    address = containers.url(name, ASKED[name])
    assert status(address)[0] == 401
    assert status(address, authorization=basic("rpg:wrong"))[0] == 401
    assert status(address, authorization=basic(containers.secrets["PREFECT_API_AUTH_STRING"].strip()))[0] == 200
    reader = status(address, authorization=basic(containers.secrets["RPG_READER_AUTH_STRING"].strip()))[0]
    assert reader == (401 if name == "server" else 200)


@pytest.mark.parametrize("name", PAGES)
def test_another_name_or_a_page_of_another_origin_is_turned_away(containers: Containers, name: str) -> None:
    address = containers.url(name, ASKED[name])
    shown = basic(containers.secrets["PREFECT_API_AUTH_STRING"].strip())
    for host in ("elsewhere.example", f"elsewhere.example:{PAGES[name]}", f"{PROXY}.elsewhere.example"):
        assert status(address, host=host, authorization=shown)[0] == 403
    published = f"localhost:{PAGES[name]}"
    for host, origin in ((published, f"http://{published}"), ("server:4200", ""), (PROXY, f"https://{PROXY}")):
        named = {"origin": origin} if origin else {}
        assert status(address, host=host, authorization=shown, **named)[0] == 200, host
    for origin in (FOREIGN, "null", "http://localhost:5000"):
        answered, headers = status(address, host=published, origin=origin, authorization=shown)
        assert answered == 403
        assert "access-control-allow-origin" not in headers


@pytest.mark.parametrize("path", ["/api/events/in", "/api/events/out", "/api/logs/out"])
def test_a_websocket_needs_the_password_and_our_own_origin(containers: Containers, path: str) -> None:
    address = containers.url("server", path).replace("http://", "ws://")

    async def greeted(token: str, **options: str) -> str:
        try:
            async with websockets.connect(address, subprotocols=["prefect"], **options) as socket:  # type: ignore[list-item,arg-type]
                await socket.send(json.dumps({"type": "auth", "token": token}))
                return str(json.loads(await asyncio.wait_for(socket.recv(), 20))["type"])
        except (websockets.exceptions.InvalidStatus, websockets.exceptions.ConnectionClosed):
            return "refused"

    shown = containers.secrets["PREFECT_API_AUTH_STRING"].strip()
    assert asyncio.run(greeted(shown)) == "auth_success"
    assert asyncio.run(greeted("rpg:wrong")) == "refused"
    assert asyncio.run(greeted(shown, origin=FOREIGN)) == "refused"


def test_the_dashboard_is_confined_and_names_the_proxys_address(containers: Containers) -> None:
    answered, headers = status(containers.url("server"), host=PROXY)
    assert answered == 200
    assert f"default-src 'self' https://{PROXY} " in headers["content-security-policy"]


def test_readers_are_told_where_the_record_is_and_nothing_else(containers: Containers) -> None:
    reader = basic(containers.secrets["RPG_READER_AUTH_STRING"].strip())
    # No such variable has been set yet: the question has come through.
    assert status(containers.url("server", "/rpg/record"), authorization=reader)[0] == 404
    assert status(containers.url("server", "/rpg/record"))[0] == 401
    assert status(containers.url("server", "/api/flow_runs/filter"), {}, authorization=reader)[0] == 401


def test_the_api_is_several_processes_and_what_dies_of_it_is_started_again(containers: Containers) -> None:
    def serving() -> set[int]:
        # The kernel gives a connection to whichever of them accepts: what they have open says who does.
        found = set()
        for process in psutil.process_iter():
            try:
                listening = [each for each in process.net_connections(kind="inet") if each.status == "LISTEN"]
                if containers.ports["server"] in [each.laddr.port for each in listening]:
                    found.add(process.pid)
            except psutil.Error:
                continue
        return found

    first = serving()
    assert len(first) == API_PROCESSES + 1
    victim = max(first)
    psutil.Process(victim).kill()
    wait_for(lambda: victim not in serving() and len(serving()) == len(first), timeout=120, what="another one")
    assert answers(containers.url("server", "/api/ready"), timeout=20)
