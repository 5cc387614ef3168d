"""A read-only optuna-dashboard: `python -m pipelines.studies.web PORT`, which `rpg up` starts.

It opens one storage: the journal of the newest study, or with RPG_STUDIES_URL the database.
"""

import json
import os
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import optuna
from optuna.storages import InMemoryStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna_dashboard import wsgi

from pipelines.home.home import Home
from pipelines.prefect.server.credentials import (
    PASSWORDS_VARIABLE,
    SERVER_AUTH_VARIABLE,
    Accepts,
    asked_for,
    shown_in,
)
from pipelines.prefect.server.proxy import objection
from pipelines.prefect.server.settings import trusted_hosts
from pipelines.studies.storage import JOURNAL, URL, open_database
from specs.errors import Issue, RpgError, SpecError

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment


class NewestStudy:
    """The dashboard of the study that is the home's newest at the time of a request."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._created: dict[tuple[Path, bytes], str] = {}
        """Journal and its unique first line -> time at which its study was created."""
        self._shown: tuple[Path, bytes] | None = None
        self._application: WSGIApplication = wsgi(InMemoryStorage())
        self._lock = threading.Lock()

    def __call__(self, environ: "WSGIEnvironment", start_response: "StartResponse") -> "Iterable[bytes]":
        with self._lock:
            application = self._newest()
        return application(environ, start_response)

    def _newest(self) -> "WSGIApplication":
        readable = []
        for path in self._home.root.glob(f"studies/*/{JOURNAL}"):
            try:
                with path.open("rb") as file:
                    journal = path, file.readline()
                if journal not in self._created:
                    studies = _opened(path).get_all_studies()
                    self._created[journal] = max(str(study.user_attrs.get("created_at", "")) for study in studies)
            except (OSError, ValueError):
                continue  # just deleted, without a study yet, or damaged
            readable.append((self._created[journal], journal))
        if readable and (newest := max(readable)[1]) != self._shown:
            self._application, self._shown = wsgi(_opened(newest[0])), newest
        return self._application


def _opened(journal: Path) -> JournalStorage:
    return JournalStorage(JournalFileBackend(str(journal)))


class _Server(ThreadingMixIn, WSGIServer):
    """A server with a thread for each connection, because browsers open connections before they use them."""

    daemon_threads = True


class _Handler(WSGIRequestHandler):
    """A handler that logs only errors, because an open page sends requests every few seconds."""

    def log_request(self, *_status: object) -> None:
        pass


def dashboard(home: Home) -> "WSGIApplication":
    """Returns optuna-dashboard over the home's newest study, or over the database of RPG_STUDIES_URL.

    Raises:
        SpecError: RPG_STUDIES_URL names no PostgreSQL database, or its driver is not installed.
        StudyStorageError: the database does not answer.
    """
    url = os.environ.get(URL, "")
    return wsgi(open_database(url)[0]) if url else NewestStudy(home)


def guarded(application: "WSGIApplication", accepts: Accepts, *, is_named: bool = False) -> "WSGIApplication":
    """Returns the application with `/ready`, and with HTTP basic authentication for all other paths. Refuses methods
    other than GET, with which optuna-dashboard changes studies.

    Args:
        accepts: function that accepts or rejects a password.
        is_named: rejects requests under a name that is not this server's, and requests of other origins.
    """

    def answer(environ: "WSGIEnvironment", start_response: "StartResponse") -> Iterable[bytes]:
        if environ["PATH_INFO"] == "/ready":
            start_response("200 OK", [("content-type", "text/plain")])
            return [b"ready"]
        asked = environ.get("HTTP_HOST", ""), environ.get("HTTP_ORIGIN", "")
        if is_named and (reason := objection(*asked, ())):
            start_response("403 Forbidden", [("content-type", "text/plain")])
            return [reason.encode()]
        if not accepts(shown_in(environ.get("HTTP_AUTHORIZATION", ""))):
            start_response("401 Unauthorized", [("www-authenticate", 'Basic realm="rpg"')])
            return [b"log in with the auth string of the Prefect server, or of its readers"]
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            start_response("403 Forbidden", [("content-type", "application/json")])
            return [json.dumps({"reason": "this page only shows studies; `rpg study` changes them"}).encode()]
        return application(environ, start_response)

    return answer


def serve(home: Home, host: str, port: int) -> None:
    """Serves until it is ended. It requires the passwords that the environment names; see `asked_for`.

    Raises:
        SpecError: the environment names none. Other users and browsers' pages reach the server also on loopback.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    accepts, is_local = asked_for(home), host == "127.0.0.1"
    if not accepts:
        hint = f"set {SERVER_AUTH_VARIABLE}=user:password, or {PASSWORDS_VARIABLE}=home for those of `rpg up`"
        raise SpecError(Issue("others could read every study, without a password", hint=hint))
    is_named = is_local or bool(trusted_hosts())
    application = guarded(dashboard(home), accepts, is_named=is_named)
    with make_server(host, port, application, server_class=_Server, handler_class=_Handler) as server:
        server.serve_forever()


if __name__ == "__main__":
    try:
        serve(Home.from_environment(), os.environ.get("RPG_WEB_HOST") or "127.0.0.1", int(sys.argv[1]))
    except RpgError as error:
        sys.exit(str(error))
