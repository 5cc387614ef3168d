"""The Prefect API that a command reports to: the one that `rpg up` keeps running, or a child of its own.

Prefect's own ephemeral server outlives a flow that is killed. Ours is started from the main thread and dies with it.
"""

import asyncio
import contextlib
import logging
import os
import pwd
import sys
import threading
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from http.client import HTTPException
from pathlib import Path
from subprocess import Popen, TimeoutExpired
from typing import Any
from urllib.parse import urlsplit

from pipelines.home.home import Home
from pipelines.launchers.network import bound_port
from pipelines.prefect.server.credentials import AUTH_VARIABLE, make_passwords, own_string, renew
from pipelines.prefect.server.settings import LOOPBACK, Profile, client_environment, embedded_environment, sqlite_file
from pipelines.prefect.server.template import begin_with_template, keep_template
from pipelines.processes.fork_server import show_as
from pipelines.processes.forking import Forked, fork_self
from pipelines.processes.reap import ProcessRecord
from pipelines.processes.supervisor import log_size, log_tail, start
from specs.errors import Issue, RpgError, SpecError
from specs.machine.files import read_json, write_json
from specs.machine.foreign.listeners import foreign_listener, guard_connections
from specs.machine.liveness import is_alive, place_of, start_of
from specs.secrets import HIDDEN, looks_secret

START_SECONDS = 300.0
"""Seconds for the first start. Migrating a new database takes 11 s on an idle machine with two cores, ten times that on
a very busy one."""
_STOP_SECONDS = 5.0


class ServiceError(RpgError):
    """Error for a service that did not start, or does not answer."""


@dataclass(frozen=True, slots=True)
class Services:
    """Programs that `rpg up` has started, as recorded in prefect/server.json."""

    url: str
    """The API's URL: http://.../api."""
    supervisor: ProcessRecord
    """supervisord, which keeps all the programs alive."""
    control_port: int
    """The port of supervisord's control interface."""
    profile: Profile = "embedded"
    studies_url: str = ""
    """The address of optuna-dashboard for a browser; empty if it is not installed, or has not started."""
    record_url: str = ""
    """The address of the reports and the record's files."""

    @property
    def dashboard(self) -> str:
        """The address for a browser."""
        return self.url.removesuffix("/api")

    @property
    def port(self) -> int:
        """The dashboard's port."""
        return int(self.dashboard.rpartition(":")[2])

    def write(self, home: Home) -> None:
        """Writes the record for other commands."""
        path = services_file(home)
        path.parent.mkdir(parents=True, exist_ok=True)
        supervisor = replace(self.supervisor, place=place_of(path.parent))
        write_json(path, asdict(replace(self, supervisor=supervisor)))


def services_file(home: Home) -> Path:
    """Returns the file in which `rpg up` records the programs that it has started."""
    return home.prefect / "server.json"


def running_services(home: Home) -> Services | None:
    """Returns the programs that `rpg up` has started, if its supervisord is still alive."""
    fields = read_json(services_file(home))
    supervisor = ProcessRecord.parse(fields.get("supervisor") or {}, home.prefect)
    if supervisor is None or not is_alive(supervisor.pid, supervisor.started):
        return None
    return Services(**fields | {"supervisor": supervisor})


SERVER_COMMAND = (sys.executable, "-P", "-m", "pipelines.prefect.server.api_process")
"""Command line of a process that serves the API and the dashboard. The process's standard input is the listening
socket."""


def status_of_answer(address: str, timeout: float = 2.0) -> int:
    """Returns the HTTP status of a GET request to the address; 0 if it takes more than `timeout` seconds."""
    try:
        with urllib.request.urlopen(address, timeout=timeout) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return int(error.code)
    except (urllib.error.URLError, HTTPException, OSError, ValueError):
        return 0


def answers(address: str, timeout: float = 2.0) -> bool:
    """Returns whether a GET request to the address is answered with status 200 within `timeout` seconds."""
    return status_of_answer(address, timeout) == 200


def is_healthy(url: str, timeout: float = 2.0) -> bool:
    """Returns whether a Prefect API and its database answer at the URL."""
    return answers(f"{url}/ready", timeout)


def wait_until_healthy(url: str, process: Popen[bytes] | Forked, log: Path, *, log_start: int = 0) -> None:
    """Waits until the API answers. Raises ServiceError if its process ends first, or after START_SECONDS.

    Args:
        log_start: the log's length when the process was started.
    """
    deadline = time.monotonic() + START_SECONDS
    while not is_healthy(url):
        if process.poll() is not None:
            raise ServiceError(f"the Prefect server ended while starting; {log}:\n{log_tail(log, since=log_start)}")
        if time.monotonic() > deadline:
            raise ServiceError(f"the Prefect server did not answer within {START_SECONDS:g} s; see {log}")
        time.sleep(0.1)
    refuse_anothers(url)


