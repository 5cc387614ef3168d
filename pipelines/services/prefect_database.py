"""Brings Prefect's database up to date: `python -m pipelines.services.prefect_database`.

Once, before any process of a Prefect server starts: processes that do it at the same time get in each other's way, and
all of them but one end.
"""

import asyncio

from prefect.server.database import provide_database_interface
from prefect.server.models.block_registration import run_block_auto_registration


async def bring_up_to_date() -> None:
    """Makes or migrates the tables, and registers the block types, in the database that the environment names."""
    database = provide_database_interface()
    await database.create_db()
    async with await database.session() as session:
        await run_block_auto_registration(session=session)


if __name__ == "__main__":
    asyncio.run(bring_up_to_date())
