"""`rpg evaluate`: evaluates existing models on evaluation sets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipelines.cli.options import AsJson, Overrides, Parallel


def evaluate(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The evaluation's file.")],
    overrides: Overrides = None,
    parallel: Parallel = "1",
    as_json: AsJson = False,
) -> None:
    """Evaluates existing models (Hub ids, directories, checkpoints of runs), each with each sampling setting.

    Each evaluation is a recorded run: `rpg runs`, `rpg compare`, `rpg report` and `rpg sql` include it, and finished
    evaluations are not repeated.
    """
    from pipelines.cli.execute import execute
    from pipelines.home.home import Home
    from pipelines.planning.weights import weights_in
    from specs.loader import load_evaluation

    document = load_evaluation(file, tuple(overrides or ()), weights_of=weights_in(Home.from_environment()))
    execute(document, parallel=parallel, as_json=as_json)
