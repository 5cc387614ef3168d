"""Control of supervisord, which keeps the programs of `rpg up` alive: it restarts each program that ends."""

import contextlib
import http.client
import json
import math
import os
import shlex
import signal
import sys
import time
import xmlrpc.client
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from pipelines.home.home import Home
from pipelines.launchers.network import free_port
from pipelines.prefect.server.api import START_SECONDS, ServiceError, answers, refuse_anothers
from pipelines.prefect.server.credentials import password
from pipelines.processes.reap import ProcessRecord, end
from pipelines.processes.stop import give_back_grace
from pipelines.processes.supervisor import log_size, log_tail, start
from specs.machine.files import replacing
from specs.machine.liveness import began_with, is_alive

_CLOSING_SECONDS = 30.0
"""Seconds that a program has to end before it is killed, in addition to the time that a worker's runs need to save a
checkpoint."""
_OTHERS_SECONDS = 120.0
"""Seconds that supervisord needs to end all programs except the worker, one after another."""
_POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Program:
    """A program to keep alive."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that are added to the environment of `rpg up`."""
    log: str = ""
    """The name of the program's file under logs/. Empty means the program's name and `.log`."""
    processes: int = 1
    """Number of processes of the program."""
    port: int = 0
    """Port of this machine that supervisord opens. All processes of the program have its socket as standard input. 0:
    no port."""
    address: str = ""
    """URL that answers a GET request with status 200 once the program is ready. Empty if the program has no such
    URL."""
    user: str = ""
    """The user that runs the program. Empty means the calling user."""
    directory: str = field(default_factory=os.getcwd)
    stop_signal: str = "SIGTERM"

    @property
    def log_name(self) -> str:
        """The name of its file under logs/."""
        return self.log or f"{self.name}.log"


@dataclass(frozen=True, slots=True)
class ProcessState:
    """One process of a program, as supervisord sees it."""

    program: str
    log: str
    """The name of the program's file under logs/."""
    pid: int
    """Process id; 0 while it does not run."""
    state: str
    """supervisord's state: STARTING, RUNNING, BACKOFF (it ended at once and is restarted), STOPPED, and others."""


class Supervisor:
    """The supervisord of a home, through its control port: on loopback, with a password."""

    def __init__(self, home: Home, port: int) -> None:
        self._home = home
        self.port = port
        self._log_starts: dict[str, int] = {}
        """Length of each log under logs/ when supervisord was started, in bytes."""

    def _order(self, name: str, *arguments: Any) -> Any:
        """Calls one of supervisord's XML-RPC methods. Raises ServiceError if supervisord does not answer, or
        refuses."""
        url = f"http://rpg:{password(self._home, 'supervisor')}@127.0.0.1:{self.port}/RPC2"
        refuse_anothers(url)
        try:
            with xmlrpc.client.ServerProxy(url) as proxy:
                return getattr(proxy.supervisor, name)(*arguments)
        except (OSError, http.client.HTTPException, xmlrpc.client.Error) as error:
            raise ServiceError(f"supervisord does not answer: {error}") from None

    @classmethod
    def start(cls, home: Home, programs: Iterable[Program]) -> "tuple[Supervisor, ProcessRecord]":
        """Starts supervisord, without starting its programs. Raises ServiceError if it does not answer."""
        supervisor = cls(home, free_port())
        supervisor._write(list(programs))
        log = home.logs / "supervisord.log"
        supervisor._log_starts = {path.name: log_size(path) for path in home.logs.glob("*.log")}
        command = [sys.executable, "-P", "-m", "supervisor.supervisord", "--configuration", "services/supervisord.conf"]
        process = start(command, log, attached=False, directory=home.root)
        deadline = time.monotonic() + START_SECONDS
        while not supervisor.answers():
            if process.poll() is not None or time.monotonic() > deadline:
                raise ServiceError(f"supervisord does not start; {log}:\n{supervisor._tail(log)}")
            time.sleep(_POLL_SECONDS / 2)
        return supervisor, ProcessRecord.of(process.pid, "supervisord")

    def answers(self) -> bool:
        """Returns whether supervisord answers."""
        try:
            self._order("getState")
        except ServiceError:
            return False
        return True

    def states(self) -> list[ProcessState]:
        """Returns every process of every program. Raises ServiceError if supervisord does not answer."""
        return [
            ProcessState(each["group"], Path(each["stdout_logfile"]).name, each["pid"], each["statename"])
            for each in self._order("getAllProcessInfo")
        ]

    def pids(self, program: str) -> list[int]:
        """Returns the process ids of a program's running processes."""
        return [each.pid for each in self.states() if each.program == program and each.pid]

    def run(self, program: str) -> None:
        """Starts a program's processes that do not run; does not wait."""
        self._order("startProcessGroup", program, False)

    def run_all(self) -> None:
        """Starts all processes that do not run; does not wait."""
        self._order("startAllProcesses", False)

    def stop(self, program: str) -> None:
        """Asks a program's processes to end, and to stay ended until `run` is called. Does not wait."""
        self._order("stopProcessGroup", program, False)

    def wait(self, program: Program, ready: Callable[[], bool], timeout: float = START_SECONDS) -> None:
        """Waits until `ready` returns true. Raises ServiceError if a process of the program ends first, or if the time
        is up."""
        log = self._home.logs / program.log_name
        started = set(self.pids(program.name))
        deadline = time.monotonic() + timeout
        while not ready():
            if started != set(self.pids(program.name)):
                raise ServiceError(f"{program.name} ended while starting; {log}:\n{self._tail(log)}")
            if time.monotonic() > deadline:
                raise ServiceError(f"{program.name} did not answer within {timeout:g} s; see {log}")
            time.sleep(_POLL_SECONDS)

    def _tail(self, log: Path) -> str:
        """Returns the end of a log, without lines from before supervisord was started."""
        return log_tail(log, since=self._log_starts.get(log.name, 0))

    def wait_for_address(self, program: Program) -> None:
        """Waits until the program answers at its address; returns at once if it has none. Raises ServiceError like
        `wait`, and if another user owns the process that answers."""
        if program.address:
            self.wait(program, lambda: answers(program.address))
            refuse_anothers(program.address)

    def _write(self, programs: list[Program]) -> None:
        """Writes the files that supervisord and `launch` read. Both files hold passwords."""
        self._home.services.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._home.logs.mkdir(parents=True, exist_ok=True)
        fields = {program.name: asdict(program) for program in programs}
        write_private(self._home.services / "programs.json", json.dumps(fields, indent=1))
        sections = [self._own_sections(), *(_section(*numbered) for numbered in enumerate(programs))]
        write_private(self._home.services / "supervisord.conf", "\n\n".join(sections) + "\n")

    def _own_sections(self) -> str:
        # Running as root has to be requested explicitly.
        user = "user = root\n" if os.geteuid() == 0 else ""
        return f"""\
[supervisord]
{user}nodaemon = true
silent = true
logfile = logs/supervisord.log
pidfile = services/supervisord.pid

[inet_http_server]
port = 127.0.0.1:{self.port}
username = rpg
password = {password(self._home, "supervisor")}

[rpcinterface:supervisor]
supervisor.rpcinterface_factory = supervisor.rpcinterface:make_main_rpcinterface"""


