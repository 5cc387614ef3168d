"""The web application: authentication, and the response for each address."""

import contextlib
import hmac
import json
import os
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any
from urllib.parse import urlencode

import httpx
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import (
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pipelines.home.home import Home
from pipelines.prefect.server.api import server_of
from pipelines.prefect.server.credentials import Accepts, header_with, shown_in
from pipelines.prefect.server.proxy import objection
from pipelines.prefect.server.waiting import waiting_runs
from pipelines.remote.record_files import NotRecordedError, open_recorded, read_listings
from pipelines.remote.sources import READY
from pipelines.web.live import Live, Question
from pipelines.web.pages import KINDS, Pages, UnknownPageError
from pipelines.web.tokens import Wanted, response_page, responses_page
from specs.errors import RpgError

_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; frame-ancestors 'none'; "
    "base-uri 'none'; form-action 'self'"
)
_HEADERS = {
    # The pages contain their style and script, and fetch nothing; but the live page fetches its rows here.
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "private, no-cache",
}
_OF_LIVE_PAGE = {"content-security-policy": f"{_POLICY}; connect-src 'self'"}
_TYPES = {".json": "application/json", ".log": "text/plain; charset=utf-8"}
_MOST_KNOWN = 64 * 2**20
"""Largest size in bytes of a request for changes. A mirror lists its units, with about 80 bytes per run."""
_CHUNK = 2**18
_SERVER_SECONDS = 20.0
"""Seconds to wait for the Prefect server."""


class TooLongError(Exception):
    """Error for a request with a body above the largest size."""


def make_app(home: Home, accepts: Accepts, *, token: str = "", origins: Collection[str] | None = None) -> Starlette:
    """Returns the application for one home.

    Args:
        accepts: decides which passwords are valid; every request must carry one (HTTP basic authentication).
        token: also valid, as `?token=` of an address, which then becomes a cookie. Empty if there is no token.
        origins: origins of its own pages. A page from another origin, and one whose name was made to point to this
            address, are rejected, see `objection`. None: requests may use any name.
    """
    pages, live = Pages(home), Live(home)

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        yield
        pages.close()

    compressed = [Middleware(GZipMiddleware, compresslevel=5)]
    routes = [
        Route("/", partial(_index, pages), middleware=compressed),
        *(Route(f"/{kind}/{{name}}", partial(_report, pages, kind), middleware=compressed) for kind in KINDS),
        Route("/runs/{name}/tokens", partial(_responses, home), middleware=compressed),
        Route("/runs/{name}/tokens/{step:int}/{rollout:int}", partial(_response, home), middleware=compressed),
        Route("/live", partial(_live, live), middleware=compressed),
        Route("/live", partial(_rows, live), methods=["POST"], middleware=compressed),
        Route("/waiting", partial(_waiting, home), middleware=compressed),
        Route("/record", partial(_changes, home), methods=["POST"], middleware=compressed),
        Route("/record/{path:path}", partial(_file, home)),
        Route("/ready", _ready),
    ]
    middleware = [Middleware(_Guard, accepts=accepts, token=token, origins=origins)]
    return Starlette(routes=routes, middleware=middleware, lifespan=lifespan)


