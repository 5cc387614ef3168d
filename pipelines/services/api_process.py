"""One process that serves the Prefect API: `python -m pipelines.services.api_process`, as supervisord starts it.

supervisord opens the port and hands it over as standard input, so that several such processes share one port. Not
Prefect's own `server start --workers`: its processes outlive a killed parent and keep the port, so that nothing can
start it again.
"""

import socket

import uvicorn


def main() -> None:
    """Serves until it is told to end; settings come from the environment."""
    # Built from the descriptor, the socket knows that it is TCP; `uvicorn --fd` would not, and delay small answers.
    with socket.socket(fileno=0) as listener:
        config = uvicorn.Config(
            "prefect.server.api.server:create_app",
            factory=True,
            lifespan="on",
            log_level="warning",
            timeout_graceful_shutdown=2,
        )
        uvicorn.Server(config).run(sockets=[listener])


def prepare_database() -> None:
    """Brings Prefect's database up to date: its tables, and the types of blocks. Settings come from the environment.

    Once, before any process of the server starts: those that do it at the same time get in each other's way and end.
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