def _section(place: int, program: Program) -> str:
    """Returns a program's section of the configuration. A process that ends is restarted at once, without limit."""
    head = [f"[program:{program.name}]"]
    if program.port:
        head = [f"[fcgi-program:{program.name}]", f"socket = tcp://127.0.0.1:{program.port}"]
    command = shlex.join([sys.executable, "-P", "-m", "pipelines.prefect.services.launch", program.name]).replace(
        "%", "%%"
    )
    lines = [
        *head,
        f"command = {command}",
        "process_name = %(program_name)s-%(process_num)d",
        f"priority = {place}",
        f"numprocs = {program.processes}",
        "autostart = false",
        "autorestart = true",
        "startretries = 1000000",
        f"stopsignal = {program.stop_signal.removeprefix('SIG')}",
        f"stopwaitsecs = {math.ceil(_program_seconds())}",
        "killasgroup = true",
        "redirect_stderr = true",
        f"stdout_logfile = logs/{program.log_name}",
    ]
    return "\n".join(lines)


def write_private(path: Path, text: str) -> None:
    """Writes a file that only this user may read."""
    with replacing(path) as aside:
        descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)


def end_supervisor(record: ProcessRecord) -> bool:
    """Ends supervisord after its programs, the last program of the list first; also ends programs that a killed
    supervisord has left. Returns whether anything was alive."""
    if is_alive(record.pid, record.started):
        os.kill(record.pid, signal.SIGTERM)
        deadline = time.monotonic() + stop_seconds()
        while is_alive(record.pid, record.started) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        end(record, grace=0.0)
        return True
    left = _session_members(record)
    _, alive = psutil.wait_procs(left, timeout=_program_seconds())
    for process in alive:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(alive)
    return bool(left)


def stop_seconds() -> float:
    """Returns the seconds that supervisord has to end all its programs, a worker's runs included."""
    return _program_seconds() + _OTHERS_SECONDS


def _program_seconds() -> float:
    return give_back_grace() + _CLOSING_SECONDS


def _session_members(record: ProcessRecord) -> list[psutil.Process]:
    """Returns the living processes of supervisord's session, which are its programs. They are asked to end if
    supervisord is killed."""
    members = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getsid(process.pid) == record.pid and began_with(process.pid, record.started):
                members.append(process)
    return members
