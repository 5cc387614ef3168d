"""A real PostgreSQL for tests, on loopback, as an ordinary user: started, killed, restarted."""

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from waiting import wait_for

from tests.needs import skip_without

BINARIES = next(iter(sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)), None)
"""Returns Debian's directory of the newest one; None if it is not installed."""


class Postgres:
    """One cluster in a directory of its own."""

    def __init__(self, directory: Path) -> None:
        skip_without("postgresql")
        assert BINARIES is not None
        self.directory = directory
        self.port = _free_port()
        self._process: subprocess.Popen[bytes] | None = None
        if os.geteuid() == 0:  # PostgreSQL refuses to run as root
            owner = pwd.getpwnam("postgres")
            os.chown(directory, owner.pw_uid, owner.pw_gid)
        options = ["-D", str(directory / "data"), "-A", "trust", "-U", "rpg", "-E", "UTF8", "--no-sync"]
        subprocess.run(_as_user([str(BINARIES / "initdb"), *options]), check=True, capture_output=True, cwd=directory)

    @property
    def url(self) -> str:
        """For RPG_STUDIES_URL."""
        return f"postgresql://rpg@127.0.0.1:{self.port}/postgres"

    def start(self) -> None:
        """Starts it and waits until it answers."""
        assert BINARIES is not None
        command = [str(BINARIES / "postgres"), "-D", str(self.directory / "data"), "-p", str(self.port)]
        settings = ["-c", f"unix_socket_directories={self.directory}", "-c", "listen_addresses=127.0.0.1"]
        self._process = subprocess.Popen(
            _as_user([*command, *settings]), cwd=self.directory, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        ready = [str(BINARIES / "pg_isready"), "-h", "127.0.0.1", "-p", str(self.port), "-U", "rpg"]
        wait_for(lambda: subprocess.run(ready, capture_output=True).returncode == 0, what="PostgreSQL")

    def kill(self) -> None:
        """kill -9 of the server and all its processes."""
        postmaster = int((self.directory / "data/postmaster.pid").read_text().split()[0])
        os.kill(postmaster, signal.SIGKILL)
        self._process.wait()
        time.sleep(0.3)  # its children see their parent gone

    def stop(self) -> None:
        """Ends it at once."""
        if self._process is not None and self._process.poll() is None:
            postmaster = int((self.directory / "data/postmaster.pid").read_text().split()[0])
            os.kill(postmaster, signal.SIGQUIT)
            self._process.wait(30)


@contextmanager
def postgres() -> Iterator[Postgres]:
    """A running one; its directory is where another user may enter."""
    directory = Path(tempfile.mkdtemp(prefix="rpg-postgres-"))
    server = Postgres(directory)
    try:
        server.start()
        yield server
    finally:
        server.stop()
        shutil.rmtree(directory, ignore_errors=True)


def _as_user(command: list[str]) -> list[str]:
    return (
        ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups", *command]
        if os.geteuid() == 0
        else command
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
