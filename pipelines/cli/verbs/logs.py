"""`rpg logs`: prints the logs of runs' stages."""

from __future__ import annotations

from typing import Annotated

import typer

from pipelines.cli.options import RunsName, ServerRecord


def logs(
    name: RunsName,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Follow the output until the runs end.")] = False,
    stage: Annotated[str | None, typer.Option(help="Only this stage's log.")] = None,
    profile: ServerRecord = "",
) -> None:
    """Prints the logs of a run's stages, or those of all current runs of an experiment."""
    from pipelines.cli.follow import print_logs
    from pipelines.cli.reading import reading, wait_for_start
    from pipelines.home.runs import find_runs

    with reading(profile) as record:
        record.refresh((), logs=True)
        if follow:
            wait_for_start(record, [name])
        print_logs(record, find_runs(record.home, name), stage=stage, follow=follow)
