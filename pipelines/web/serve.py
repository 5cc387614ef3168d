"""Serving the web application, in this process and until it is ended."""

import ipaddress

from pipelines.home.home import Home
from pipelines.prefect_server.credentials import SERVER_AUTH_VARIABLE, asked_for
from specs.errors import Issue, SpecError

DEFAULT_PORT = 4202


def serve(home: Home, host: str, port: int) -> None:
    """Serves the home's record until SIGINT or SIGTERM.

    Raises:
        SpecError: other machines could reach it and no password is set.
    """
    import uvicorn

    from pipelines.web.app import make_app

    accepts = asked_for(home)
    if not accepts and not _is_loopback(host):
        hint = f"set {SERVER_AUTH_VARIABLE}=user:password, or leave out --host"
        raise SpecError(Issue("other machines could read everything recorded, without a password", hint=hint))
    hosts = ("*",) if accepts else (host, "localhost")
    app = make_app(home, accepts=accepts, hosts=hosts)
    uvicorn.run(app, host=host, port=port, log_level="warning", timeout_graceful_shutdown=2, use_colors=False)


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
