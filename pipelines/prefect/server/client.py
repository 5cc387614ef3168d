"""Access to a Prefect server: the server that a command uses, and the meaning of its refusals for the user."""

import contextlib
import os
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from json import JSONDecodeError
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pipelines.home.home import Home
from pipelines.prefect.server.api import auth_string_for, client_settings, is_healthy, running_services
from specs.errors import Issue, RpgError, SpecError

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

Answer = TypeVar("Answer")
_AUTH_STRING = "PREFECT_API_AUTH_STRING"
_SILENT_SECONDS = 10.0
"""Seconds without an answer after which a request is reported on stderr."""
_LOOK_SECONDS = 1.0
_PATIENCE_SECONDS = 300.0
"""Seconds for which a starting flow retries a server that does not answer."""
_PAUSE_SECONDS = 2.0


@contextlib.contextmanager
def prefect_client(home: Home, url: str) -> Iterator["SyncPrefectClient"]:
    """Opens a client of the API at the URL. If the server takes long to answer, a line on stderr says so.

    Prefect tries a request six times, for a minute each, before it fails.

    Raises:
        SpecError: within the block the server could not be reached, or refused the command.
    """
    with client_settings(home, url):
        import httpx
        from prefect.client.orchestration import get_client
        from pydantic import ValidationError

        waits = _Waits(url)
        hooks = {"request": [waits.begin], "response": [waits.end]}
        try:
            with get_client(httpx_settings={"event_hooks": hooks}, sync_client=True) as client:
                yield client
        except httpx.HTTPStatusError as error:
            raise SpecError(_refusal(url, error.response)) from error
        except (JSONDecodeError, ValidationError) as error:
            given = str(error).partition("\n")[0]
            raise SpecError(Issue(f"the service at {url} is not a Prefect server", given=given)) from error
        except httpx.TransportError as error:
            hint = "nothing is lost: the same command continues when the server answers again"
            raise SpecError(Issue(f"the Prefect server at {url} stopped answering", hint=hint)) from error
        finally:
            waits.close()


def ask_patiently(ask: "Callable[[SyncPrefectClient], Answer]") -> Answer:
    """Returns the answer of the server that this process reports to. While the server is unreachable, retries for some
    minutes.

    Raises the client's exception if the server refuses, or answers too late.
    """
    import httpx
    from prefect.client.orchestration import get_client

    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            with get_client(sync_client=True) as client:
                return ask(client)
        except (httpx.TransportError, httpx.HTTPStatusError) as error:
            refused = isinstance(error, httpx.HTTPStatusError) and error.response.status_code < 500
            if refused or time.monotonic() > deadline:
                raise
        time.sleep(_PAUSE_SECONDS)


class _Waits:
    """Reporter of requests without an answer. It writes to stderr after some seconds, then after twice as many, and so
    on."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._request: Any = None
        """The last request, an httpx.Request."""
        self._begun_at = 0.0
        self._answered = True
        self._closed = threading.Event()
        threading.Thread(target=self._look, name="waiting for the server", daemon=True).start()

    def begin(self, request: Any) -> None:
        """Notes that the request is sent, for the first time or again."""
        if request is not self._request:
            self._request, self._begun_at = request, time.monotonic()
        self._answered = False

    def end(self, _response: Any) -> None:
        """Notes that the server has answered."""
        self._answered = True

    def close(self) -> None:
        """Ends the reports."""
        self._closed.set()

    def _look(self) -> None:
        told_of, seconds = None, _SILENT_SECONDS
        while not self._closed.wait(_LOOK_SECONDS):
            if self._request is not told_of:
                told_of, seconds = self._request, _SILENT_SECONDS
            if not self._answered and time.monotonic() - self._begun_at >= seconds:
                print(f"waiting for the Prefect server at {self._url}: no answer for {seconds:g} s", file=sys.stderr)
                seconds *= 2


def _refusal(url: str, response: Any) -> Issue:
    """Returns what the server's answer means to the user. `response`: an httpx.Response with a status of 400 or
    more."""
    if response.status_code in (401, 403):
        given = "a wrong user or password" if response.request.headers.get("Authorization") else "no user and password"
        hint = f"set {_AUTH_STRING}=user:password, or use --profile with a Prefect profile that contains it"
        return Issue(f"the Prefect server at {url} requires a user and a password", given=given, hint=hint)
    request = f"{response.request.method} {response.request.url.path}"
    if response.status_code == 404:
        hint = "it was deleted there meanwhile; run the command again"
        return Issue(f"the Prefect server at {url} does not have the requested object", given=request, hint=hint)
    given = f"{request} -> {response.status_code} {response.text[:200]}"
    return Issue(f"the Prefect server at {url} refused", given=given, hint="its log says why")


def api_url(home: Home, profile: str) -> str:
    """Returns the URL of the API that a profile names; without a profile, the URL of the server of `rpg up`.

    The user and password of a Prefect profile come into this process's environment, where Prefect reads them, unless
    the environment has others.

    Args:
        profile: an API's or a dashboard's URL, or the name of a Prefect profile; empty means the server of `rpg up`.
    Raises:
        SpecError: there is no such profile, or no server answers.
        ServiceError: another user of this machine listens there.
    """
    if not profile:
        services = running_services(home)
        if services is None:
            raise SpecError(Issue("no Prefect server", hint="start one with `rpg up`, or name one with --profile"))
        url = services.url
    elif "://" in profile:
        url = profile.rstrip("/") if profile.rstrip("/").endswith("/api") else f"{profile.rstrip('/')}/api"
    else:
        settings = _profile(profile)
        url = str(settings["PREFECT_API_URL"]).rstrip("/")
        if password := settings.get(_AUTH_STRING):
            os.environ.setdefault(_AUTH_STRING, str(password))
    auth_string_for(home, url)  # refuses another user's server before anything is sent
    if not is_healthy(url, timeout=10.0):
        raise SpecError(Issue(f"no Prefect server answers at {url}", given=profile))
    return url


def _profile(name: str) -> dict[str, Any]:
    """Returns the settings of one of the user's Prefect profiles, its URL among them."""
    path = Path.home() / ".prefect" / "profiles.toml"
    profiles: dict[str, Any] = {}
    if path.is_file():
        try:
            profiles = tomllib.loads(path.read_text(encoding="utf-8")).get("profiles", {})
        except ValueError as error:
            raise RpgError(f"{path}: {error}") from None
    if name not in profiles:
        raise SpecError(Issue("no such Prefect profile", given=name, allowed=", ".join(profiles) or f"none in {path}"))
    if not profiles[name].get("PREFECT_API_URL"):
        raise SpecError(Issue("the Prefect profile has no PREFECT_API_URL", given=name))
    settings: dict[str, Any] = profiles[name]
    return settings
