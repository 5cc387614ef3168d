"""A scoring model in its own process: a judge that writes, or a classifier.

The process is `rpg.scoring_model`. It starts with the first request and ends with this process, even if this one dies.
"""

import itertools
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from rpg.rewards.judges.endpoint import Drawn, RequestRefusedError
from rpg.rewards.judges.prompts import Message
from rpg.rewards.judges.verdicts import Reply
from specs.machine.gpu_slots import gpu_at, gpus_of_run
from specs.machine.standstill import show_work

_CLOSE_SECONDS = 30.0
_POLL_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """Settings with which the process loads its model."""

    kind: Literal["judge", "classifier"]
    directory: Path
    device: str
    """cpu, or cuda for the GPU of the rank that asks."""
    batch_size: int
    """Largest number of requests that are computed together."""
    max_length: int
    """Largest number of tokens of a request and its reply. 0 means the model's context."""
    engine: Literal["transformers", "vllm"] = "transformers"
    memory_fraction: float = 0.0
    """Share of the GPU's memory that vLLM takes."""
    prefix: str = ""
    """Text that a judge's reply begins with; the model continues it."""
    label: int = 0
    """Index of the label whose probability is a classifier's score, if it has several."""


class ScoringModelError(RuntimeError):
    """Error raised if the process of a scoring model failed or has ended."""


class ScoringModel:
    """Client of the scoring process. Safe to call from any thread."""

    def __init__(self, settings: ModelSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._waiting: dict[int, Future[dict[str, Any]]] = {}
        self._connection: Connection[Any, Any] | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._closing = False

    def ask(self, messages: Sequence[Message], drawn: Drawn) -> Reply:
        """Returns a judge's reply. Raises RequestRefusedError if the request is too long."""
        found = self._call({"messages": list(messages), **asdict(drawn)})
        return Reply(found["text"], found["prompt_tokens"], found["tokens"])

    def classify(self, messages: Sequence[Message]) -> float:
        """Returns a classifier's value for a conversation. Raises RequestRefusedError if it is too long."""
        return float(self._call({"messages": list(messages)})["value"])

    def close(self) -> None:
        """Ends the process. Waiting requests get no reply."""
        with self._lock:
            self._closing = True
            connection, child, thread = self._connection, self._child, self._thread
        if child is not None:
            child.kill()  # it has no state to save
            child.wait(_CLOSE_SECONDS)
        if thread is not None:
            thread.join(_CLOSE_SECONDS)  # the thread ends when the connection does
        if connection is not None:
            connection.close()

    def _call(self, request: dict[str, Any]) -> dict[str, Any]:
        found: Future[dict[str, Any]] = Future()
        with self._lock:
            if self._closing:
                raise ScoringModelError("the scoring model is closed")
            number = next(self._numbers)
            self._waiting[number] = found
            if self._thread is None:
                # A separate thread: the process dies with the thread that started it.
                started = threading.Event()
                self._thread = threading.Thread(target=self._serve, args=[started], name="scoring model", daemon=True)
                self._thread.start()
                started.wait()
            connection = self._connection
        content = json.dumps({"number": number, **request}).encode()
        try:
            if connection is not None:
                with self._lock:
                    connection.send_bytes(content)
        except OSError:
            pass  # it has ended; the thread reports that
        reply = found.result()
        if refused := reply.get("refused"):
            raise RequestRefusedError(refused)
        return reply

    def _serve(self, started: threading.Event) -> None:
        """Starts the process, and passes on replies until it ends. Runs in the client's thread."""
        try:
            self._start()
            connection = self._connection
            assert connection is not None
            started.set()
            while True:
                while not connection.poll(_POLL_SECONDS):
                    pass
                reply = json.loads(connection.recv_bytes())
                show_work()
                self._waiting.pop(reply["number"]).set_result(reply)
        except BaseException as error:
            started.set()
            self._give_up(error)

    def _give_up(self, error: BaseException) -> None:
        with self._lock:
            waiting, self._waiting = list(self._waiting.values()), {}
            connection, child = self._connection, self._child
            self._thread = self._connection = self._child = None
            closing = self._closing
        code = None
        if child is not None and not closing:
            if connection is not None:
                connection.close()
            try:
                code = child.wait(_CLOSE_SECONDS)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        if isinstance(error, EOFError | OSError):
            how = "is closed" if closing else f"ended with exit code {code}; its output is above"
            error = ScoringModelError(f"the process of the scoring model {how}")
        for each in waiting:
            each.set_exception(error)

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        visible = {}
        if self._settings.device == "cuda":
            from rpg.processes import ranks  # imported here: checking a spec imports this module and needs no torch

            visible = {"CUDA_VISIBLE_DEVICES": gpu_at(gpus_of_run(), ranks.local_rank())}
        job = json.dumps({**asdict(self._settings), "directory": str(self._settings.directory)})
        with theirs:
            self._child = subprocess.Popen(
                [sys.executable, "-P", "-m", "rpg.scoring_model", str(theirs.fileno()), str(os.getpid()), job],
                env={**os.environ, **visible},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        self._connection = Connection(ours.detach())
