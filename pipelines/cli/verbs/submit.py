"""`rpg submit`: an experiment for the workers of a Prefect server."""

from __future__ import annotations

from pipelines.cli.options import AsJson, ExperimentFile, Overrides, Profile


def submit(
    file: ExperimentFile,
    overrides: Overrides = None,
    profile: Profile = "",
    as_json: AsJson = False,
) -> None:
    """Hands the frozen experiment to the Prefect server of --profile, or to that of `rpg up`, and prints the links."""
    import json

    from pipelines.home import Home
    from pipelines.services.submit import submit_document
    from specs.loader import load_document

    submitted = submit_document(load_document(file, tuple(overrides or ())), Home.from_environment(), profile)
    if as_json:
        print(json.dumps([entry.as_data() for entry in submitted], indent=2))
        return
    for entry in submitted:
        print(f"{entry.run_id}  {entry.link}")
