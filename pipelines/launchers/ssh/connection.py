"""One host at the other end of an ssh connection, where `pipelines.launchers.ssh.node` runs, and what it reports."""

import contextlib
import json
import os
import secrets
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from pipelines.home.home import Home
from pipelines.launchers import Finding, passed_on, sent_along
from pipelines.launchers.ranks import Share
from pipelines.launchers.ssh.node import BEAT_SECONDS, TOKEN_FILE, machine_versions
from pipelines.processes.supervisor import log_size
from specs.machine.parent import die_with_parent
from specs.schema.launchers import Host, SshLauncher

_PROJECT = Path(__file__).parents[3]
POLL_SECONDS = 0.05
"""Between two looks at what the hosts have said."""


def _remote_command(launcher: SshLauncher, host: str) -> list[str]:
    """The command line that starts a host's node process, with this process's code."""
    path = os.pathsep.join([str(_PROJECT), *filter(None, [os.environ.get("PYTHONPATH")])])
    python = [launcher.python or sys.executable, "-u", "-m", "pipelines.launchers.ssh.node"]
    remote = f"cd / && PYTHONPATH={shlex.quote(path)} exec {shlex.join(python)}"
    options = ["-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={max(1, round(launcher.connect_seconds))}"]
    return [*launcher.ssh, *options, host, remote]


class Connection:
    """A host that takes our orders. Its reports come in only when `receive` is called: call it many times a second."""

    def __init__(
        self, host: Host, launcher: SshLauncher, run_directory: Path, token: str, secret: Mapping[str, str] = {}
    ) -> None:
        """Connects.

        Args:
            host: where to.
            launcher: the spec's section.
            run_directory: which the host is to see as well.
            token: the word in it.
            secret: variables for all that runs there, which are never written down.
        """
        self.host = host
        self.heard_at = self._beaten_at = time.monotonic()
        self.closed = False
        self.lost = False
        """Whether the head has given the host up; it stays so, whatever the host reports once it is back."""
        self.hello: dict[str, Any] = {}
        """The host's first report, about itself; empty until it has come."""
        self.ended: dict[str, Any] = {}
        """The report of its processes' end: their codes, None for one that was killed because of another's end."""
        self.refused = ""
        """Why the host will not take part; empty where it has not said so."""
        self.waiting = ""
        """What the host waits for, as last reported."""
        self.ranks = self.engines = range(0)
        """The numbers of those that are to run there."""
        self.share: Share | None = None
        """What it was ordered to start."""
        self.log_began = 0
        """So many bytes of the share's log are from earlier launches."""
        self._buffer = b""
        self._ssh = subprocess.Popen(
            _remote_command(launcher, host.host),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            preexec_fn=partial(die_with_parent, os.getpid()),
        )
        assert self._ssh.stdin is not None
        assert self._ssh.stdout is not None
        self._in, self._out = self._ssh.stdin.fileno(), self._ssh.stdout.fileno()
        os.set_blocking(self._out, False)
        os.set_blocking(self._in, False)
        settings = {
            "environment": {**passed_on(), **sent_along(launcher.environment), **secret},
            "run_dir": str(run_directory),
            "token": token,
            "interface": launcher.interface,
            "silence_seconds": launcher.lost_after_seconds,
        }
        self._send(settings)

    def order(self, order: str, **fields: Any) -> None:
        """Sends an order; what a host does not take shows as its silence."""
        self._send({"order": order, **fields})

    def receive(self) -> None:
        """Takes in what the host has reported since the last call, and lets it know that we are there."""
        if self.hello and time.monotonic() - self._beaten_at >= BEAT_SECONDS:
            self._beaten_at = time.monotonic()
            self.order("beat")
        with contextlib.suppress(BlockingIOError):
            while not self.closed:
                part = os.read(self._out, 1 << 16)
                self.closed = not part
                self.heard_at = time.monotonic()
                *lines, self._buffer = (self._buffer + part).split(b"\n")
                for line in lines:
                    self._take(line)

    @property
    def answered(self) -> bool:
        """Whether the host has said hello, or will not."""
        return bool(self.hello or self.closed or self.refused)

    def silent_seconds(self) -> float:
        """Since anything came."""
        return time.monotonic() - self.heard_at

    def codes(self) -> list[int]:
        """Exit codes of its processes that ended by themselves."""
        return [code for code in self.ended.get("codes", []) if code is not None]

    def start(self, share: Share) -> None:
        """Orders the host to start its share."""
        self.share, self.log_began = share, log_size(Path(share.log))
        self.order("start", **asdict(share))

    @property
    def failures(self) -> list[int]:
        """Exit codes that are a failure."""
        return [code for code in self.codes() if self.share and code not in self.share.ended_well]

    def close(self) -> None:
        """Ends the connection, and with it what runs there."""
        for stream in (self._ssh.stdin, self._ssh.stdout):
            assert stream is not None
            with contextlib.suppress(OSError):
                stream.close()
        self._ssh.kill()
        self._ssh.wait()
        self.closed = True

    def _take(self, line: bytes) -> None:
        try:
            report = json.loads(line)
            kind = report["report"]
        except (ValueError, TypeError, KeyError):
            # A login script that talks.
            print(f"{self.host.host}: {line.decode(errors='replace')}", flush=True)
            return
        if kind == "hello":
            self.hello = report
        elif kind == "ended":
            self.ended = report
        elif kind == "refused":
            self.refused = report["message"]
        elif kind == "waiting" and report["for"] != self.waiting:
            self.waiting = report["for"]
            print(f"waiting: {self.waiting}", flush=True)

    def _send(self, value: dict[str, Any]) -> None:
        # A line is far shorter than a pipe's buffer; what does not fit goes to a host that is stuck.
        with contextlib.suppress(OSError):
            os.write(self._in, json.dumps(value).encode() + b"\n")


