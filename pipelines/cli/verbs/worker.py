"""`rpg worker`: executes submitted runs of a pool, in the foreground."""

from __future__ import annotations

from typing import Annotated

import typer

from pipelines.cli.options import Profile


def worker(
    pool: Annotated[
        str, typer.Option(help="Work pool to take flow runs from; created if the server has no such pool.")
    ] = "rpg",
    limit: Annotated[
        str,
        typer.Option(
            metavar="N|auto",
            help="Number of concurrent runs; auto: one per GPU slot of this machine, or one without GPUs.",
        ),
    ] = "1",
    grace: Annotated[
        float,
        typer.Option(
            min=0.0,
            envvar="RPG_WORKER_GRACE",
            metavar="SECONDS",
            help="Seconds that a run has to save its state after the worker is asked to stop or the run is suspended.",
        ),
    ] = 60.0,
    profile: Profile = "",
) -> None:
    """Takes submitted runs from a pool and executes them here until it is interrupted.

    A run's stages lease the GPU slots that they need. If --limit allows more runs than there are slots for, they wait.
    """
    from pipelines.home.home import Home
    from pipelines.prefect.flows.workers.worker import run_worker
    from pipelines.prefect.server.client import api_url
    from specs.machine.gpu_slots import slots_here

    if limit != "auto" and not (limit.isdecimal() and int(limit)):
        raise typer.BadParameter("must be a number from 1 on, or auto", param_hint="--limit")
    home = Home.from_environment()
    runs_at_once = int(limit) if limit != "auto" else len(slots_here()) or 1
    run_worker(home, api_url(home, profile), pool, runs_at_once, grace)
