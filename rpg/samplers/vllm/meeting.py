"""Connection between an engine on another machine and the rank that holds it, with authentication by the launch's key.

The engine listens at a port that its machine chooses and publishes its address in the launch's store; the rank
connects. Both prove that they have the launch's key, with the challenge of `multiprocessing.connection`. Then they send
plain values, which run no code when they are read. The connection is not encrypted, like those between ranks.
"""

import json
import os
import socket
import struct
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import TYPE_CHECKING, Any

from rpg.messages import decoded, encoded

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

MEETING_SECONDS = 1800.0
"""Seconds that a rank and its engine wait for each other, since either may wait for GPUs. Ranks wait for each other
equally long."""
_PROOF_SECONDS = 10
"""Seconds in which a peer that has connected to an engine must prove that it has the key."""
_TURN_SECONDS = 300
"""Seconds that a rank waits for the engine's challenge. Other peers may have connected before it."""
_KEEPALIVE = {socket.TCP_KEEPIDLE: 15, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 4}
"""Keepalive settings that detect an unreachable machine after 35 s. By then the launcher may have ended the launch."""


class MeetingError(Exception):
    """Error raised if the engine did not connect, or if its peer failed authentication."""


class PlainConnection:
    """A connection to another machine. `rpg.messages` converts its values to bytes."""

    def __init__(self, connection: "Connection[Any, Any]") -> None:
        self._connection = connection
        self.fileno, self.poll, self.close = connection.fileno, connection.poll, connection.close

    def send(self, value: Any) -> None:
        """Sends a value. Raises OSError if the connection has ended."""
        self._connection.send_bytes(encoded(value))

    def recv(self) -> Any:
        """Returns the next value. Raises EOFError or OSError if the connection has ended."""
        try:
            return decoded(self._connection.recv_bytes())
        except ValueError as error:  # from a peer that is not, or no longer, one of our processes
            raise OSError(str(error)) from None


@dataclass(frozen=True, slots=True)
class Meeting:
    """A rank's end of the connection to an engine."""

    connection: PlainConnection
    host: str
    """Name of the engine's machine."""
    own_address: str
    """Address of this machine from which the engine was reached."""


def await_rank(number: int, address: str, key: bytes, store: "Store") -> PlainConnection:
    """Waits for the rank that holds this engine and returns the connection to it.

    Args:
        number: number of the engine, from 0.
        address: IPv4 address of this machine, at which the engine listens.
        key: the launch's key.
        store: the launch's store.
    """
    with socket.create_server((address, 0)) as listener:
        store.set(_place(number), json.dumps([address, listener.getsockname()[1], socket.gethostname()]))
        while True:
            accepted, _ = listener.accept()
            connection = _prepared(accepted, _PROOF_SECONDS)
            try:
                deliver_challenge(connection, key)
                answer_challenge(connection, key)
            except (AuthenticationError, EOFError, OSError):
                connection.close()  # an unknown peer; the rank has not connected yet
            else:
                _limit_silence(connection, 0)
                return PlainConnection(connection)


def meet_engine(number: int, key: bytes, store: "Store", *, seconds: float = MEETING_SECONDS) -> Meeting:
    """Waits for an engine and connects to it.

    Args:
        number: number of the engine, from 0.
        key: the launch's key.
        store: the launch's store.
        seconds: longest time to wait for the engine.
    Raises:
        MeetingError: the engine did not start, cannot be reached, or does not have the key.
    """
    from torch.distributed import DistStoreError

    try:
        store.wait([_place(number)], timedelta(seconds=seconds))
    except DistStoreError:
        raise MeetingError(f"engine {number} has not reported its address within {seconds:g} s") from None
    address, port, host = json.loads(store.get(_place(number)))
    try:
        reached = socket.create_connection((address, port))
        own_address = reached.getsockname()[0]
        connection = _prepared(reached, _TURN_SECONDS)
        answer_challenge(connection, key)
        deliver_challenge(connection, key)
    except (AuthenticationError, AssertionError):  # AssertionError if the peer's message is not a challenge
        raise MeetingError(f"the process at {address}:{port} for engine {number} has another launch's key") from None
    except (EOFError, OSError) as error:
        raise MeetingError(f"engine {number} on {host} cannot be reached at {address}:{port}: {error}") from None
    _limit_silence(connection, 0)
    return Meeting(PlainConnection(connection), host, own_address)


def _place(number: int) -> str:
    """Returns the key in the store under which an engine publishes its address."""
    return f"rpg/engine/{number}"


def _prepared(reached: socket.socket, patience: int) -> "Connection[Any, Any]":
    """Returns a connection that sends messages at once, and detects that the other machine is unreachable.

    Args:
        reached: the connected socket.
        patience: seconds after which a read without data fails, until the limit is changed.
    """
    reached.setblocking(True)
    reached.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    reached.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        reached.setsockopt(socket.IPPROTO_TCP, option, value)
    connection: Connection[Any, Any] = Connection(reached.detach())
    _limit_silence(connection, patience)
    return connection


def _limit_silence(connection: "Connection[Any, Any]", seconds: int) -> None:
    """Makes a read fail after this many seconds without data; 0 disables the limit."""
    with socket.socket(fileno=os.dup(connection.fileno())) as shared:
        shared.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))
