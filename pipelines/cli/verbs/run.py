"""`rpg run`: an experiment from spec to report, here."""

from __future__ import annotations

from pipelines.cli.options import ExperimentFile, Overrides


def run(file: ExperimentFile, overrides: Overrides = None) -> None:
    """Runs the experiment here, with progress on stderr. What is done already is reused.

    Reports to the server that `rpg up` started, else to one of its own for the call.
    """
    from pipelines.cli.execute import execute
    from specs.loader import load_document

    document = load_document(file, tuple(overrides or ()))
    execute(document)
