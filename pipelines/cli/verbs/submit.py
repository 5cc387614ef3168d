"""`rpg submit`: an experiment for the workers of a Prefect server."""

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
    profile: Profile = "",
    as_json: AsJson = False,
) -> None:
    """Hands the frozen experiment to the Prefect server of --profile, or to that of `rpg up`, and prints the links."""
    import json
    import sys

    from pipelines.home import Home
    from pipelines.services.submit import submit_document
    from specs.loader import load_document

    submitted = submit_document(
        load_document(file, tuple(overrides or ())),
        Home.from_environment(),
        profile,
        pool=pool,
        priority=priority,
        say=lambda note: print(note, file=sys.stderr),
    )
    if as_json:
        print(json.dumps([entry.as_data() for entry in submitted], indent=2))
        return
    for entry in submitted:
        print(f"{entry.run_id}  {entry.link}")
