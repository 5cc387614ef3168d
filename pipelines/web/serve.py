"""A server for the web application, which runs in this process until it is ended."""

import ipaddress
import secrets
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from urllib.parse import urlencode

from pipelines.home.home import Home
from pipelines.launchers.network import bound_port, free_port
from pipelines.prefect.server.api import running_services
from pipelines.prefect.server.credentials import SERVER_AUTH_VARIABLE, asked_for, of_home
from pipelines.prefect.server.settings import trusted_hosts
from pipelines.processes.supervisor import start
from pipelines.terminal.console import SafeConsole
from pipelines.web import on_demand
from specs.errors import Issue, RpgError, SpecError

DEFAULT_PORT = 4202


def live_path(names: Sequence[str]) -> str:
    """Returns the path of the live page of experiments, studies and runs; without names, of those that train now."""
    return f"/live?{urlencode([('of', name) for name in names])}".removesuffix("?")


def served_live(home: Home, names: Sequence[str]) -> str:
    """Returns the link of the live page on the record's server that `rpg up` started; empty if no such server is up."""
    services = running_services(home)
    return f"{services.record_url}{live_path(names)}" if services and services.record_url else ""


@contextmanager
def live_link(home: Home, name: str) -> Iterator[str]:
    """Yields what leads to the live page of an experiment or a study until the block ends: a link if the record's
    server of `rpg up` is up.

    In a terminal or a notebook it is otherwise the link of a process that starts to serve at its first visitor. In a
    log, which others may read, it is the command that serves the page.
    """
    console = SafeConsole(stderr=True)
    if link := served_live(home, [name]):
        yield link
        return
    if not (console.is_terminal or console.is_jupyter):
        yield f"rpg watch --web {name}"
        return
    listener, held = bound_port()
    token = secrets.token_urlsafe(24)
    address = f"http://127.0.0.1:{held.getsockname()[1]}"
    environment = {"RPG_HOME": str(home.root), on_demand.ADDRESS: address, on_demand.TOKEN: token}
    with held, listener:
        listener.listen()
        command = (sys.executable, "-P", "-m", on_demand.__name__)
        process = start(command, home.logs / "live-page.log", environment=environment, standard_input=listener.fileno())
        listener.close()  # it is the process's now
        try:
            yield f"{address}{live_path([name])}&token={token}"
        finally:
            process.terminate()
            process.wait()


def serve_here(home: Home, host: str, port: int, path: str = "") -> None:
    """Serves the home's record at a port, 0 for a free one, and prints the address of one of its pages; see `serve`.

    Raises:
        RpgError: the port is in use.
    """
    chosen = free_port(port or DEFAULT_PORT)
    if port and chosen != port:
        hint = "name another port, or omit --port to use a free one"
        raise RpgError(f"port {port} is in use\n  hint: {hint}")
    serve(home, host, chosen, path)


def serve(home: Home, host: str, port: int, path: str = "") -> None:
    """Prints the address of a page and serves the home's record until SIGINT or SIGTERM.

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
    page = f"{address}{path or '/'}"
    print(f"{page}{'&' if '?' in page else '?'}token={token}" if token else page.removesuffix("/"), flush=True)
    app = make_app(home, accepts, token=token, origins=origins)
    uvicorn.run(app, host=host, port=port, log_level="warning", timeout_graceful_shutdown=2, use_colors=False)


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
