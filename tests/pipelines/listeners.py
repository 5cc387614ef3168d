"""Where the processes of a home listen, and what who shows no password gets there: the table of docs/server.md."""

import re
import socket
import urllib.error
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil
from live import Lab
from waiting import wait_for

from pipelines.prefect.server.api import running_services

PAGE = Path(__file__).parents[2] / "docs" / "server.md"
WHO = {
    "api": "clients with the password",
    "studies": "clients with the password, or the readers'",
    "report": "clients with the printed link or a password of the home",
    "record": "clients with the password, or the readers'",
    "supervisord": "`rpg up`, `rpg down` and `rpg doctor`, with a password of their own",
    "postgres": "the server's processes and the workers, each owner with its password",
    "redis": "the server's processes, with their password",
    "worker": "the flows that it has started, each with a token of its own",
    "trainer": "the ranks of the run",
}
_PROGRAMS = {
    "pipelines.prefect.server.api_process": "api",
    "pipelines.studies.web": "studies",
    "pipelines.web": "record",
    "--serve": "report",
    "supervisor.supervisord": "supervisord",
    "pipelines.prefect.flows.workers.process_worker": "worker",
    "rpg.train": "trainer",
}


@dataclass(frozen=True, order=True)
class Listener:
    program: str
    host: str
    port: int

    @property
    def answer(self) -> str:
        """Result of a call without a password, in words."""
        if self.program in ("api", "studies", "record", "report"):
            return f"{_status(self, '/api/flow_runs/count' if self.program == 'api' else '/')}"
        if self.program == "supervisord":
            return _status(self, "/RPC2")
        if self.program == "postgres":
            return _postgres(self)
        said = _said(self, b"PING\r\n" if self.program == "redis" else b"hello\n")
        return "closed, without an answer" if not said else re.split(r"[ .]", said)[0].removeprefix("-")


def listeners(lab: Lab, *expected: str) -> list[Listener]:
    """Every open port of the home's processes, those of other users included.

    Args:
        expected: programs that open theirs a moment after their start, and are waited for.
    """

    def with_expected() -> list[Listener] | None:
        found = _listeners(lab)
        return found if {each.program for each in found} >= {*expected} else None

    return wait_for(with_expected, what=f"what {expected} open")  # type: ignore[no-any-return]


def _listeners(lab: Lab) -> list[Listener]:
    found, processes = set(), {*lab.processes()}
    if services := running_services(lab.home):
        # Redis writes its title over the environment by which the others are known.
        processes |= {*psutil.Process(services.supervisor.pid).children(recursive=True)}
    for process in processes:
        try:
            for connection in process.net_connections(kind="inet"):
                if connection.status == psutil.CONN_LISTEN or (
                    connection.type == socket.SOCK_DGRAM and not connection.raddr
                ):
                    found.add(Listener(_program(process), connection.laddr.ip, connection.laddr.port))
        except psutil.NoSuchProcess:
            continue
    # supervisord has opened the API's port, and does not accept there itself.
    shared = {(each.host, each.port) for each in found if each.program == "api"}
    return sorted(each for each in found if each.program != "supervisord" or (each.host, each.port) not in shared)


def rows(started_by: str, found: Iterable[Listener]) -> list[str]:
    """Returns the table's rows for the processes of a command."""
    seen = {(each.program, each.host): each for each in found}
    return [
        f"| {started_by} | `{each.program}` | {each.host} | {WHO.get(each.program, '?')} | {each.answer} |"
        for each in sorted(seen.values())
    ]


def rows_on_page(started_by: str) -> list[str]:
    """The rows that the page has of it."""
    return [line for line in PAGE.read_text().splitlines() if line.startswith(f"| {started_by} |")]


def _program(process: psutil.Process) -> str:
    command = process.cmdline()
    named = [name for word in command for module, name in _PROGRAMS.items() if Path(word).name == module]
    return named[0] if named else process.name().partition("-")[0]


def _status(listener: Listener, path: str) -> str:
    try:
        with urllib.request.urlopen(f"http://{listener.host}:{listener.port}{path}", timeout=60) as answer:
            return str(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return str(error.code)


def _said(listener: Listener, words: bytes) -> str:
    with socket.create_connection((listener.host, listener.port), timeout=30) as connection:
        connection.sendall(words)
        try:
            return connection.recv(200).decode(errors="replace").strip()
        except (ConnectionError, TimeoutError):
            return ""


def _postgres(listener: Listener) -> str:
    import psycopg

    try:
        psycopg.connect(f"postgresql://prefect@{listener.host}:{listener.port}/prefect", connect_timeout=30).close()
    except psycopg.OperationalError as error:
        return "no password supplied" if "no password supplied" in str(error) else str(error)
    return "let in"
