"""`rpg evaluate`: models as they are, measured on evaluation sets."""

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
    """Measures models as they are (Hub ids, directories, checkpoints of runs), each with each sampling setting.

    Each is a run on record: `rpg runs`, `rpg compare`, `rpg report` and `rpg sql` know it, and what is measured already
    is not measured again.
    """
    from pipelines.cli.execute import execute
    from pipelines.home.home import Home
    from pipelines.planning.weights import weights_in
    from specs.loader import load_evaluation

    document = load_evaluation(file, tuple(overrides or ()), weights_of=weights_in(Home.from_environment()))
    execute(document, parallel=parallel, as_json=as_json)
