"""`rpg watch`: shows the live progress of runs."""

from __future__ import annotations

import typer

from pipelines.cli.options import RunsName, ServerRecord


def watch(name: RunsName, profile: ServerRecord = "") -> None:
    """Shows the live progress of a run, or of all current runs of an experiment. Exits 0 if all have finished."""
    from pipelines.cli.follow import watch_runs
    from pipelines.cli.reading import reading
    from pipelines.home.runs import find_runs

    with reading(profile) as record:
        record.refresh(())
        if set(watch_runs(record, find_runs(record.home, name))) != {"finished"}:
            raise typer.Exit(1)
