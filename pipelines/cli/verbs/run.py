"""`rpg run`: an experiment from spec to report, here."""

from __future__ import annotations

from typing import Annotated

import typer

from pipelines.cli.options import ExperimentFile, Overrides


def _number_or_auto(text: str) -> str:
    if text != "auto" and not (text.isdecimal() and int(text) > 0):
        raise typer.BadParameter("a number from 1 on, or auto")
    return text


def run(
    file: ExperimentFile,
    overrides: Overrides = None,
    parallel: Annotated[
        str,
        typer.Option(
            "--parallel",
            metavar="N|auto",
            callback=_number_or_auto,
            help="Runs at a time; auto: as many as GPU slots are free for, on a CPU 1.",
        ),
    ] = "1",
) -> None:
    """Runs the experiment here, with progress on stderr. What is done already is reused.

    Called in several shells, they share the runs, and each waits for what another is at. Reports to the server that
    `rpg up` started, else to one of its own for the call, which is not started where nothing is left to do.
    """
    from pipelines.cli.execute import execute
    from specs.loader import load_document

    document = load_document(file, tuple(overrides or ()))
    execute(document, parallel=parallel, overrides=tuple(overrides or ()))
