"""The proxy in front of every Prefect API that we start. It decides which requests reach Prefect's application, and
with which password.

Prefect asks for one password. The proxy accepts the people's password and the password of the home's own processes, and
passes Prefect the one that it was started with, so that the people's password can be changed while the server runs. It
rejects requests under a name that is not this server's, and requests of pages of other origins, web sockets included: a
browser sends both the name and the origin.
"""

import json
import os
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pipelines.home.home import Home
from pipelines.prefect.server.credentials import (
    READER_VARIABLE,
    SERVER_AUTH_VARIABLE,
    Passwords,
    header_with,
    named_by,
    shown_in,
)
from pipelines.prefect.server.settings import LOOPBACK, ORIGINS_VARIABLE, RECORD_PATH, trusted_hosts

_RECORD_VARIABLE_PATH = "/api/variables/name/rpg_record"


def objection(host: str, origin: str, origins: Collection[str]) -> str:
    """Returns why a request's headers `Host` and `Origin` make it unacceptable; empty if it is accepted.

    Args:
        origin: empty if the request has none, like a program's request.
        origins: origins of pages that may send requests, besides those of the requested host, and those under a name of
            RPG_TRUSTED_HOSTS. Their hosts are this server's names too.
    """
    names = trusted_hosts()
    if _name(f"//{host}") not in (*LOOPBACK, *names, *map(_name, origins)):
        return f"this server does not have the name {host!r}; a proxy needs it in RPG_TRUSTED_HOSTS\n"
    is_own = origin.partition("://")[2] == host
    if origin and not is_own and origin not in origins and _name(origin) not in names:
        return f"a page of {origin!r} may not send requests to this server\n"
    return ""


def _name(address: str) -> str:
    try:
        return (urlsplit(address).hostname or "").lower()
    except ValueError:
        return ""


class ApiProxy:
    """Prefect's application behind the API proxy."""

    def __init__(self, app: ASGIApp, home: Home, origins: Collection[str], shown: str) -> None:
        """
        Args: app: Prefect's application. origins: origins of pages that may send requests. shown: the auth string that
        Prefect's application requires.
        """
        self._app = app
        self._origins = origins
        self._may_submit = Passwords(home, "auth", "own")
        self._may_read = named_by(READER_VARIABLE) or Passwords(home, "reader")
        self._shown = shown

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Rejects a request, or passes it on to Prefect."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        if reason := objection(headers.get(b"host", ""), headers.get(b"origin", ""), self._origins):
            await _turn_away(scope, receive, send, reason)
        elif scope["type"] == "websocket":
            await self._app(scope, self._with_known_token(receive), send)
        else:
            await self._app(self._with_known_password(scope, headers.get(b"authorization", "")), receive, send)

    def _with_known_password(self, scope: Scope, authorization: str) -> Scope:
        given = shown_in(authorization)
        asks_for_record = scope["path"] == RECORD_PATH and scope["method"] == "GET"
        if asks_for_record:
            scope = {**scope, "path": _RECORD_VARIABLE_PATH, "raw_path": _RECORD_VARIABLE_PATH.encode()}
        if not given or not (self._may_submit(given) or (asks_for_record and self._may_read(given))):
            return scope
        others = [header for header in scope["headers"] if header[0] != b"authorization"]
        return {**scope, "headers": [*others, (b"authorization", header_with(self._shown).encode())]}

    def _with_known_token(self, receive: Receive) -> Receive:
        """Replaces an accepted password, in the first message of a web socket's client, by the one that Prefect
        requires."""
        is_first = True

        async def receive_known() -> Message:
            nonlocal is_first
            message = await receive()
            if message["type"] == "websocket.receive" and is_first:
                is_first = False
                try:
                    greeting = json.loads(message.get("text") or message.get("bytes") or b"")
                    if self._may_submit(greeting["token"]):
                        return {"type": "websocket.receive", "text": json.dumps(greeting | {"token": self._shown})}
                except (ValueError, KeyError, TypeError, AttributeError):
                    pass  # Prefect says what it expected
            return message

        return receive_known


async def _turn_away(scope: Scope, receive: Receive, send: Send, reason: str) -> None:
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.close", "code": 1008, "reason": reason.strip()})
        return
    await PlainTextResponse(reason, 403)(scope, receive, send)


def behind_proxy(app: ASGIApp) -> ASGIApp:
    """Returns Prefect's application behind the home's API proxy, with the settings of the process's environment.

    Raises:
        KeyError: the environment has no password, or no origins.
    """
    origins, shown = os.environ[ORIGINS_VARIABLE].split(","), os.environ[SERVER_AUTH_VARIABLE]
    return ApiProxy(app, Home.from_environment(), origins, shown)
