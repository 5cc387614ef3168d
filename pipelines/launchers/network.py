"""This machine's addresses and ports, for processes that have to find each other."""

import contextlib
import random
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

_PORTS = range(20000, 32000)
"""Below those that Linux gives to outgoing connections: one of these may take a port before the ranks have started."""


def free_port(preferred: int | None = None) -> int:
    """A TCP port of this machine that nobody listens at now: the preferred one where that is free."""
    first = () if preferred is None else (preferred,)
    for port in (*first, *random.SystemRandom().sample(_PORTS, 50), 0):
        with socket.socket() as listener, contextlib.suppress(OSError):
            if port == preferred:
                # As a server does: connections that have just ended keep it from nobody.
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("", port))
            return int(listener.getsockname()[1])
    raise OSError("no port of this machine is free")


def bound_port() -> tuple[socket.socket, socket.socket]:
    """A free port of loopback, twice: for a server that is to listen there, and to hold it for as long as the second is
    open. Nobody who is another user can take it meanwhile, and who connects before the server listens is refused.
    """
    sockets = socket.socket(), socket.socket()
    port = free_port()
    for each in sockets:
        each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # of one user's sockets alone
        each.bind(("127.0.0.1", port))
    return sockets


def is_anothers(port: int, owner: int) -> bool:
    """Whether another user than `owner` listens where a connection to a port of loopback arrives; not known: no."""
    return any(port == listening and user != owner for listening, user in _loopback_listeners())


_LISTENS = "0A"
"""A connection's state in /proc/net/tcp."""


def _loopback_listeners() -> Iterator[tuple[int, int]]:
    """The port and the user of each socket that listens on 127.0.0.1, alone or among all addresses."""
    here = f"{int.from_bytes(socket.inet_aton('127.0.0.1'), sys.byteorder):08X}"
    mapped = f"{0:016X}{int.from_bytes(bytes([0, 0, 255, 255]), sys.byteorder):08X}{here}"
    for name in ("tcp", "tcp6"):
        lines: list[str] = []
        with contextlib.suppress(OSError):
            lines = Path("/proc/net", name).read_text(encoding="utf-8").splitlines()[1:]
        for _, local, _, state, _, _, _, user, *_ in map(str.split, lines):
            address, _, port = local.partition(":")
            if state == _LISTENS and (address in (here, mapped) or not address.strip("0")):
                yield int(port, 16), int(user)


def interface_of(address: str) -> str:
    """The network interface that has an address; empty where none has."""
    for name, addresses in psutil.net_if_addrs().items():
        if address in [entry.address for entry in addresses]:
            return str(name)
    return ""


def address_of(interface: str) -> str:
    """The first IPv4 address of an interface. Raises ValueError where there is no such interface or it has none."""
    interfaces = psutil.net_if_addrs()
    for entry in interfaces.get(interface, []):
        if entry.family == socket.AF_INET:
            return str(entry.address)
    raise ValueError(f"there is no interface {interface} with an IPv4 address here; there are: {', '.join(interfaces)}")


def source_address(peer: str) -> str:
    """The address of this machine from which a peer is reached; no packet is sent. Raises OSError for a bad name."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, 9))
        return str(probe.getsockname()[0])
