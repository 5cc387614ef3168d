"""An OpenAI-compatible endpoint on loopback, which programs call as they would call a model provider.

One server serves the process. Each running response has its own key, which identifies its requests. A request waits in
the response's `Line` until a reader answers it: nothing is sampled here.
"""

import asyncio
import json
import os
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from rpg.rollouters.chat import ChatError, Request, read_request
from specs.documents.strict_json import parse_json

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request as HttpRequest
    from starlette.responses import Response

MODEL = "policy"
"""Name of the only model. Requests with another name also go to the policy."""
_DAY = 24 * 3600
"""Seconds that a connection may be idle. Clients must close connections first: if the server did, a request might be on
its way."""
_LONGEST_REQUEST = 8 << 20
"""Largest number of bytes of a request. It is parsed in the training process."""
_LONGEST_DIRECTORY = 80
"""Longest directory name, in bytes, that leaves room for a unix socket's name within the limit of 107."""


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer of the policy."""

    number: int
    """Number of the request within the response, from 0."""
    message: dict[str, Any]
    """The message of role assistant, in the form of `rpg.rollouters.chat`."""
    cut: bool
    """Whether the answer reached its token limit."""
    num_given: int
    """Number of tokens in the context of the answer."""
    num_sampled: int


class Asked:
    """A request that is waiting for its answer."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.answered: Future[Reply] = Future()

    def answer(self, reply: Reply) -> None:
        """Sends the answer."""
        self.answered.set_result(reply)

    def refuse(self, why: str) -> None:
        """Answers with an error that no client retries."""
        self.answered.set_exception(ChatError(why))


@dataclass(frozen=True, slots=True)
class Ended:
    """End of a program."""

    answer: str | None = None
    """Value that the program returned, or text that it wrote; None without either."""
    error: str = ""
    """Error of the program; empty if it did not fail."""


class Line:
    """Queue for one response: the requests of its program, in order of arrival, and the program's end."""

    def __init__(self) -> None:
        self.key = f"rpg-{secrets.token_urlsafe(24)}"
        self._arrived: SimpleQueue[Asked | Ended] = SimpleQueue()
        self._lock = threading.Lock()
        self._closed = ""
        self._waiting: list[Asked] = []

    def put(self, asked: Asked) -> None:
        """Adds a request, or refuses it if the response has ended."""
        with self._lock:
            if self._closed:
                asked.refuse(self._closed)
                return
            self._waiting.append(asked)
            self._arrived.put(asked)

    def finish(self, ended: Ended) -> None:
        """Records that the program has ended."""
        self._arrived.put(ended)

    def next(self, seconds: float) -> Asked | Ended:
        """Returns the next request or the program's end. If nothing arrives within this many seconds, returns an
        end."""
        try:
            return self._arrived.get(timeout=seconds)
        except Empty:
            return Ended(error=f"it neither sent a request nor ended within {seconds:g} s")

    def close(self, why: str) -> None:
        """Refuses waiting and later requests. The reader of the queue gets the program's end."""
        with self._lock:
            self._closed = self._closed or why
            waiting, self._waiting = self._waiting, []
        for asked in waiting:
            if not asked.answered.done():
                asked.refuse(why)
        self._arrived.put(Ended(error=why))


