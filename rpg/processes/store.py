"""A key-value store for the rendezvous of a launch's processes. One process serves it, the others query it over TCP.

PyTorch's own TCP store obeys any client and listens at every address of a machine. This store listens at one address,
and each message carries a proof that its sender has the launch's key:

    -> nonce of the client    <- nonce of the server
    -> length, proof, [method, arguments]    <- length, proof, answer    ... JSON, bytes as base64

A proof is the HMAC of a message, its number and its direction, under a key of the connection that is derived from both
nonces and the launch's key. Without the launch's key, messages cannot be sent, altered or replayed. They can be read.
"""

import base64
import hmac
import json
import os
import secrets
import socket
import struct
import threading
import time
from contextlib import suppress
from datetime import timedelta
from functools import cache
from typing import Any

import torch.distributed as dist
from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.distributed_c10d import Store

from specs.machine.launch import launch_key

PATIENCE = timedelta(minutes=30)
"""Longest time that a process waits for the others, which may be waiting for GPUs."""

_NONCE_BYTES = 32
_FRAME = struct.Struct(">I32s")
"""Frame of a message: its length and its authentication code."""
_LONGEST = 2**24
"""Largest number of bytes of a message."""
_LONGEST_UNPROVED = 2**16
"""Largest number of bytes of a connection's first message."""
_PROOF_SECONDS = 10.0
"""Time limit for a new connection's proof that it has the key."""
_MOST_UNPROVED = 128
"""Largest number of simultaneous connections without a proof. Further ones are closed; their clients retry."""
_RETRY_SECONDS = 0.05


class _StrangerError(Exception):
    """Error raised if the peer failed authentication because it does not have the launch's key."""


class _Line:
    """A connection on which both ends authenticate each message."""

    def __init__(self, connection: socket.socket, key: bytes, *, keeper: bool) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._connection = connection
        self._deadline: float | None = time.monotonic() + _PROOF_SECONDS
        own = secrets.token_bytes(_NONCE_BYTES)
        connection.sendall(own)
        other = self._take(_NONCE_BYTES)
        members, keepers = (other, own) if keeper else (own, other)
        self._key = hmac.digest(key, b"rpg store" + members + keepers, "sha256")
        self._says, self._hears = (b"keeper", b"member") if keeper else (b"member", b"keeper")
        self._said = self._heard = 0

    def send(self, value: Any) -> None:
        content = json.dumps(value).encode()
        self._connection.sendall(_FRAME.pack(len(content), self._proof(self._says, self._said, content)) + content)
        self._said += 1

    def receive(self) -> Any:
        """Returns the next message. Raises _StrangerError, or ConnectionError at the end of the connection."""
        length, proof = _FRAME.unpack(self._take(_FRAME.size))
        if length > (_LONGEST if self._heard else _LONGEST_UNPROVED):
            raise _StrangerError
        content = self._take(length)
        if not hmac.compare_digest(proof, self._proof(self._hears, self._heard, content)):
            raise _StrangerError
        self._heard += 1
        self._deadline = None
        return json.loads(content)

    def close(self) -> None:
        self._connection.close()

    def __del__(self) -> None:
        self.close()  # connection of a thread that has ended

    def _proof(self, direction: bytes, number: int, content: bytes) -> bytes:
        return hmac.digest(self._key, direction + number.to_bytes(8, "big") + content, "sha256")

    def _take(self, count: int) -> bytes:
        content = bytearray()
        while len(content) < count:
            # The limit holds however slowly an unproved peer sends.
            self._connection.settimeout(self._deadline and max(0.001, self._deadline - time.monotonic()))
            part = self._connection.recv(count - len(content))
            if not part:
                raise ConnectionError("the connection has ended")
            content += part
        return bytes(content)


def keep_store(address: tuple[str, int], key: bytes) -> Store:
    """Starts to serve the launch's store in this process, for as long as the process lives, and returns the store.

    Args:
        address: address of this machine and a free port.
        key: the launch's key.

    Raises:
        OSError: the address cannot be bound.
    """
    store = dist.HashStore()  # type: ignore[attr-defined]
    family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
    listener = socket.create_server(address, family=family, backlog=1024)
    threading.Thread(target=_serve, args=(listener, store, key), name="store", daemon=True).start()
    return store


def _serve(listener: socket.socket, store: Store, key: bytes) -> None:
    unproved = threading.Semaphore(_MOST_UNPROVED)
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:  # too many files are open, for now
            time.sleep(_RETRY_SECONDS)
            continue
        if not unproved.acquire(blocking=False):
            connection.close()
            continue
        threading.Thread(target=_answer, args=(connection, store, key, unproved), name="store", daemon=True).start()


def _answer(connection: socket.socket, store: Store, key: bytes, unproved: threading.Semaphore) -> None:
    """Answers one client's requests until it disconnects or fails authentication."""
    with connection, suppress(OSError, _StrangerError):
        try:
            line = _Line(connection, key, keeper=True)
            question = line.receive()
        finally:
            unproved.release()
        while True:
            line.send(_obeyed(store, *question))
            question = line.receive()


