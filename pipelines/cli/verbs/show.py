"""`rpg show`: one run whole."""

from __future__ import annotations

from pipelines.cli.options import AsJson, RunId


def show(run: RunId, as_json: AsJson = False) -> None:
    """One run whole: how it stands, what its spec says, its stages, figures, evaluations and files."""
    from pipelines.cli.output import print_json
    from pipelines.cli.show import describe_run, print_run
    from pipelines.home import Home
    from pipelines.runs import find_run

    home = Home.from_environment()
    described = describe_run(home, find_run(home, run))
    if as_json:
        print_json(described)
    else:
        print_run(described)
