"""`rpg worker`: work for a pool, in the foreground."""

from __future__ import annotations

from typing import Annotated

import typer

from pipelines.cli.options import Profile


def worker(
    pool: Annotated[str, typer.Option(help="The work pool to take flow runs from.")] = "rpg", profile: Profile = ""
) -> None:
    """Takes submitted runs from a pool and executes them here, one at a time, until it is interrupted."""
    from pipelines.home import Home
    from pipelines.services.client import api_url
    from pipelines.services.worker import run_worker

    home = Home.from_environment()
    run_worker(home, api_url(home, profile), pool)
