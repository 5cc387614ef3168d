"""A host of one's own that reaches a port of this machine by one cable, which can be cut: a network namespace."""

import contextlib
import os
import shutil
import socket
import socketserver
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass


def missing() -> str:
    """Returns the reason why such a host cannot exist here; empty if it can."""
    if shutil.which("ip") is None:
        return "needs ip (apt-get install iproute2)"
    probe = subprocess.run(["ip", "netns", "add", f"rpg-far-probe-{os.getpid()}"], capture_output=True, text=True)
    if probe.returncode:
        return f"network namespaces cannot be made: {probe.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", f"rpg-far-probe-{os.getpid()}"], check=True)
    return ""


@dataclass(frozen=True)
class FarHost:
    """It shares this machine's file system."""

    namespace: str
    cable: str
    """This machine's end of it."""
    address: str
    """This machine's, as the host sees it."""
    port: int

    @property
    def prefix(self) -> tuple[str, ...]:
        """Prefix of a command that runs there."""
        return "ip", "netns", "exec", self.namespace

    def cut(self) -> None:
        """Nothing goes in or out any more."""
        _ip("link", "set", self.cable, "down")

    def mend(self) -> None:
        """The cable is whole again."""
        _ip("link", "set", self.cable, "up")


def address_here() -> str:
    """This machine's address, as the far host of this process sees it: a server has to know itself by that name."""
    number = os.getpid()
    return f"10.{150 + number // 250 % 50}.{number % 250}.1"


@contextlib.contextmanager
def far_host(port: int) -> Iterator[FarHost]:
    """A host that reaches a port of this machine's loopback by the same port of `FarHost.address`."""
    number = os.getpid()
    host = FarHost(f"rpgfar{number}", f"rpgfa{number}", address_here(), port)
    _ip("netns", "add", host.namespace)
    try:
        _ip("link", "add", host.cable, "type", "veth", "peer", "name", "eth0", "netns", host.namespace)
        _ip("addr", "add", f"{host.address}/24", "dev", host.cable)
        _ip("link", "set", host.cable, "up")
        for command in (
            ("addr", "add", f"{host.address.removesuffix('.1')}.2/24", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
            ("link", "set", "lo", "up"),
        ):
            _ip("-netns", host.namespace, *command)
        with _Forwarder((host.address, port), _Connection) as forwarder:
            threading.Thread(target=forwarder.serve_forever, daemon=True).start()
            try:
                yield host
            finally:
                forwarder.shutdown()
    finally:
        # The cable goes with it.
        _ip("netns", "del", host.namespace)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class _Forwarder(socketserver.ThreadingTCPServer):
    """Forwards connections to the same port of the loopback, at which only the Prefect API listens."""

    daemon_threads = True
    allow_reuse_address = True
    block_on_close = False


class _Connection(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", self.request.getsockname()[1])) as api,
        ):
            back = threading.Thread(target=_pump, args=(api, self.request), daemon=True)
            back.start()
            _pump(self.request, api)
            back.join()


def _pump(source: socket.socket, target: socket.socket) -> None:
    """Copies until the source ends, then ends the target's input."""
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)
