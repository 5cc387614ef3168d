"""Serving the web application, in this process and until it is ended."""

import ipaddress
import os

from pipelines.home import Home
from specs.errors import Issue, SpecError

AUTH = "PREFECT_SERVER_API_AUTH_STRING"
"""The variable with the `user:password` that Prefect's API and this application ask for."""
DEFAULT_PORT = 4202


def serve(home: Home, host: str, port: int) -> None:
    """Serves the home's record until SIGINT or SIGTERM.

    Raises:
        SpecError: other machines could reach it and no password is set.
    """
    import uvicorn

    from pipelines.web.app import make_app

    auth, loopback = os.environ.get(AUTH, ""), _is_loopback(host)
    if not auth and not loopback:
        hint = f"set {AUTH}=user:password, or leave out --host"
        raise SpecError(Issue("other machines could read everything recorded, without a password", hint=hint))
    hosts = ("*",) if auth else (host, "localhost")
    app = make_app(home, auth=auth, hosts=hosts)
    uvicorn.run(app, host=host, port=port, log_level="warning", timeout_graceful_shutdown=2, use_colors=False)


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
