"""An OpenAI-compatible endpoint. Requests are retried during rate limits and outages."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from threading import Event
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from rpg.rewards.judges.prompts import Message
from rpg.rewards.judges.verdicts import Reply
from rpg.rewards.score import RewardAwayError
from specs.documents.strict_json import NotJsonError, parse_json
from specs.errors import Issue, SpecError
from specs.machine.foreign.listeners import foreign_listener
from specs.machine.standstill import show_work
from specs.secrets import HIDDEN, SecretError, resolved

if TYPE_CHECKING:
    import httpx

_LONGEST_REPLY = 4 << 20
"""Largest number of bytes of the endpoint's answer."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0
"""Shortest and longest time in seconds between two tries."""
_LONGEST_RETRY_AFTER = 600.0
"""Longest Retry-After, in seconds, that is respected."""
_AWAY = frozenset({408, 425, 429})
"""Status codes, in addition to 5xx, of temporary failures."""
_REFUSED = frozenset({401, 402, 403, 404, 405})
"""Status codes of permanent failures: a key, an account or an address is wrong. They are not the fault of a
response."""
_LOOPBACK = ("127.", "localhost", "[::1]", "::1")
_SHOWN = 300
"""Largest number of characters that are quoted from an error's text."""


class RequestRefusedError(ValueError):
    """Error raised if the endpoint rejects a request, for example because it is too long."""


@dataclass(frozen=True, slots=True)
class EndpointSettings:
    """Settings of the requests to an endpoint."""

    url: str
    """Address up to and including /v1."""
    model: str
    key: str
    """Reference to the key; see `specs.secrets`. Empty if there is no key."""
    path: tuple[str | int, ...]
    """Place, in the spec, of the section that names the endpoint."""
    timeout_seconds: float
    """Time limit of one call."""
    patience_seconds: float
    """Seconds for which an endpoint may be unavailable before the attempt ends."""
    who: str = "judge"
    """Role of the model in the run, used in messages."""
    input_price: float = 0.0
    output_price: float = 0.0
    """Price of a million tokens of replies."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """Sampling settings of a reply."""

    temperature: float
    max_tokens: int
    seed: int


class Endpoint:
    """Chat completions of one model. Safe to call from any thread."""

    def __init__(self, settings: EndpointSettings) -> None:
        import httpx

        self._settings = settings
        self._key = key_of(settings.key, settings.path)
        self._closing = Event()
        self._client = httpx.Client(
            headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
            timeout=httpx.Timeout(settings.timeout_seconds),
            limits=httpx.Limits(max_connections=None),
            trust_env=not is_loopback(settings.url),
        )

    def ask(self, messages: Sequence[Message], drawn: Drawn) -> Reply:
        """Waits for the model's reply and returns it.

        Raises:
            RewardAwayError: the endpoint was unavailable for longer than the spec allows.
            SpecError: the endpoint refuses the key, the model or the address.
            RequestRefusedError: the endpoint refuses only this request.
        """
        settings = self._settings
        body = {
            "model": settings.model,
            "messages": list(messages),
            "temperature": drawn.temperature,
            "max_tokens": drawn.max_tokens,
            "seed": drawn.seed,
        }
        away_since, pause = time.monotonic(), _FIRST_PAUSE
        while True:
            reply, why, wait = self._try(body)
            if reply is not None:
                return reply
            wait = wait if wait is not None else pause
            pause = min(2 * pause, _LONGEST_PAUSE)
            away = time.monotonic() - away_since
            if away + wait > settings.patience_seconds:
                raise RewardAwayError(f"the {settings.who} at {settings.url} was unavailable for {away:.0f} s: {why}")
            self._wait(wait)

    def close(self) -> None:
        """Ends the calls that wait for another try."""
        self._closing.set()
        self._client.close()

    def _wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            show_work()  # the run is waiting, not hung
            if self._closing.wait(min(1.0, left)):
                raise RewardAwayError(f"closed while the {self._settings.who} at {self._settings.url} was unavailable")

    def _try(self, body: dict[str, Any]) -> tuple[Reply | None, str, float | None]:
        """Returns the reply or, without one, the reason and the seconds that the endpoint asks to wait, if any."""
        import httpx

        url = f"{self._settings.url.rstrip('/')}/chat/completions"
        if self._key and (why := foreign_listener(url)):
            raise SpecError(Issue(why, path=self._settings.path, given=self._settings.url))
        try:
            with self._client.stream("POST", url, json=body) as response:
                content = _bounded(response)
                status, headers = response.status_code, response.headers
        except (httpx.TransportError, httpx.DecodingError) as error:
            return None, self._hidden(f"{type(error).__name__}: {error}"), None
        finally:
            show_work()
        why = self._hidden(f"HTTP {status}: {content[:_SHOWN].decode(errors='replace')}")
        if status in _AWAY or status >= httpx.codes.INTERNAL_SERVER_ERROR:
            return None, why, _retry_after(headers.get("Retry-After", ""))
        if status in _REFUSED:
            field = "key" if status in (401, 402, 403) and self._settings.key else "endpoint"
            hint = "`rpg doctor FILE` tests it; after fixing that, `rpg run` continues"
            message = f"the {self._settings.who}'s endpoint refuses"
            raise SpecError(Issue(message, (*self._settings.path, field), why, hint=hint))
        if status != httpx.codes.OK:
            raise RequestRefusedError(why)
        shown = self._hidden(content[:_SHOWN].decode(errors="replace"))
        try:
            parsed = parse_json(content)
        except NotJsonError:
            return None, f"no completion: {shown}", None
        except ValueError as error:
            raise RequestRefusedError(f"the reply holds {error}: {shown}") from None
        try:
            return self._read(parsed), "", None
        except (ValueError, TypeError, KeyError, IndexError, AttributeError):
            return None, f"no completion: {shown}", None

    def _read(self, content: dict[str, Any]) -> Reply:
        text = content["choices"][0]["message"]["content"] or ""
        usage = content.get("usage") or {}
        prompt_tokens, tokens = (max(0, int(usage.get(name) or 0)) for name in ("prompt_tokens", "completion_tokens"))
        cost = (prompt_tokens * self._settings.input_price + tokens * self._settings.output_price) / 1e6
        whole = self._hidden(text).encode("utf-8", "replace").decode()
        return Reply(whole, prompt_tokens, tokens, cost)

    def _hidden(self, text: str) -> str:
        return text.replace(self._key, HIDDEN) if self._key else text


def key_of(reference: str, path: tuple[str | int, ...]) -> str:
    """Returns the key that a spec refers to. Raises SpecError if it is not on this machine."""
    if not reference:
        return ""
    try:
        return resolved({"key": reference})["key"]
    except SecretError as error:
        raise SpecError(
            Issue(str(error), (*path, "key"), reference, hint="set it on the machine that scores")
        ) from None


def is_loopback(url: str) -> bool:
    """Returns whether the address is on this machine, for which no proxy is used."""
    return (urlsplit(url).hostname or "").startswith(_LOOPBACK)


def address_issues(url: str) -> Iterator[Issue]:
    """Yields the issues of a section's field `endpoint`."""
    allowed = "http://HOST:PORT/v1 or https://HOST/v1"
    try:
        parts = urlsplit(url)
        named = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        parts, named = urlsplit(""), False
    if parts.username or parts.password or "@" in url:
        hint = "write key: env:NAME, a variable that holds it"
        yield Issue("an address must not contain a key", ("endpoint",), HIDDEN, allowed, hint, snippet=HIDDEN)
    elif not named or parts.query or parts.fragment:
        yield Issue("is not the address of an API", ("endpoint",), url, allowed)


