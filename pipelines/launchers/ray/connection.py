"""One machine at the other end of a channel, where `pipelines.launchers.ray.node` runs, and its reports."""

import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from pipelines.launchers import Finding, passed_on, sent_along
from pipelines.launchers.ranks import Share
from pipelines.launchers.ray.node import BEAT_SECONDS, TOKEN_FILE, machine_versions
from pipelines.processes.supervisor import log_size
from specs.schema.launchers import RayLauncher

PROJECT = Path(__file__).parents[3]
"""This checkout, or the directory of installed packages: the other machine finds the same code at this path."""
NODE = "pipelines.launchers.ray.node"
"""The module that runs there."""
POLL_SECONDS = 0.05
"""Seconds between two reads of the hosts' reports."""


class Channel(Protocol):
    """Bytes to and from the program on another machine. Neither direction waits."""

    closed: bool
    """Whether the other end will send nothing more."""

    def send(self, data: bytes) -> None:
        """Sends bytes; those that the other end does not read are lost."""
        ...

    def receive(self) -> bytes:
        """Returns the bytes that have arrived since the last call."""
        ...

    def close(self) -> None:
        """Ends the channel, and with it the program at its other end."""
        ...


class Connection:
    """A host that follows our orders. Its reports arrive only when `receive` is called: call it many times a second."""

    def __init__(
        self,
        name: str,
        channel: Channel,
        launcher: RayLauncher,
        run_directory: Path,
        token: str,
        secret: Mapping[str, str] = {},
    ) -> None:
        """Sends the first message.

        Args:
            name: name of the machine in messages.
            channel: channel to the program there.
            launcher: the spec's section.
            run_directory: the directory that the machine must see too.
            token: the word in it.
            secret: variables for all processes there, which are never written to disk.
        """
        self.name = name
        self.heard_at = self._beaten_at = time.monotonic()
        self.lost = False
        """Whether the head has given up on the host; final, whatever the host reports once it is back."""
        self.hello: dict[str, Any] = {}
        """The host's first report, about itself; empty until it has arrived."""
        self.ended: dict[str, Any] = {}
        """The report that its processes have ended: their codes, None for one that was killed because
        another one ended."""
        self.refused = ""
        """Reason why the host refuses to take part; empty if it has not refused."""
        self.waiting = ""
        """The resource that the host waits for, by its last report."""
        self.ranks = self.engines = range(0)
        """The numbers of the ranks and engines that are to run there."""
        self.share: Share | None = None
        """The share that it was ordered to start."""
        self.log_began = 0
        """Number of bytes in the share's log from earlier launches."""
        self._buffer = b""
        self._channel = channel
        settings = {
            "environment": {**passed_on(), **sent_along(launcher.environment), **secret},
            "run_dir": str(run_directory),
            "token": token,
            "interface": launcher.interface,
            "silence_seconds": launcher.lost_after_seconds,
        }
        self._send(settings)

    def order(self, order: str, **fields: Any) -> None:
        """Sends an order; if the host does not receive it, the host's silence shows that."""
        self._send({"order": order, **fields})

    def receive(self) -> None:
        """Reads the host's reports since the last call, and sends a sign of life."""
        if self.hello and time.monotonic() - self._beaten_at >= BEAT_SECONDS:
            self._beaten_at = time.monotonic()
            self.order("beat")
        if part := self._channel.receive():
            self.heard_at = time.monotonic()
            *lines, self._buffer = (self._buffer + part).split(b"\n")
            for line in lines:
                self._take(line)

    @property
    def closed(self) -> bool:
        """Returns whether the host will send nothing more."""
        return self._channel.closed

    @property
    def answered(self) -> bool:
        """Returns whether waiting for the host's greeting is over: it has arrived, or it cannot arrive any more."""
        return bool(self.hello or self.closed or self.refused)

    def silent_seconds(self) -> float:
        """Returns the seconds since the last message."""
        return time.monotonic() - self.heard_at

    def codes(self) -> list[int]:
        """Returns the exit codes of its processes that ended by themselves."""
        return [code for code in self.ended.get("codes", []) if code is not None]

    def start(self, share: Share) -> None:
        """Orders the host to start its share."""
        self.share, self.log_began = share, log_size(Path(share.log))
        self.order("start", **asdict(share))

    @property
    def failures(self) -> list[int]:
        """Returns the exit codes that are a failure."""
        return [code for code in self.codes() if self.share and code not in self.share.ended_well]

    def close(self) -> None:
        """Ends the connection, and with it everything that runs there."""
        self._channel.close()

    def _take(self, line: bytes) -> None:
        try:
            report = json.loads(line)
            kind = report["report"]
        except (ValueError, TypeError, KeyError):
            # Output of another program on the node.
            print(f"{self.name}: {line.decode(errors='replace')}", flush=True)
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
        self._channel.send(json.dumps(value).encode() + b"\n")


def leave_token(run_directory: Path) -> str:
    """Writes a word into the directory by which a host can check that it sees the same one. Returns the word."""
    token = secrets.token_hex(8)
    (run_directory / TOKEN_FILE).write_text(token, encoding="utf-8")
    return token


def await_answers(connections: Sequence[Connection], seconds: float) -> None:
    """Waits until every host has answered, but at most this many seconds."""
    receive_until(lambda: all(connection.answered for connection in connections), connections, seconds)


def receive_until(done: Callable[[], bool], connections: Sequence[Connection], seconds: float) -> None:
    """Reads the hosts' reports until `done` is true, or for this many seconds."""
    deadline = time.monotonic() + seconds
    while not done() and time.monotonic() < deadline:
        for connection in connections:
            connection.receive()
        time.sleep(POLL_SECONDS)


def version_differences(here: Mapping[str, str], there: Mapping[str, str]) -> str:
    """Returns how a host's versions differ from those here, in words."""
    differing = [name for name in sorted(here.keys() | there.keys()) if here.get(name) != there.get(name)]
    return "; ".join(f"{name} {there.get(name, 'missing')}, here {here.get(name, 'missing')}" for name in differing)


def examine(connection: Connection) -> Finding:
    """Returns the finding of `rpg doctor` about a machine that has had time to answer."""
    name = f"host {connection.name}"
    if not connection.hello:
        return Finding(name, "broken", connection.refused or "does not answer; Ray starts no actor there")
    if not connection.hello["shared"]:
        return Finding(name, "broken", "does not see this home; RPG_HOME must be the same directory on all hosts")
    if differences := version_differences(machine_versions(), connection.hello["versions"]):
        return Finding(name, "broken", f"has other versions: {differences}")
    at, interface = connection.hello["address"], connection.hello["interface"]
    return Finding(name, "ok", f"sees this home, has this code; {at} on {interface}")
