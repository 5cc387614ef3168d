"""This machine's addresses and ports, for processes that must find each other."""

import contextlib
import random
import socket

import psutil

_PORTS = range(20000, 32000)
"""These ports are below the range that Linux gives to outgoing connections. Such a connection could occupy a port
before the ranks start.
"""


def free_port(preferred: int | None = None) -> int:
    """Returns a TCP port of this machine without a listener: the preferred one if it is free."""
    first = () if preferred is None else (preferred,)
    for port in (*first, *random.SystemRandom().sample(_PORTS, 50), 0):
        with socket.socket() as listener, contextlib.suppress(OSError):
            if port == preferred:
                # As a server does: connections that have just ended do not block the port.
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("", port))
            return int(listener.getsockname()[1])
    raise OSError("no port of this machine is free")


def bound_port() -> tuple[socket.socket, socket.socket]:
    """Returns two sockets bound to one free port of loopback: one for a server that is to listen there,
    one to hold the port while it is open. No other user can bind it meanwhile, and clients that connect
    before the server listens are refused."""
    sockets = socket.socket(), socket.socket()
    port = free_port()
    for each in sockets:
        each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # shared with sockets of the same user only
        each.bind(("127.0.0.1", port))
    return sockets


def interface_of(address: str) -> str:
    """Returns the network interface that has an address; empty if none has."""
    for name, addresses in psutil.net_if_addrs().items():
        if address in [entry.address for entry in addresses]:
            return str(name)
    return ""


def address_of(interface: str) -> str:
    """Returns the first IPv4 address of an interface. Raises ValueError if there is no such interface
    or it has none."""
    interfaces = psutil.net_if_addrs()
    for entry in interfaces.get(interface, []):
        if entry.family == socket.AF_INET:
            return str(entry.address)
    raise ValueError(f"there is no interface {interface} with an IPv4 address here; there are: {', '.join(interfaces)}")


def source_address(peer: str) -> str:
    """Returns the address of this machine from which a peer is reached; no packet is sent. Raises
    OSError for a bad name."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, 9))
        return str(probe.getsockname()[0])