def trouble_of(url: str, key: str, path: tuple[str | int, ...], *, seconds: float) -> str:
    """Returns why an endpoint is unusable: it does not answer within this many seconds, or it refuses requests. Empty
    if it is usable."""
    import httpx

    try:
        secret = key_of(key, path)
        headers = {"Authorization": f"Bearer {secret}"} if secret else {}
        if secret and (why := foreign_listener(url)):
            return f"is not asked: {why}"
        with httpx.Client(headers=headers, timeout=seconds, trust_env=not is_loopback(url)) as client:
            status = client.get(f"{url.rstrip('/')}/models").status_code
    except SpecError as error:
        return error.issues[0].message
    except httpx.TransportError as error:
        return f"does not answer ({type(error).__name__})"
    if status in (401, 402, 403) or status >= httpx.codes.INTERNAL_SERVER_ERROR:
        return f"refuses with HTTP {status}"
    return ""  # some servers do not list their models


def _bounded(response: "httpx.Response") -> bytes:
    content = bytearray()
    for part in response.iter_bytes():
        content += part
        if len(content) > _LONGEST_REPLY:
            break
    return bytes(content)


def _retry_after(header: str) -> float | None:
    """Returns the seconds in a Retry-After header, which may be a number or a date."""
    if header.strip().isdecimal():
        return min(float(header), _LONGEST_RETRY_AFTER)
    try:
        seconds = parsedate_to_datetime(header).timestamp() - time.time()
    except (ValueError, TypeError):
        return None
    return min(max(0.0, seconds), _LONGEST_RETRY_AFTER)
