"""Settings of Prefect's processes through environment variables, for `rpg up` and docker-compose.yml."""

import os
from pathlib import Path
from typing import Literal
from urllib.parse import quote, urlsplit

from pipelines.home.home import Home
from pipelines.prefect.server.credentials import AUTH_VARIABLE, SERVER_AUTH_VARIABLE, own_string
from specs.errors import RpgError

Profile = Literal["embedded", "server"]
"""embedded: one API process on SQLite. server: PostgreSQL, Redis, several API processes, and a process of background
services."""
API_PROCESSES = 2
"""API processes of the server profile."""

# The dashboard's second version: the first shows Mermaid as text.
_EVERY_SERVER = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_UI_V2_ENABLED": "true",
    "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
    "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
    "DO_NOT_TRACK": "1",
}
SHARED_STATE = {
    "PREFECT_SERVER_EVENTS_MESSAGING_BROKER": "prefect_redis.messaging",
    "PREFECT_SERVER_EVENTS_MESSAGING_CACHE": "prefect_redis.messaging",
    "PREFECT_SERVER_EVENTS_CAUSAL_ORDERING": "prefect_redis.ordering",
    "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect_redis.lease_storage",
    "PREFECT_SERVER_WORKER_CHANNEL_CLEANUP_QUEUE_STORAGE": "prefect_redis.cleanup_queue",
    # Migrated once, before any process starts: two concurrent migrations corrupt it.
    "PREFECT_SERVER_DATABASE_MIGRATE_ON_START": "false",
}
"""Variables by which several processes of one server keep shared state in Redis instead of in memory."""
API_ONLY = {"PREFECT__SERVER_WEBSERVER_ONLY": "1"}
"""Variables of a process that answers requests and leaves the background services to another."""
HOSTS_VARIABLE = "RPG_TRUSTED_HOSTS"
"""Environment variable: comma-separated host names under which a proxy forwards other machines' requests to our
servers."""
PUBLIC_VARIABLE = "PREFECT_SERVER_UI_API_URL"
"""Prefect's environment variable: the API's URL as a browser sees it, for example behind a proxy. The dashboard uses
it."""
ORIGINS_VARIABLE = "PREFECT_SERVER_CORS_ALLOWED_ORIGINS"
"""Prefect's environment variable: comma-separated origins of pages that may send requests to an API."""
RECORD_PATH = "/rpg/record"
"""Path on the API's server that returns the Prefect variable with the record's address. The read-only password is
enough."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""The names by which programs of this machine reach a server."""


def trusted_hosts() -> tuple[str, ...]:
    """Returns the host names in RPG_TRUSTED_HOSTS, under which a proxy forwards other machines' requests to our
    servers."""
    return tuple(name.strip().lower() for name in os.environ.get(HOSTS_VARIABLE, "").split(",") if name.strip())


def origins_of(url: str) -> list[str]:
    """Returns the origins of pages that may send requests to an API: those of the API's own pages, under each of its
    names."""
    port = urlsplit(url).port or 80
    here = [f"http://{name}:{port}" for name in ("127.0.0.1", "localhost")]
    public = urlsplit(public_url(url))
    there = [f"{public.scheme}://{public.netloc}".lower(), *(f"https://{name}" for name in trusted_hosts())]
    return list(dict.fromkeys([*here, *there]))


def public_url(url: str) -> str:
    """Returns the address at which a browser reaches the API at `url`: PREFECT_SERVER_UI_API_URL if it is set, else
    `url`.

    Raises:
        RpgError: it holds no address.
    """
    given = os.environ.get(PUBLIC_VARIABLE) or url
    parts = urlsplit(given)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or "," in given:
        raise RpgError(
            f"{PUBLIC_VARIABLE}={given} is not the address of an API\n"
            "  hint: give the address at which browsers reach the API through the proxy, such as"
            " https://prefect.example.org/api"
        )
    return given


def client_environment(home: Home, url: str, auth_string: str = "") -> dict[str, str]:
    """Returns the environment of our processes that call an API. They send it `auth_string`; empty if it needs none."""
    environment = {
        "PREFECT_HOME": str(home.prefect),
        "PREFECT_PROFILES_PATH": str(home.prefect / "profiles.toml"),
        "PREFECT_API_URL": url,
        "PREFECT_CLI_PROMPT": "false",
        "DO_NOT_TRACK": "1",
    }
    return environment | ({AUTH_VARIABLE: auth_string} if auth_string else {})


def sqlite_file(home: Home) -> Path:
    """Returns the database of the one API process on SQLite."""
    return home.prefect / "prefect.db"


def embedded_environment(home: Home, url: str) -> dict[str, str]:
    """Returns the environment of the one API process on SQLite. Its background services also call the API."""
    return client_environment(home, url, own_string(home)) | {
        **_of_every_server(home, url, own_string(home)),
        "PREFECT_SERVER_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{quote(str(sqlite_file(home)))}",
    }


def server_environment(home: Home, url: str, *, database: str, redis: str, auth_string: str) -> dict[str, str]:
    """Returns the environment of each process of the Prefect server in the server profile, background services
    included.

    Args:
        url: the API's, on this machine.
        database: `user:password@host:port/name` of PostgreSQL.
        redis: `:password@host:port`.
        auth_string: the password that a client has to send.
    """
    # The services are clients of their own API too.
    return client_environment(home, url, auth_string) | {
        **_of_every_server(home, url, auth_string),
        **SHARED_STATE,
        "PREFECT_SERVER_DATABASE_CONNECTION_URL": f"postgresql+asyncpg://{database}",
        "PREFECT_REDIS_MESSAGING_URL": f"redis://{redis}/0",
        "PREFECT_REDIS_WORKER_CLEANUP_QUEUE_URL": f"redis://{redis}/0",
        "PREFECT_SERVER_DOCKET_URL": f"redis://{redis}/1",
    }


def _of_every_server(home: Home, url: str, auth_string: str) -> dict[str, str]:
    return _EVERY_SERVER | {
        "RPG_HOME": str(home.root),
        PUBLIC_VARIABLE: public_url(url),
        ORIGINS_VARIABLE: ",".join(origins_of(url)),
        SERVER_AUTH_VARIABLE: auth_string,
        "PREFECT__SERVER_FINAL": "1",
    }