class _Guard:
    """Middleware that requires the password, except for `/ready`, and adds the headers that confine a page."""

    def __init__(self, app: ASGIApp, accepts: Accepts, token: str, origins: Collection[str] | None) -> None:
        self._app = app
        self._accepts = accepts
        self._token = token
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        headers = _HEADERS | (_OF_LIVE_PAGE if scope["path"] == "/live" else {})

        async def send_confined(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = [(name.encode(), value.encode()) for name, value in headers.items()]
                message["headers"] = [*message.get("headers", ()), *added]
            await send(message)

        answer = self._turned_away(Request(scope)) or self._app
        await answer(scope, receive, send_confined)

    def _turned_away(self, request: Request) -> Response | None:
        """Returns the response to a rejected request. None if it is accepted."""
        asked = request.headers.get("host", ""), request.headers.get("origin", "")
        if self._origins is not None and (reason := objection(*asked, self._origins)):
            return PlainTextResponse(reason, 403)
        if request.url.path == "/ready" or self._accepts(shown_in(request.headers.get("authorization", ""))):
            return None
        words = "not authenticated"
        if self._token:
            # A browser sends a host's cookies to each of its ports: the name distinguishes several servers.
            cookie = f"rpg-{request.url.port or 80}"
            if self._is_token(request.cookies.get(cookie, "")):
                return None
            if self._is_token(request.query_params.get("token", "")):
                answer = RedirectResponse(request.url.remove_query_params("token"), 303)
                answer.set_cookie(cookie, self._token, httponly=True, samesite="lax")
                return answer
            words = "open the link that `rpg report --serve` has printed, or log in with a password of the home"
        return PlainTextResponse(f"{words}\n", 401, {"www-authenticate": 'Basic realm="rpg"'})

    def _is_token(self, shown: str) -> bool:
        return hmac.compare_digest(shown.encode(), self._token.encode())


def _index(pages: Pages, _request: Request) -> Response:
    return HTMLResponse(pages.index())


def _report(pages: Pages, kind: str, request: Request) -> Response:
    name = request.path_params["name"]
    try:
        return HTMLResponse(pages.report(kind, name))
    except UnknownPageError:
        return PlainTextResponse(f"nothing recorded under {kind}/{name}\n", 404)
    except RpgError as error:
        return PlainTextResponse(f"{error}\n", 404)


def _responses(home: Home, request: Request) -> Response:
    run_id = request.path_params["name"]
    try:
        return HTMLResponse(responses_page(home, run_id, Wanted.of(request.query_params)))
    except ValueError as error:
        return PlainTextResponse(f"{error}\n", 400)
    except (UnknownPageError, RpgError):
        return PlainTextResponse(f"nothing recorded under runs/{run_id}\n", 404)


def _response(home: Home, request: Request) -> Response:
    run_id, step, rollout_id = (request.path_params[name] for name in ("name", "step", "rollout"))
    start = request.query_params.get("from", "0")
    if not start.isdecimal() or max(int(start), step, rollout_id) > 2**31 - 1:
        return PlainTextResponse("expected numbers below 2147483648\n", 400)
    try:
        return HTMLResponse(response_page(home, run_id, step, rollout_id, int(start)))
    except (UnknownPageError, RpgError):
        return PlainTextResponse(f"nothing recorded under runs/{run_id}, step {step}, response {rollout_id}\n", 404)


def _live(live: Live, request: Request) -> Response:
    """Returns the live page of the names in the address. Without a name, redirects to that of the current
    experiments."""
    names = request.query_params.getlist("of")
    if not names and (current := live.current()):
        return RedirectResponse(f"live?{urlencode([('of', name) for name in current])}", 303)
    try:
        return HTMLResponse(live.page(names)) if names else PlainTextResponse("nothing is recorded yet\n", 404)
    except RpgError as error:
        return PlainTextResponse(f"{error}\n", 404)


async def _rows(live: Live, request: Request) -> Response:
    """Returns the new rows for a live page."""
    try:
        wanted = Question.of(await _body(request))
    except TooLongError as error:
        return PlainTextResponse(f"{error}\n", 413)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        form = '{"of": [name, ...], "metrics": [metric, ...], "known": {run: [stamp, attempt, step], ...}}'
        return PlainTextResponse(f"expected {form}\n", 400)
    try:
        return JSONResponse(await run_in_threadpool(live.changes, wanted))
    except RpgError as error:
        return PlainTextResponse(f"{error}\n", 404)


async def _body(request: Request) -> bytes:
    """Returns the body of a request. Raises TooLongError above the largest size."""
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > _MOST_KNOWN:
            raise TooLongError("the request is too long")
    return body


async def _changes(home: Home, request: Request) -> Response:
    """Returns the listings of the units that differ from the mirror's, and the deleted units. Considers all units, or
    only those in the request."""
    try:
        known, only = _asked(await _body(request))
    except TooLongError as error:
        return PlainTextResponse(f"{error}\n", 413)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return PlainTextResponse('expected {"known": {unit: digest, ...}, "only": [unit, ...]}\n', 400)
    listings = await run_in_threadpool(read_listings, home.root, only)
    changed = {unit: listing.to_json() for unit, listing in listings.items() if known.get(unit) != listing.digest}
    return JSONResponse({"changed": changed, "gone": [unit for unit in known if unit not in listings]})


def _asked(body: bytes) -> tuple[dict[str, str], list[str]]:
    """Returns the digests of the units that a mirror has, and the units that it asks for."""
    asked = json.loads(body)
    known, only = dict(asked["known"]), list(asked.get("only", ()))
    for text in (*known, *known.values(), *only):
        if b"\0" in text.encode():  # no file has such a name; and half a character has no bytes, a ValueError too
            raise ValueError(text)
    return known, only


def _file(home: Home, request: Request) -> Response:
    """Returns a file of the record, whole or from a byte on (`Range: bytes=N-`), or status 304 if the client has this
    version."""
    path = request.path_params["path"]
    try:
        file = open_recorded(home.root, path)
    except NotRecordedError:
        return PlainTextResponse(f"no such file of the record: {path}\n", 404)
    status = os.fstat(file)
    headers = {"etag": f'"{status.st_mtime_ns:x}"', "accept-ranges": "bytes"}
    if request.headers.get("if-none-match") == headers["etag"]:
        os.close(file)
        return Response(status_code=304, headers=headers)
    start = _start(request.headers.get("range", ""), status.st_size)
    headers["content-length"] = str(status.st_size - start)
    if start:
        headers["content-range"] = f"bytes {start}-{status.st_size - 1}/{status.st_size}"
    kind = _TYPES.get(os.path.splitext(path)[1], "application/octet-stream")
    content = _content(file, start, status.st_size)
    return StreamingResponse(content, 206 if start else 200, headers, kind)


def _start(wanted: str, size: int) -> int:
    """Returns the first byte that a Range header requests; 0, the whole file, if the header is invalid or missing."""
    first = wanted.removeprefix("bytes=").removesuffix("-")
    return int(first) if wanted == f"bytes={first}-" and first.isdecimal() and int(first) < size else 0


def _content(file: int, start: int, end: int) -> Iterator[bytes]:
    """Yields the bytes of an open file from `start` to `end`; stops there even if the file grows meanwhile."""
    with os.fdopen(file, "rb") as opened:
        opened.seek(start)
        while start < end and (chunk := opened.read(min(_CHUNK, end - start))):
            start += len(chunk)
            yield chunk


def _waiting(home: Home, _request: Request) -> Response:
    """Returns the runs that wait for a worker; null if this process knows no server, or if the server does not
    answer."""
    if server := server_of(home):
        url, auth_string = server
        headers = {"authorization": header_with(auth_string)}
        with contextlib.suppress(httpx.HTTPError), httpx.Client(headers=headers, timeout=_SERVER_SECONDS) as client:

            def post(path: str, body: dict[str, Any]) -> Any:
                return client.post(f"{url}{path}", json=body).raise_for_status().json()

            return JSONResponse({"waiting": [run.as_data() for run in waiting_runs(post)]})
    return JSONResponse({"waiting": None})


async def _ready(_request: Request) -> Response:
    return PlainTextResponse(READY)