def leave_token(run_directory: Path) -> str:
    """Writes a word into the directory by which a host can tell that it sees the same one. Returns the word."""
    token = secrets.token_hex(8)
    (run_directory / TOKEN_FILE).write_text(token, encoding="utf-8")
    return token


def await_answers(connections: Sequence[Connection], seconds: float) -> None:
    """Returns when every host has answered, or after so many seconds."""
    receive_until(lambda: all(connection.answered for connection in connections), connections, seconds)


def receive_until(done: Callable[[], bool], connections: Sequence[Connection], seconds: float) -> None:
    """Takes in what the hosts report until it is `done`, or for so many seconds."""
    deadline = time.monotonic() + seconds
    while not done() and time.monotonic() < deadline:
        for connection in connections:
            connection.receive()
        time.sleep(POLL_SECONDS)


def version_differences(here: Mapping[str, str], there: Mapping[str, str]) -> str:
    """Where a host's versions differ from those here, in words."""
    differing = [name for name in sorted(here.keys() | there.keys()) if here.get(name) != there.get(name)]
    return "; ".join(f"{name} {there.get(name, 'missing')}, here {here.get(name, 'missing')}" for name in differing)


def examine_hosts(home: Home, launcher: SshLauncher) -> Iterator[Finding]:
    """One finding for each host of a spec: it answers, sees this home, and has the same code and packages."""
    if not shutil.which(launcher.ssh[0]):
        yield Finding("launcher ssh", "broken", f"no {launcher.ssh[0]} here")
        return
    home.create()
    with tempfile.TemporaryDirectory(dir=home.root, prefix=".doctor-") as directory:
        token = leave_token(Path(directory))
        hosts = (*launcher.read_hosts(), *launcher.engine_hosts)
        connections = [Connection(host, launcher, Path(directory), token) for host in hosts]
        try:
            await_answers(connections, launcher.connect_seconds)
            for connection in connections:
                yield _examine(connection)
        finally:
            for connection in connections:
                connection.close()


def _examine(connection: Connection) -> Finding:
    name = f"host {connection.host.host}"
    if not connection.hello:
        return Finding(name, "broken", connection.refused or "does not answer; `ssh` must get in without a password")
    if not connection.hello["shared"]:
        return Finding(name, "broken", "does not see this home; RPG_HOME must be the same directory on all hosts")
    if differences := version_differences(machine_versions(), connection.hello["versions"]):
        return Finding(name, "broken", f"has other versions: {differences}")
    at, interface = connection.hello["address"], connection.hello["interface"]
    return Finding(name, "ok", f"{connection.host.slots} slots; sees this home, has this code; {at} on {interface}")
