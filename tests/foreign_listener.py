"""A listener of another user of this machine. It answers each request and keeps a log of them."""

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

NOBODY = 65534
HTTP = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


@dataclass(frozen=True)
class Listening:
    port: int
    log: Path
    pid: int

    @property
    def sent(self) -> str:
        """Everything that it was sent."""
        return self.log.read_bytes().decode(errors="replace")


@contextmanager
def listening(
    log: Path, answer: bytes = HTTP, *, user: int = NOBODY, host: str = "127.0.0.1", port: int = 0
) -> Iterator[Listening]:
    """A process of the user's that takes connections at a port, answers each with these bytes, and hangs up."""
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        try:
            if user != os.geteuid():
                os.setgroups([])
                os.setgid(user)
                os.setuid(user)
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            with socket.create_server((host, port), family=family) as server:
                os.write(write, str(server.getsockname()[1]).encode())
                while True:
                    connection, _ = server.accept()
                    with connection, suppress(OSError):
                        connection.settimeout(5)
                        os.write(output, connection.recv(1 << 16))
                        connection.sendall(answer)
        finally:
            os._exit(1)
    os.close(write)
    try:
        yield Listening(int(os.read(read, 5)), log, child)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(read)
        os.close(output)