def refuse_anothers(address: str, owner: str = "") -> None:
    """Raises ServiceError if another user of this machine listens at one of our addresses. The password is not sent.

    Args:
        owner: the user who should own the listening process; empty means the calling user.
    """
    if why := foreign_listener(address, [pwd.getpwnam(owner).pw_uid if owner else os.geteuid()]):
        raise ServiceError(why)


def auth_string_for(home: Home, url: str) -> str:
    """Returns the password for the server at the URL: the internal password for a server of this home, else
    PREFECT_API_AUTH_STRING; empty if neither exists.

    Raises:
        ServiceError: another user of this machine listens there, whom RPG_TRUSTED_USERS does not name.
        SpecError: the URL is not an address.
    """
    try:
        parts = urlsplit(url)
        is_address = bool((parts.hostname or "").encode("idna")) and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address:
        given = HIDDEN if looks_secret("", url) else url
        raise SpecError(Issue("not the address of a server", given=given, allowed="http://HOST:PORT"))
    if _as_recorded(url) not in _own_urls(home):
        if shown := os.environ.get(AUTH_VARIABLE, ""):
            if why := foreign_listener(url):
                raise ServiceError(why)
            guard_connections(url)
        return shown
    refuse_anothers(url)
    return own_string(home)


def _as_recorded(url: str) -> str:
    """Returns the URL as a server's record spells it, with loopback as its IPv4 address."""
    with contextlib.suppress(ValueError):  # not a valid port
        parts = urlsplit(url.rstrip("/"))
        if parts.hostname in LOOPBACK and parts.port:
            return parts._replace(netloc=f"127.0.0.1:{parts.port}").geturl()
    return url.rstrip("/")


def _own_urls(home: Home) -> set[str]:
    """Returns the URLs of this home's servers: those of `rpg up`, and of each command with a server of its own."""
    services = running_services(home)
    urls = {services.url, services.record_url} if services else set()
    for path in home.prefect.glob("embedded-*.json"):
        fields = read_json(path)
        if (server := ProcessRecord.parse(fields, home.prefect)) and is_alive(server.pid, server.started):
            urls.add(fields.get("url", ""))
    return urls - {""}


def renew_passwords(home: Home) -> None:
    """Renews the passwords for people, and the internal password of the home's processes unless a running server
    accepts it."""
    home.create()
    with home.locked("prefect-start", waiting=lambda: None):  # a server that starts just now holds the lock
        renew(home, own=not _own_urls(home))


def server_of(home: Home) -> tuple[str, str] | None:
    """Returns the URL and the password of the API that has this home's runs: the server of `rpg up`, else that of
    PREFECT_API_URL. None if neither exists."""
    services = running_services(home)
    url = services.url if services else os.environ.get("PREFECT_API_URL", "")
    return (url, auth_string_for(home, url)) if url else None


class EmbeddedServer:
    """An API server that ends with this process at the latest. `start` returns at once, `wait` when the API answers."""

    def __init__(self, home: Home, *, forks: bool = False) -> None:
        """
        Args: forks: whether the server may be a fork of this process, which has imported Prefect. Set it only in our
        own commands.
        """
        self._home = home
        self._forks = forks
        # Bound from start to end, so that no other user can take the port and receive the password.
        self._listener, self._held = bound_port()
        self.url = f"http://127.0.0.1:{self._held.getsockname()[1]}/api"
        self._log, self._log_start = home.logs / "prefect-server.log", 0
        self._record = home.prefect / f"embedded-{os.getpid()}.json"
        self._process: Popen[bytes] | Forked | None = None
        self._is_new = False
        # Two servers must not migrate one new database at the same time.
        self._starting = contextlib.ExitStack()

    def start(self) -> None:
        """Starts the server; does not wait until it answers."""
        self._home.create()
        self._home.prefect.mkdir(parents=True, exist_ok=True)
        self._starting.enter_context(self._home.locked("prefect-start", waiting=lambda: None))
        make_passwords(self._home)
        self._log_start = log_size(self._log)
        self._is_new = begin_with_template(sqlite_file(self._home))
        settings = embedded_environment(self._home, self.url) | {"PREFECT_UI_ENABLED": "0"}
        with self._listener as listener:
            port = listener.fileno()
            if self._forks:
                _import_prefect(self._home, self.url)
                self._process = fork_self(_serve, self._log, environment=settings, standard_input=port)
            if self._process is None:
                self._process = start(SERVER_COMMAND, self._log, environment=settings, standard_input=port)
        parent = {"parent": os.getpid(), "parent_started": start_of(os.getpid())}
        process = asdict(ProcessRecord.of(self._process.pid, "server", self._home.prefect))
        write_json(self._record, process | parent | {"url": self.url})

    def wait(self) -> None:
        """Waits until the server answers."""
        assert self._process is not None, "start() comes first"
        try:
            wait_until_healthy(self.url, self._process, self._log, log_start=self._log_start)
            if self._is_new:
                keep_template(sqlite_file(self._home))
        finally:
            self._starting.close()

    def stop(self) -> None:
        """Ends the server. Requests that it has accepted stay in its database."""
        self._starting.close()
        with self._held, self._listener:
            if self._process is None:
                return
            self._process.terminate()
            with contextlib.suppress(TimeoutExpired):
                self._process.wait(_STOP_SECONDS)
            self._process.kill()
            self._process.wait()
            self._record.unlink(missing_ok=True)