def _obeyed(store: Store, method: str, seconds: float, arguments: list[Any]) -> list[Any]:
    """Returns the answer to a request: its value, or why it failed."""
    try:
        return ["", _METHODS[method](store, timedelta(seconds=seconds), *arguments)]
    except DistStoreError as error:
        return ["late", str(error)]
    except Exception as error:
        return ["failed", f"{type(error).__name__}: {error}"]


def _text(content: bytes | str) -> str:
    return base64.b64encode(content.encode() if isinstance(content, str) else content).decode()


def _get(store: Store, patience: timedelta, key: str) -> str:
    store.wait([key], patience)
    return _text(store.get(key))


_METHODS: dict[str, Any] = {
    "get": _get,
    "set": lambda store, _, key, value: store.set(key, base64.b64decode(value)),
    "add": lambda store, _, key, amount: store.add(key, amount),
    "append": lambda store, _, key, value: store.append(key, base64.b64decode(value)),
    "check": lambda store, _, keys: store.check(keys),
    "wait": lambda store, patience, keys: store.wait(keys, patience),
    "compare_set": lambda store, _, key, expected, desired: _text(
        store.compare_set(key, base64.b64decode(expected), base64.b64decode(desired))
    ),
    "delete": lambda store, _, key: store.delete_key(key),
    "count": lambda store, _: store.num_keys(),
}
"""Requests of clients: name -> function of the store, the seconds that it may wait, and its arguments."""


class MembersStore(Store):
    """A client of the store that another process of the launch serves. Each thread uses its own connection."""

    def __init__(self, address: tuple[str, int], key: bytes, *, patience: timedelta) -> None:
        """Connects. Raises DistNetworkError if no server with the key answers in time.

        Args:
            address: address of the server.
            key: the launch's key.
            patience: time limit for reaching the server, and for each request without its own limit.
        """
        super().__init__()
        self._address, self._key, self._patience = address, key, patience
        self._lines = threading.local()
        self._ask("count", patience)

    def set(self, key: str, value: bytes | str) -> None:
        self._ask("set", None, key, _text(value))

    def get(self, key: str) -> bytes:
        return base64.b64decode(self._ask("get", None, key))

    def add(self, key: str, amount: int) -> int:
        return int(self._ask("add", None, key, amount))

    def append(self, key: str, value: bytes | str) -> None:
        self._ask("append", None, key, _text(value))

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask("check", None, list(keys)))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._ask("wait", timeout, list(keys))

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        return base64.b64decode(self._ask("compare_set", None, key, _text(expected), _text(desired)))

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete", None, key))

    def num_keys(self) -> int:
        return int(self._ask("count", None))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> Store:
        """Returns the client itself, because its threads do not share connections."""
        return self

    # Methods that PyTorch's own code calls, from C++.
    deleteKey = delete_key  # noqa: N815
    getNumKeys = num_keys  # noqa: N815

    def _ask(self, method: str, patience: timedelta | None, *arguments: Any) -> Any:
        patience = self._patience if patience is None else patience
        line = getattr(self._lines, "line", None)
        try:
            if line is None:
                line = self._lines.line = self._connected(patience)
            line.send([method, patience.total_seconds(), arguments])
            kind, value = line.receive()
        except (OSError, _StrangerError) as error:
            if line is not None:
                line.close()
            self._lines.line = None
            host, port = self._address
            raise DistNetworkError(f"the ranks' store at {host}:{port} has gone: {error}") from None
        if kind:
            raise DistStoreError(value) if kind == "late" else RuntimeError(value)
        return value

    def _connected(self, patience: timedelta) -> _Line:
        """Returns a connection to the server, which may start later than this process."""
        deadline = time.monotonic() + patience.total_seconds()
        while True:
            connection: socket.socket | None = None
            try:
                connection = socket.create_connection(self._address, timeout=_PROOF_SECONDS)
                line = _Line(connection, self._key, keeper=False)
                line.send(["check", 0.0, [[]]])
                line.receive()
            except (OSError, _StrangerError) as error:
                if connection:
                    connection.close()
                if time.monotonic() > deadline:
                    host, port = self._address
                    why = "has another launch's key" if isinstance(error, _StrangerError) else str(error)
                    raise DistNetworkError(f"the ranks' store at {host}:{port} cannot be reached: {why}") from None
                time.sleep(_RETRY_SECONDS)
            else:
                return line


@cache
def launch_store(*, keeps: bool) -> Store:
    """Returns the launch's store, at the address that the launcher has chosen.

    Args:
        keeps: whether this process serves the store for the others.
    """
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return keep_store(address, launch_key()) if keeps else MembersStore(address, launch_key(), patience=PATIENCE)
