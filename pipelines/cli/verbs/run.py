"""`rpg run`: an experiment from spec to report, here."""

from __future__ import annotations

from pipelines.cli.options import ExperimentFile, Overrides, Parallel


def run(
    file: ExperimentFile,
    overrides: Overrides = None,
    parallel: Parallel = "1",
) -> None:
    """Runs the experiment here, with progress on stderr. What is done already is reused.

    Called in several shells, they share the runs, and each waits for what another is at. Reports to the server that
    `rpg up` started, else to one of its own for the call, which is not started where nothing is left to do.
    """
    from pipelines.cli.execute import execute
    from specs.loader import load_document

    document = load_document(file, tuple(overrides or ()))
    execute(document, parallel=parallel, overrides=tuple(overrides or ()))
