"""`rpg cancel`: stops a run after the current step."""

from __future__ import annotations

from typing import Annotated

import typer

from pipelines.cli.options import RunsName


def cancel(
    name: RunsName,
    grace: Annotated[float, typer.Option(help="Seconds to wait for the step to end before stopping within it.")] = 5.0,
    profile: Annotated[
        str,
        typer.Option(help="Cancel on a server, including other users' runs: a Prefect API's URL or a profile's name."),
    ] = "",
) -> None:
    """Stops a run after the current step or after --grace seconds, whichever is first; a study as `rpg study cancel`.

    A submitted run is stopped wherever a worker executes it. Exits 1 if it did not stop.
    """
    import sys

    from pipelines.home.home import Home
    from pipelines.home.runs import find_run, is_run
    from pipelines.home.versions import runs_of
    from pipelines.prefect.flows.cancel import cancel_experiment, cancel_on_server, cancel_run
    from pipelines.prefect.flows.stop import NotStoppedError
    from pipelines.studies.workers import cancel_study, study_named

    home = Home.from_environment()
    try:
        if not is_run(home, name) and (study := study_named(home, name, profile)):
            print(cancel_study(home, study, grace, profile), file=sys.stderr)
        elif profile:
            for line in cancel_on_server(home, profile, name, grace):
                print(line, file=sys.stderr)
        elif not is_run(home, name) and runs_of(home, name):
            for line in cancel_experiment(home, name, grace):
                print(line, file=sys.stderr)
        else:
            print(cancel_run(home, find_run(home, name), grace), file=sys.stderr)
    except NotStoppedError as error:
        print(error, file=sys.stderr)
        raise typer.Exit(1) from None
