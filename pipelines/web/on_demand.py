"""`python -m pipelines.web.on_demand`: the record of RPG_HOME on a listening socket, its standard input, from the first
visitor on.

Until then the process has imported next to nothing. `rpg run` starts it, for the link of its live page.
"""

import os
import select
import socket

ADDRESS = "RPG_PAGE_ADDRESS"
"""Environment variable with the address of the socket: http://127.0.0.1:PORT."""
TOKEN = "RPG_PAGE_TOKEN"
"""Environment variable with the token that opens the pages."""


def main() -> None:
    """Waits for the first visitor and serves until SIGTERM."""
    with socket.socket(fileno=0) as listener:
        select.select([listener], [], [])
        import uvicorn

        from pipelines.home.home import Home
        from pipelines.prefect.server.credentials import of_home
        from pipelines.web.app import make_app

        home, address, token = Home.from_environment(), os.environ[ADDRESS], os.environ[TOKEN]
        app = make_app(home, of_home(home), token=token, origins=[address])
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=2, use_colors=False)
        uvicorn.Server(config).run([listener])


if __name__ == "__main__":
    main()
