"""This machine's addresses and ports, for processes that have to find each other."""

import contextlib
import random
import socket

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
