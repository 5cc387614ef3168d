"""`rpg run`: runs an experiment on this machine, from spec to report."""

from __future__ import annotations

from typing import Annotated

import typer

from pipelines.cli.options import ExperimentFile, Overrides, Parallel

_STAGES = ("data", "base", "train", "evaluate", "report")


def run(
    file: ExperimentFile,
    stage: Annotated[
        str, typer.Argument(metavar="[STAGE]", help="With --fresh: compute this stage and those after it again.")
    ] = "",
    overrides: Overrides = None,
    parallel: Parallel = "1",
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Compute finished results again: all stages, or STAGE and those after it.")
    ] = False,
    accept_code: Annotated[
        bool, typer.Option("--accept-code", help="Reuse finished results although the code has changed since.")
    ] = False,
) -> None:
    """Runs the experiment on this machine, with progress on stderr. Finished work is reused.

    Calls in several shells share the runs, and each waits for work that another holds. Reports to the server that
    `rpg up` started, else to a temporary one, which is not started if everything is finished.

    Results of the same spec from code that differs from the code here are not reused unless --accept-code is given; the
    run's record then says so for each such stage. The code here runs the stages that are still to run.
    """
    import time
    from dataclasses import replace

    from pipelines.cli.execute import execute
    from specs.document import Reuse
    from specs.loader import load_document

    if stage and not fresh:
        raise typer.BadParameter(f"a stage needs --fresh: rpg run {file} --fresh {stage}")
    if stage and stage not in _STAGES:
        raise typer.BadParameter(f"{stage!r} is not a stage: {', '.join(_STAGES)}")
    document = load_document(file, tuple(overrides or ()))
    if fresh or accept_code:
        made_anew = _STAGES[_STAGES.index(stage or _STAGES[0]) :] if fresh else ()
        document = replace(document, reuse=Reuse(accept_code, made_anew, time.time_ns() if fresh else 0))
    execute(document, parallel=parallel)