class Endpoint:
    """The server, in its own thread."""

    def __init__(self) -> None:
        self._lines: dict[str, Line] = {}
        listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.port = int(listening.getsockname()[1])
        self.base_url = f"http://127.0.0.1:{self.port}/v1"
        """Base URL of the endpoint, in the form that clients expect."""
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self._makes_socket = threading.Lock()
        self._serve(listening)

    def unix_socket(self) -> Path:
        """Returns the path of a unix socket to the same endpoint, for clients without access to this machine's
        loopback. The socket is opened at the first call."""
        with self._makes_socket:
            if self._directory:
                return Path(self._directory.name, "endpoint")
            where = "/tmp" if len(os.fsencode(tempfile.gettempdir())) > _LONGEST_DIRECTORY else None
            directory = tempfile.TemporaryDirectory(prefix="rpg-", dir=where)
            path, listening = Path(directory.name, "endpoint"), socket.socket(socket.AF_UNIX)
            listening.bind(str(path))
            path.chmod(0o666)  # sandboxed processes run as another user; the keys keep others out
            listening.listen(1024)
            self._serve(listening)
            self._directory = directory
            return path

    def _serve(self, listening: socket.socket) -> None:
        import uvicorn

        settings = uvicorn.Config(
            self._app(), log_config=None, access_log=False, lifespan="off", ws="none", timeout_keep_alive=_DAY
        )
        server = uvicorn.Server(settings)
        threading.Thread(
            target=server.run, kwargs={"sockets": [listening]}, name="endpoint of agents", daemon=True
        ).start()

    def open(self) -> Line:
        """Opens a line for a new response."""
        line = Line()
        self._lines[line.key] = line
        return line

    def close(self, line: Line, why: str) -> None:
        """Ends a line, whose key becomes invalid."""
        self._lines.pop(line.key, None)
        line.close(why)

    def _app(self) -> "Starlette":
        from starlette.applications import Starlette
        from starlette.routing import Route

        return Starlette(
            routes=[
                Route("/v1/models", self._models, methods=["GET"]),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
            ]
        )

    async def _models(self, request: "HttpRequest") -> "Response":
        from starlette.responses import JSONResponse

        if self._line_of(request) is None:
            return _no_key()
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "rpg"}
        return JSONResponse({"object": "list", "data": [model]})

    async def _chat(self, request: "HttpRequest") -> "Response":
        from starlette.responses import JSONResponse, StreamingResponse

        line = self._line_of(request)
        if line is None:
            return _no_key()
        try:
            body = parse_json(await _bounded(request))
            asked = Asked(read_request(body))
            line.put(asked)
            reply = await asyncio.wrap_future(asked.answered)
        except (ChatError, ValueError, RecursionError) as error:
            return _error(400, str(error), "invalid_request_error")
        if asked.request.stream:
            return StreamingResponse(_chunks(body, reply), media_type="text/event-stream")
        return JSONResponse(_completion(body, reply))

    def _line_of(self, request: "HttpRequest") -> Line | None:
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        return self._lines.get(key.strip()) if scheme.lower() == "bearer" else None


async def _bounded(request: "HttpRequest") -> bytes:
    """Returns the body of a request. Raises ChatError if it is too long."""
    content, length = bytearray(), 0
    async for part in request.stream():  # to its end: a client that still writes would not read the answer
        length += len(part)
        content += part if length <= _LONGEST_REQUEST else b""
    if length > _LONGEST_REQUEST:
        raise ChatError(f"a request has at most {_LONGEST_REQUEST >> 20} MiB")
    return bytes(content)


_begins = threading.Lock()


def endpoint() -> Endpoint:
    """Returns the endpoint of this process, which is started at the first call."""
    with _begins:
        return _endpoint()


@cache
def _endpoint() -> Endpoint:
    return Endpoint()


def _completion(body: Mapping[str, Any], reply: Reply) -> dict[str, Any]:
    choice = {"index": 0, "message": _message(reply), "logprobs": None, "finish_reason": _finish_reason(reply)}
    return {**_head(body, reply, "chat.completion"), "choices": [choice], "usage": _usage(reply)}


async def _chunks(body: Mapping[str, Any], reply: Reply) -> AsyncIterator[str]:
    """Yields the answer as a stream. The answer is complete before the first piece is sent."""
    message, head = _message(reply), _head(body, reply, "chat.completion.chunk")
    calls = [{"index": place, **call} for place, call in enumerate(message.pop("tool_calls", ()))]
    deltas: list[tuple[dict[str, Any], str | None]] = [(message, None)]
    if calls:
        deltas.append(({"tool_calls": calls}, None))
    for delta, reason in [*deltas, ({}, _finish_reason(reply))]:
        yield _event({**head, "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}]})
    if (body.get("stream_options") or {}).get("include_usage"):
        yield _event({**head, "choices": [], "usage": _usage(reply)})
    yield "data: [DONE]\n\n"


def _event(content: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


def _head(body: Mapping[str, Any], reply: Reply, kind: str) -> dict[str, Any]:
    made = {"id": f"chatcmpl-{reply.number}", "object": kind, "created": int(time.time())}
    return {**made, "model": str(body.get("model", MODEL))}


def _message(reply: Reply) -> dict[str, Any]:
    """Returns the message in the form that clients expect, with arguments of calls as JSON texts."""
    message = {**reply.message, "content": reply.message["content"] or None}
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
            for call in calls
        ]
    else:
        message["content"] = reply.message["content"]
    return message


def _finish_reason(reply: Reply) -> str:
    if reply.cut:
        return "length"
    return "tool_calls" if reply.message.get("tool_calls") else "stop"


def _usage(reply: Reply) -> dict[str, int]:
    given, sampled = reply.num_given, reply.num_sampled
    return {"prompt_tokens": given, "completion_tokens": sampled, "total_tokens": given + sampled}


def _no_key() -> "Response":
    return _error(401, "this key belongs to no response in progress", "authentication_error")


def _error(status: int, message: str, kind: str) -> "Response":
    from starlette.responses import JSONResponse

    return JSONResponse({"error": {"message": message, "type": kind, "code": None, "param": None}}, status)
