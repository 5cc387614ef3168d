"""How an engine on another machine and the rank that holds it find each other, and know each other for the launch's.

The engine listens at a port of its machine's choice and says where in the store that rank 0 serves at MASTER_ADDR and
MASTER_PORT; the rank connects. Before either reads an object, which may run any code, both prove that they have the
launch's key, as `multiprocessing.connection` does. What they say after that is not encrypted, as between ranks.
"""

import hmac
import json
import os
import socket
import struct
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

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


@dataclass(frozen=True, slots=True)
class Meeting:
    """A rank's end of the connection to an engine."""

    connection: "Connection[Any, Any]"
    host: str
    """Name of the engine's machine."""
    own_address: str
    """The address of this machine from which the engine was reached."""


def await_rank(number: int, address: str, key: bytes, store: tuple[str, int]) -> "Connection[Any, Any]":
    """The connection to the rank that holds this engine.

    Args:
        number: of the engine, from 0.
        address: of this machine, IPv4; the engine listens there.
        key: the launch's.
        store: address and port at which rank 0 serves it.
    """
    with socket.create_server((address, 0)) as listener:
        ranks_store = _store(*store, serves=False)
        place = json.dumps([address, listener.getsockname()[1], socket.gethostname()])
        ranks_store.set(_place(number), json.dumps([_proof(number, place, key), place]))
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
                return connection


def meet_engine(number: int, key: bytes, *, serves: bool, seconds: float = MEETING_SECONDS) -> Meeting:
    """Waits for an engine and connects to it.

    Args:
        number: of the engine, from 0.
        key: the launch's.
        serves: whether this process serves the store; else rank 0's does already.
        seconds: to wait for the engine.
    Raises:
        MeetingError: it has not come, cannot be reached, or does not have the key.
    """
    from torch.distributed import DistStoreError

    store = _store(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), serves=serves)
    try:
        store.wait([_place(number)], timedelta(seconds=seconds))
    except DistStoreError:
        raise MeetingError(f"engine {number} has not said within {seconds:g} s where it is") from None
    proof, place = json.loads(store.get(_place(number)))
    if not hmac.compare_digest(proof, _proof(number, place, key)):
        raise MeetingError(f"who says in the store where engine {number} is has another launch's key")
    address, port, host = json.loads(place)
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
    return Meeting(connection, host, own_address)


def _store(host: str, port: int, *, serves: bool) -> "TCPStore":
    """The ranks' store. Where there are several ranks, they have met in it before."""
    from torch._C._distributed_c10d import TCPStore

    patience = timedelta(seconds=MEETING_SECONDS)
    return TCPStore(host, port, is_master=serves, wait_for_workers=False, timeout=patience)


def _place(number: int) -> str:
    """The key in the store under which an engine says where it is."""
    return f"rpg/engine/{number}"


def _proof(number: int, place: str, key: bytes) -> str:
    """Shows that an engine with the key has left its place. A rank that another sent to a place of his would prove to
    the engine, through him, that he has the key."""
    return hmac.new(key, f"{number} {place}".encode(), "sha256").hexdigest()


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
