"""`rpg show`: one run whole."""

from __future__ import annotations

from typing import Annotated

import typer

from pipelines.cli.options import AsJson, RunId, ServerRecord

_ORIGIN = "Where each value of its spec comes from, and with which code, packages and machine it was made."


def show(
    run: RunId,
    origin: Annotated[bool, typer.Option("--origin", help=_ORIGIN)] = False,
    profile: ServerRecord = "",
    as_json: AsJson = False,
) -> None:
    """One run whole: how it stands, what its spec says, its stages, figures, evaluations and files."""
    import sys

    from pipelines.cli.output import print_json, print_rows
    from pipelines.cli.reading import reading
    from pipelines.cli.show import describe_run, print_run
    from pipelines.home.runs import find_run
    from storage.provenance import COLUMNS, provenance_rows

    with reading(profile) as record:
        record.refresh(logs=True)
        run_id = find_run(record.home, run)
        if origin:
            rows = provenance_rows(record.home.root, record.home.run(run_id))
            columns = COLUMNS if as_json else COLUMNS[1:]
            cells = [[row.get(name, None if as_json else "") for name in columns] for row in rows]
            print_rows(columns, cells, as_json=as_json)
            if not any(row["kind"] == "spec" for row in rows):
                print(f"{run_id} was frozen by an earlier version, which noted no origins", file=sys.stderr)
            return
        described = describe_run(record.home, run_id)
    if as_json:
        print_json(described)
    else:
        print_run(described)
