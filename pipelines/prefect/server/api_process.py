"""One process that serves the Prefect API: `python -m pipelines.prefect.server.api_process`.

Its standard input is the listening socket. The process that starts it opens the port first, so that no other user can
take it, and several API processes under supervisord share one socket. Prefect's own `server start --workers` is not
used: its processes outlive a killed parent and keep the port, so that no server can start on it again. In a container,
which has its own ports and ends with its first process, `python -m pipelines.prefect.server.api_process PORT` opens the
port and serves it by several processes.
"""

import os
import socket
import sys
from urllib.parse import urlsplit

import uvicorn
import uvicorn.supervisors
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pipelines.prefect.server import outage_log
from pipelines.prefect.server.proxy import behind_proxy
from pipelines.prefect.server.settings import API_PROCESSES, PUBLIC_VARIABLE
from specs.machine.collecting import collect_rarely


def create_app() -> ASGIApp:
    """Returns Prefect's API and dashboard behind our API proxy; its headers stop the pages from calling other sites.

    With analytics switched off, the dashboard still asks its analytics company for settings at every page. The process
    logs an outage as one line.
    """
    outage_log.install()
    from prefect.server.api.server import create_app as create_prefect_app

    return behind_proxy(_confined(create_prefect_app()))


def _confined(app: ASGIApp) -> ASGIApp:
    api = urlsplit(os.environ.get(PUBLIC_VARIABLE, ""))
    own = f"'self' {api.scheme}://{api.netloc}" if api.netloc else "'self'"
    policy = f"default-src {own} 'unsafe-inline' 'unsafe-eval' data: blob:; frame-ancestors 'none'; base-uri 'none'"

    async def confined(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_confined(message: Message) -> None:
            if message["type"] == "http.response.start":
                header = (b"content-security-policy", policy.encode())
                message["headers"] = [*message.get("headers", ()), header]
            await send(message)

        await app(scope, receive, send_confined)

    return confined


def main() -> None:
    """Serves until it is asked to end; settings come from the environment."""
    collect_rarely()
    config = uvicorn.Config(
        "pipelines.prefect.server.api_process:create_app",
        factory=True,
        lifespan="on",
        log_level="warning",
        timeout_graceful_shutdown=2,
        workers=API_PROCESSES,
    )
    opened = socket.create_server(("", int(sys.argv[1]))).detach() if sys.argv[1:] else 0
    # Built from the descriptor, the socket knows that it is TCP; uvicorn's own would not, and delay small answers.
    with socket.socket(fileno=opened) as listener:
        if sys.argv[1:]:
            uvicorn.supervisors.Multiprocess(config, [listener]).run()
        else:
            uvicorn.Server(config).run([listener])


def prepare_database() -> None:
    """Brings Prefect's database up to date: its tables, and the types of blocks. Settings come from the environment.

    Call it once, before any process of the server starts: concurrent migrations fail.
    """
    import asyncio

    from prefect.server.database import provide_database_interface
    from prefect.server.models.block_registration import run_block_auto_registration

    async def prepare() -> None:
        database = provide_database_interface()
        await database.create_db()
        async with await database.session() as session:
            await run_block_auto_registration(session=session)

    asyncio.run(prepare())


if __name__ == "__main__":
    main()