def _serve() -> None:
    """Serves the API in a fork of its client. Prefect reads its settings and its log settings again."""
    from prefect.context import refresh_global_settings_context

    from pipelines.prefect.server.api_process import main

    for name in _SILENT:
        os.environ.pop(name, None)
    sys.argv = [*SERVER_COMMAND[3:]]
    show_as(" ".join(SERVER_COMMAND))
    refresh_global_settings_context()
    main()


class Api:
    """The API that a command reports to: the server of `rpg up`, else an embedded server that ends with the command.

    Entering the block starts an embedded server if one is needed and returns at once; `connected` waits for it.
    """

    def __init__(self, home: Home, *, forks: bool = False) -> None:
        """
        Args:
            forks: as for `EmbeddedServer`.
        """
        self._home = home
        self._forks = forks
        self._embedded: EmbeddedServer | None = None
        self.url = ""

    def __enter__(self) -> "Api":
        services = running_services(self._home)
        if services is not None and is_healthy(services.url):
            self.url = services.url
        else:
            self._embedded = EmbeddedServer(self._home, forks=self._forks)
            self.url = self._embedded.url
            self._embedded.start()
        return self

    def __exit__(self, *_error: object) -> None:
        if self._embedded is not None:
            self._embedded.stop()

    @contextlib.contextmanager
    def connected(self) -> Iterator[None]:
        """Connects Prefect in this process to the API within the block."""
        with client_settings(self._home, self.url):
            if self._embedded is not None:
                self._embedded.wait()
            try:
                yield
            finally:
                drain()


_SILENT = {"PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL", "PREFECT_LOGGING_INTERNAL_LEVEL": "CRITICAL"}
"""Silences the log line that Prefect writes for each message that it could not send."""


def _import_prefect(home: Home, url: str) -> None:
    """Imports Prefect as a client of the API, unless it is imported already."""
    if "prefect" not in sys.modules:
        # Without the password: Prefect in this process needs it, but processes that this one starts must not get it.
        os.environ.update(client_environment(home, url) | _SILENT)
        with warnings.catch_warnings():
            # Prefect does without its directory, and a command that the server refuses creates no home.
            warnings.filterwarnings("ignore", "Failed to create the Prefect home directory")
            import prefect.main  # noqa: F401


@contextlib.contextmanager
def client_settings(home: Home, url: str) -> Iterator[None]:
    """Sets Prefect in this process to this API within the block, without heartbeats and output."""
    shown = auth_string_for(home, url)
    _import_prefect(home, url)
    logging.raiseExceptions = False  # The same for its handler of log records.
    from prefect.settings import (
        PREFECT_API_AUTH_STRING,
        PREFECT_API_URL,
        PREFECT_FLOWS_HEARTBEAT_FREQUENCY,
        PREFECT_HOME,
        temporary_settings,
    )

    # The heartbeat's thread sleeps in steps of a second and is waited for at each flow's end.
    settings: dict[Any, Any] = {
        PREFECT_API_URL: url,
        PREFECT_API_AUTH_STRING: shown or None,
        PREFECT_HOME: home.prefect,
        PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None,
    }
    with temporary_settings(settings):
        yield


def drain() -> None:
    """Sends the messages that Prefect's clients still hold. The states of tasks are sent as events.

    Messages that the server does not accept within some seconds are dropped: at the interpreter's end Prefect would
    wait for minutes. A separate thread sends them: a notebook has an event loop in the main thread, where Prefect
    returns awaitables.
    """
    thread = threading.Thread(target=_drain, name="drain")
    thread.start()
    thread.join()


def _drain() -> None:
    from prefect._internal.concurrency.threads import get_global_loop
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker

    with contextlib.suppress(Exception):
        drained = [worker.drain_all(timeout=5, at_exit=False) for worker in (EventsWorker, APILogWorker)]
        loop = get_global_loop()._loop
        if loop and any(unsent for _, unsent in drained):  # type: ignore[misc]
            services = [task for task in asyncio.all_tasks(loop) if task.get_coro().__name__ == "_run"]  # type: ignore[union-attr]
            for task in services:
                loop.call_soon_threadsafe(task.cancel)
