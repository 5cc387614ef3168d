"""`rpg submit`: submits an experiment to the workers of a Prefect server."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from pipelines.cli.options import AsJson, ExperimentFile, Overrides, Pool, Profile


def submit(
    file: ExperimentFile,
    overrides: Overrides = None,
    pool: Pool = "",
    priority: Annotated[
        Literal["high", "normal", "low"], typer.Option(help="Workers take a pool's runs of higher priority first.")
    ] = "normal",
    cron: Annotated[
        str,
        typer.Option(
            metavar='"0 3 * * *"',
            help="Submit it at these times (UTC) instead of now; `rpg schedules` lists and removes.",
        ),
    ] = "",
    profile: Profile = "",
    as_json: AsJson = False,
) -> None:
    """Submits the frozen experiment to the Prefect server of --profile, or to that of `rpg up`, and prints the links.

    With --cron the server's workers submit it at those times, but only if there is unfinished work: a file or a model
    that the spec names has changed, or a run has failed.
    """
    import json
    import shlex
    import sys

    from pipelines.home.home import Home
    from pipelines.jobs import submit as jobs
    from pipelines.planning.weights import weights_in
    from specs.loader import load_runs

    home = Home.from_environment()
    document = load_runs(file, tuple(overrides or ()), weights_of=weights_in(home))
    if cron:
        schedule = jobs.schedule(document, home, profile, cron, pool=pool, priority=priority)
        print(json.dumps(schedule.as_data(), indent=2) if as_json else f"{schedule.experiment}  {schedule.cron}")
        return
    submitted = jobs.submit(document, home, profile, pool=pool, priority=priority)
    if as_json:
        print(json.dumps([entry.as_data() for entry in submitted], indent=2))
        return
    for entry in submitted:
        print(f"{entry.run_id}  {entry.link}")
    if profile:
        name = shlex.quote(document.experiment.name)
        print(f"follow it: rpg watch {name} --profile {shlex.quote(profile)}", file=sys.stderr)
