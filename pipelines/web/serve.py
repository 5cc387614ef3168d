"""A server for the web application, in this process until it is ended."""

import ipaddress
import secrets

from pipelines.home.home import Home
from pipelines.prefect.server.credentials import SERVER_AUTH_VARIABLE, asked_for, of_home
from pipelines.prefect.server.settings import trusted_hosts
from specs.errors import Issue, SpecError

DEFAULT_PORT = 4202


def serve(home: Home, host: str, port: int) -> None:
    """Prints the address and serves the home's record until SIGINT or SIGTERM.

    If the environment names no password, the address has a token of this process that opens it, and the home's
    passwords open it too.

    Raises:
        SpecError: other machines could reach it and no password is set.
    """
    import uvicorn

    from pipelines.web.app import make_app

    accepts, is_local, token = asked_for(home), _is_loopback(host), ""
    if not accepts:
        if not is_local:
            hint = f"set {SERVER_AUTH_VARIABLE}=user:password, or leave out --host"
            raise SpecError(Issue("other machines could read everything recorded, without a password", hint=hint))
        accepts, token = of_home(home), secrets.token_urlsafe(24)
    address = f"http://{host}:{port}"
    origins = [address] if is_local or trusted_hosts() else None
    print(f"{address}/?token={token}" if token else address, flush=True)
    app = make_app(home, accepts, token=token, origins=origins)
    uvicorn.run(app, host=host, port=port, log_level="warning", timeout_graceful_shutdown=2, use_colors=False)


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
