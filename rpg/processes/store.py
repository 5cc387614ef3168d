"""Where the processes of a launch leave each other what they must know to meet: one keeps it, the others ask over TCP.

PyTorch's own store over TCP takes orders from whoever connects, and listens at every address of a machine. This one
listens at one address, and each message carries a proof that its sender has the launch's key:

    -> nonce of the member    <- nonce of the keeper
    -> length, proof, [method, arguments]    <- length, proof, answer    ... JSON, bytes as base64

A proof is the HMAC of a message, of its number and of its direction under a key of the connection, which follows from
both nonces and the launch's key. So nobody without it can ask, answer, alter or repeat. Reading along is not prevented.
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
"""How long a process waits for the others, which may wait for GPUs."""

_NONCE_BYTES = 32
_FRAME = struct.Struct(">I32s")
"""Length of a message, and its proof."""
_LONGEST = 2**24
"""Bytes of a message."""
_LONGEST_UNPROVED = 2**16
"""Bytes of the first message of a connection."""
_PROOF_SECONDS = 10.0
"""How long one who has connected may take to prove that it has the key."""
_MOST_UNPROVED = 128
"""So many connections at once may be about to prove it; who comes beyond is sent away and comes again."""
_RETRY_SECONDS = 0.05


class _StrangerError(Exception):
    """Who is at the other end does not have the launch's key."""


class _Line:
    """A connection on which both ends prove each message."""

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
        """Raises _StrangerError, and ConnectionError at the end of the connection."""
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
        self.close()  # of a thread that has ended

    def _proof(self, direction: bytes, number: int, content: bytes) -> bytes:
        return hmac.digest(self._key, direction + number.to_bytes(8, "big") + content, "sha256")

    def _take(self, count: int) -> bytes:
        content = bytearray()
        while len(content) < count:
            # However slowly one talks who has not proved that it has the key.
            self._connection.settimeout(self._deadline and max(0.001, self._deadline - time.monotonic()))
            part = self._connection.recv(count - len(content))
            if not part:
                raise ConnectionError("the connection has ended")
            content += part
        return bytes(content)


def keep_store(address: tuple[str, int], key: bytes) -> Store:
    """The store, in the process that keeps it for the launch; it is served as long as the process lives.

    Args:
        address: of this machine, and a free port of it.
        key: the launch's.
    Raises:
        OSError: it cannot listen there.
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
    """One member's questions, until it goes, or is none."""
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
    """The answer to a question: its value, or why there is none."""
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
"""What a member may ask for; each takes the store, how long it may wait, and the arguments."""


class MembersStore(Store):
    """The store that another process of the launch keeps. Each thread asks over a connection of its own."""

    def __init__(self, address: tuple[str, int], key: bytes, *, patience: timedelta) -> None:
        """Raises DistNetworkError where none answers there in time that has the key.

        Args:
            address: at which it is kept.
            key: the launch's.
            patience: for the keeper, and for each question that has none of its own.
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
        """Itself: threads share no connection."""
        return self

    # As PyTorch's own code calls them, from C++.
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
        """A connection to the keeper, who may begin later than this process."""
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
    """The launch's store, at the address that the launcher has chosen.

    Args:
        keeps: whether this process keeps it for the others.
    """
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return keep_store(address, launch_key()) if keeps else MembersStore(address, launch_key(), patience=PATIENCE)
