"""Checks which user listens at a port of this machine, before a password is sent there."""

import contextlib
import errno
import ipaddress
import os
import socket
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from specs.machine.files import user_name

TRUSTED_USERS = "RPG_TRUSTED_USERS"
"""Environment variable with comma-separated accounts of this machine to whose servers passwords may be sent."""
_PORTS = {"http": 80, "postgresql": 5432}
_LISTENS = "0A"
"""A connection's state in /proc/net/tcp."""
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def foreign_listener(url: str, trusted: Collection[int] | None = None) -> str:
    """Returns why a password must not be sent to the URL, if another user of this machine listens there. Empty if no
    other user listens, or if the listener is unknown. An https URL is always accepted, because its certificate proves
    the server.

    Args:
        trusted: ids of the users who may listen there; None: root, this process's user, RPG_TRUSTED_USERS, and for a
            database the account `postgres`.
    """
    parts = urlsplit(url)
    port = _port_of(parts)
    if not port or not parts.hostname or parts.scheme == "https":
        return ""
    allowed = _trusted_users(parts.scheme) if trusted is None else {str(user) for user in trusted}
    for user in _listening_users(parts.hostname, port):
        name = user_name(user)
        if not allowed & {name, str(user)}:
            said = f"port {port} of this machine has been taken by another user, {name}: no password is sent there"
            if trusted is not None:
                return said
            return f"{said}; open your server or ssh tunnel at a free port, or set {TRUSTED_USERS}={name} to trust it"
    return ""


def guard_connections(url: str) -> None:
    """Makes this process refuse connections to the URL while another user listens there.

    A tunnel may end, and its port be taken, after the first request.
    """
    if (port := _port_of(urlsplit(url))) and urlsplit(url).scheme != "https":
        if not _GUARDED:
            sys.addaudithook(_check_connection)
        _GUARDED.add(port)


_GUARDED: set[int] = set()
"""Guarded ports."""


def _check_connection(event: str, arguments: tuple[object, ...]) -> None:
    """Raises ConnectionRefusedError for a guarded connection, as if the server did not run."""
    if event == "socket.connect":
        address = arguments[1]
        if isinstance(address, tuple) and len(address) > 1 and address[1] in _GUARDED:
            host = f"[{address[0]}]" if ":" in str(address[0]) else address[0]
            if why := foreign_listener(f"http://{host}:{address[1]}"):
                raise ConnectionRefusedError(errno.ECONNREFUSED, why)


def _port_of(parts: SplitResult) -> int | None:
    with contextlib.suppress(ValueError):  # not a port
        return parts.port or _PORTS.get(parts.scheme.partition("+")[0])
    return None


def _trusted_users(scheme: str) -> set[str]:
    """Returns ids and names of the trusted users."""
    named = os.environ.get(TRUSTED_USERS, "").split(",")
    own = {"postgres"} if scheme.startswith("postgresql") else set[str]()
    return {"0", str(os.geteuid()), *(name.strip() for name in named)} | own


def _listening_users(host: str, port: int) -> set[int]:
    """Returns the users whose sockets may accept a connection to a port, if the host is this machine."""
    try:
        resolved = {entry[4][0] for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError):
        return set()
    addresses = [address for name in resolved if _is_here(address := _address(str(name)))]
    listening = [(local, user) for local, at, user in _listeners() if at == port] if addresses else []
    users: set[int] = set()
    for address in addresses:
        # A socket bound to exactly this address takes the connection before one bound to all addresses.
        exact = {user for local, user in listening if local == address}
        users |= exact or {
            user for local, user in listening if local.is_unspecified and local.version >= address.version
        }
    return users


def _address(text: str) -> _Address:
    """Returns the address that a connection to this address reaches."""
    address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped:
        address = address.ipv4_mapped
    if address.is_unspecified:  # the kernel uses loopback instead
        return ipaddress.ip_address("127.0.0.1" if address.version == 4 else "::1")
    return address


def _is_here(address: _Address) -> bool:
    """Returns whether a connection to the address ends at this machine. Only then can a socket be bound to it."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.bind((str(address), 0))
        return True
    return False


def _listeners() -> Iterator[tuple[_Address, int, int]]:
    """Yields address, port and user of each socket that listens."""
    for name in ("tcp", "tcp6"):
        lines: list[str] = []
        with contextlib.suppress(OSError):
            lines = Path("/proc/net", name).read_text(encoding="utf-8").splitlines()[1:]
        for _, local, _, state, _, _, _, user, *_ in map(str.split, lines):
            if state == _LISTENS:
                address, _, port = local.partition(":")
                words = (int(address[at : at + 8], 16) for at in range(0, len(address), 8))
                packed = b"".join(word.to_bytes(4, sys.byteorder) for word in words)
                at = ipaddress.ip_address(packed)
                yield (isinstance(at, ipaddress.IPv6Address) and at.ipv4_mapped) or at, int(port, 16), int(user)
