"""Sources of another home's record: its web application, or the object store that its workers write to."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import httpx

from pipelines.remote.record_files import Listing
from specs.errors import RpgError

READY = "record ready\n"
"""The web application's answer at /ready."""
_SECONDS = 60.0
"""Timeout of one request, in seconds."""
_READY_SECONDS = 5.0
"""Seconds to wait for an answer to whether a record exists. It is short, because the address may be a Prefect server's,
which is tried next."""


class SourceError(RpgError):
    """Error for a record that cannot be read from the given place. The message says where and why."""


class FileGoneError(Exception):
    """Error for a listed file that no longer exists."""


@dataclass(frozen=True, slots=True)
class Changes:
    """Changes of the record since a mirror's last update."""

    changed: Mapping[str, Listing]
    """Listings that the mirror lacks, or has in another version, by unit."""
    gone: Collection[str]
    """Units that the mirror knows and that no longer exist."""


class Source(Protocol):
    """A record that can be read from elsewhere. Threads may share it. Every method may raise SourceError."""

    def changes(self, known: Mapping[str, str], only: Collection[str] = ()) -> Changes:
        """Returns the changes since the listings with these digests.

        Args:
            known: digest of each unit's listing.
            only: units to compare; empty means all.
        """
        ...

    def read(self, path: str, start: int = 0) -> tuple[bytes, str]:
        """Returns the content of a file from byte `start` on (the whole file if it is shorter), and the file's version,
        empty if unknown. Raises FileGoneError if the file does not exist."""
        ...

    def waiting(self) -> list[dict[str, Any]] | None:
        """Returns the runs that wait for a worker, in the form of `prefect.server.waiting`; None if only their
        server knows them."""
        ...

    def close(self) -> None:
        """Closes connections."""
        ...


class WebSource:
    """The record that a web application (`pipelines.web`) serves."""

    def __init__(self, url: str, auth: str = "") -> None:
        """Args: auth: `user:password`; empty if none is needed."""
        user, _, password = auth.partition(":")
        self._url = url.rstrip("/")
        self._client = httpx.Client(auth=(user, password) if auth else None, timeout=_SECONDS)

    def changes(self, known: Mapping[str, str], only: Collection[str] = ()) -> Changes:
        """See `Source`."""
        body = {"known": dict(known), "only": list(only)}
        try:
            answer = self._asked("POST", "/record", json=body).json()
            listings = {unit: Listing.from_json(unit, listing) for unit, listing in answer["changed"].items()}
            return Changes(listings, [unit for unit in answer["gone"] if unit in known])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SourceError(f"the service at {self._url} has no record: {error}") from error

    def read(self, path: str, start: int = 0) -> tuple[bytes, str]:
        """See `Source`."""
        answer = self._asked("GET", f"/record/{path}", headers={"range": f"bytes={start}-"} if start else {})
        if answer.status_code == 404:
            raise FileGoneError(path)
        return answer.content, answer.headers.get("etag", "").strip('"')

    def waiting(self) -> list[dict[str, Any]] | None:
        """See `Source`."""
        answer = self._asked("GET", "/waiting")
        if answer.status_code == 404:
            return None
        try:
            runs = answer.json()["waiting"]
            return None if runs is None else [dict(run) for run in runs]
        except (ValueError, KeyError, TypeError) as error:
            raise SourceError(f"the service at {self._url} has no record: {error}") from error

    def is_record(self) -> bool:
        """Returns whether the address is one of our web applications."""
        try:
            return self._client.get(f"{self._url}/ready", timeout=_READY_SECONDS).text == READY
        except httpx.HTTPError:
            return False

    def close(self) -> None:
        """See `Source`."""
        self._client.close()

    def _asked(self, method: str, path: str, **options: object) -> httpx.Response:
        try:
            answer = self._client.request(method, f"{self._url}{path}", **options)  # type: ignore[arg-type]
        except httpx.HTTPError as error:
            raise SourceError(f"the record at {self._url} cannot be read: {error}") from error
        if answer.status_code == 401:
            hint = "set PREFECT_API_AUTH_STRING to the server's user:password, or to its read-only one"
            raise SourceError(f"the record at {self._url} requires a password; {hint}")
        if answer.status_code not in (200, 206, 404):
            raise SourceError(f"the record at {self._url} cannot be read: it answered {answer.status_code}")
        return answer
