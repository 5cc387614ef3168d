"""`rpg show`: one run whole."""

from __future__ import annotations

from pipelines.cli.options import AsJson, RunId, ServerRecord


def show(run: RunId, profile: ServerRecord = "", as_json: AsJson = False) -> None:
    """One run whole: how it stands, what its spec says, its stages, figures, evaluations and files."""
    from pipelines.cli.output import print_json
    from pipelines.cli.reading import reading
    from pipelines.cli.show import describe_run, print_run
    from pipelines.runs import find_run

    with reading(profile) as record:
        record.refresh(logs=True)
        described = describe_run(record.home, find_run(record.home, run))
    if as_json:
        print_json(described)
    else:
        print_run(described)
