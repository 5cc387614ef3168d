"""A channel over ssh, and what `rpg doctor` sees at the hosts of a spec."""

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from pipelines.home.home import Home
from pipelines.launchers import Finding
from pipelines.launchers.hosts.connection import NODE, PROJECT, Connection, await_answers, examine, leave_token
from specs.machine.parent import die_with_parent
from specs.schema.launchers import Host, SshLauncher


def _remote_command(launcher: SshLauncher, host: str) -> list[str]:
    """The command line that starts a host's node process, with this process's code."""
    path = os.pathsep.join([str(PROJECT), *filter(None, [os.environ.get("PYTHONPATH")])])
    python = [launcher.python or sys.executable, "-P", "-u", "-m", NODE]
    remote = f"cd / && PYTHONPATH={shlex.quote(path)} exec {shlex.join(python)}"
    options = ["-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={max(1, round(launcher.connect_seconds))}"]
    return [*launcher.ssh, *options, host, remote]


class SshChannel:
    """The standard streams of a host's node process."""

    def __init__(self, launcher: SshLauncher, host: str) -> None:
        """Connects."""
        self.closed = False
        self._ssh = subprocess.Popen(
            _remote_command(launcher, host),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            preexec_fn=partial(die_with_parent, os.getpid()),
        )
        assert self._ssh.stdin is not None
        assert self._ssh.stdout is not None
        self._in, self._out = self._ssh.stdin.fileno(), self._ssh.stdout.fileno()
        os.set_blocking(self._out, False)
        os.set_blocking(self._in, False)

    def send(self, data: bytes) -> None:
        """Sends. A line is far shorter than a pipe's buffer; what does not fit goes to a host that is stuck."""
        with contextlib.suppress(OSError):
            os.write(self._in, data)

    def receive(self) -> bytes:
        """What has come."""
        received = b""
        with contextlib.suppress(BlockingIOError):
            while not self.closed:
                part = os.read(self._out, 1 << 16)
                self.closed = not part
                received += part
        return received

    def close(self) -> None:
        """Ends the connection."""
        for stream in (self._ssh.stdin, self._ssh.stdout):
            assert stream is not None
            with contextlib.suppress(OSError):
                stream.close()
        self._ssh.kill()
        self._ssh.wait()
        self.closed = True


def connect(launcher: SshLauncher, run_directory: Path, token: str, secret: Mapping[str, str] = {}) -> list[Connection]:
    """Connections to the spec's hosts, those with ranks first."""
    hosts = [*((host, False) for host in launcher.read_hosts()), *((host, True) for host in launcher.engine_hosts)]
    return [_connected(launcher, host, run_directory, token, for_engines, secret) for host, for_engines in hosts]


def _connected(
    launcher: SshLauncher, host: Host, run_directory: Path, token: str, for_engines: bool, secret: Mapping[str, str]
) -> Connection:
    channel = SshChannel(launcher, host.host)
    return Connection(
        host.host,
        channel,
        launcher,
        run_directory,
        token,
        slots=host.slots,
        for_engines=for_engines,
        secret=secret,
    )


def examine_hosts(home: Home, launcher: SshLauncher) -> Iterator[Finding]:
    """One finding for each host of a spec: it answers, sees this home, and has the same code and packages."""
    if not shutil.which(launcher.ssh[0]):
        yield Finding("launcher ssh", "broken", f"no {launcher.ssh[0]} here")
        return
    home.create()
    with tempfile.TemporaryDirectory(dir=home.root, prefix=".doctor-") as directory:
        connections = connect(launcher, Path(directory), leave_token(Path(directory)))
        try:
            await_answers(connections, launcher.connect_seconds)
            for connection in connections:
                yield examine(connection, "`ssh` must get in without a password")
        finally:
            for connection in connections:
                connection.close()
