"""How an engine on another machine and the rank that holds it find each other, and know each other for the launch's.

The engine listens at a port of its machine's choice and says where in the launch's store; the rank connects. Both prove
that they have the launch's key, as `multiprocessing.connection` does. What they say after that is plain values, which
run no code where they are read; it is not encrypted, as between ranks.
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
"""How long a rank and its engine wait for each other, either of which may wait for GPUs; ranks among them wait as
long."""
_PROOF_SECONDS = 10
"""How long one who has connected to an engine may take to prove that it has the key."""
_TURN_SECONDS = 300
"""How long a rank waits until the engine asks it for that: others may have connected before."""
_KEEPALIVE = {socket.TCP_KEEPIDLE: 15, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 4}
"""A machine that was cut off is noticed after 35 s, in which the launcher may have ended the launch."""


class MeetingError(Exception):
    """The engine has not come, or who is there in its place does not have the key."""


class PlainConnection:
    """A connection to another machine over which values go as `rpg.messages` makes bytes of them."""

    def __init__(self, connection: "Connection[Any, Any]") -> None:
        self._connection = connection
        self.fileno, self.poll, self.close = connection.fileno, connection.poll, connection.close

    def send(self, value: Any) -> None:
        """Raises OSError where the connection has ended."""
        self._connection.send_bytes(encoded(value))

    def recv(self) -> Any:
        """Raises EOFError or OSError where the connection has ended."""
        try:
            return decoded(self._connection.recv_bytes())
        except ValueError as error:  # of a peer that is none of ours, or no more
            raise OSError(str(error)) from None


@dataclass(frozen=True, slots=True)
class Meeting:
    """A rank's end of the connection to an engine."""

    connection: PlainConnection
    host: str
    """Name of the engine's machine."""
    own_address: str
    """The address of this machine from which the engine was reached."""


def await_rank(number: int, address: str, key: bytes, store: "Store") -> PlainConnection:
    """The connection to the rank that holds this engine.

    Args:
        number: of the engine, from 0.
        address: of this machine, IPv4; the engine listens there.
        key: the launch's.
        store: the launch's.
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
                connection.close()  # of anyone; the rank is yet to come
            else:
                _limit_silence(connection, 0)
                return PlainConnection(connection)


def meet_engine(number: int, key: bytes, store: "Store", *, seconds: float = MEETING_SECONDS) -> Meeting:
    """Waits for an engine and connects to it.

    Args:
        number: of the engine, from 0.
        key: the launch's.
        store: the launch's.
        seconds: to wait for the engine.
    Raises:
        MeetingError: it has not come, cannot be reached, or does not have the key.
    """
    from torch.distributed import DistStoreError

    try:
        store.wait([_place(number)], timedelta(seconds=seconds))
    except DistStoreError:
        raise MeetingError(f"engine {number} has not said within {seconds:g} s where it is") from None
    address, port, host = json.loads(store.get(_place(number)))
    try:
        reached = socket.create_connection((address, port))
        own_address = reached.getsockname()[0]
        connection = _prepared(reached, _TURN_SECONDS)
        answer_challenge(connection, key)
        deliver_challenge(connection, key)
    except (AuthenticationError, AssertionError):  # the latter of what is no challenge at all
        raise MeetingError(f"who listens at {address}:{port} for engine {number} has another launch's key") from None
    except (EOFError, OSError) as error:
        raise MeetingError(f"engine {number} on {host} cannot be reached at {address}:{port}: {error}") from None
    _limit_silence(connection, 0)
    return Meeting(PlainConnection(connection), host, own_address)


def _place(number: int) -> str:
    """The key in the store under which an engine says where it is."""
    return f"rpg/engine/{number}"


def _prepared(reached: socket.socket, patience: int) -> "Connection[Any, Any]":
    """A connection whose messages go out at once, and which notices that the other machine is gone.

    Args:
        reached: which it is made of.
        patience: seconds after which a read fails that gets nothing, for now.
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
    """Has a read fail that gets nothing for so long; 0: never."""
    with socket.socket(fileno=os.dup(connection.fileno())) as shared:
        shared.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))
