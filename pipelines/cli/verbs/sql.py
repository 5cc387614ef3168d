"""`rpg sql`: one query, or a prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipelines.cli.options import ServerRecord
from pipelines.cli.output import Format


def sql(
    query: Annotated[str | None, typer.Argument(metavar="[QUERY]", help="One statement. Without it, a prompt.")] = None,
    chosen: Annotated[
        Format | None, typer.Option("--format", help="How to write rows; FILE's suffix decides otherwise.")
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write to FILE.")] = None,
    profile: ServerRecord = "",
) -> None:
    """SQL over everything recorded, while training runs too."""
    import sys

    from pipelines.cli.output import write_result
    from pipelines.cli.prompt import run_prompt
    from pipelines.cli.reading import reading
    from pipelines.remote.mirror import LARGE, SMALL
    from storage import Store

    with reading(profile) as record:
        record.refresh(SMALL.union(table for table in LARGE if query is None or table in query.lower()))
        if query is None:
            run_prompt(record.home, chosen or Format.table)
            return
        with Store.open(record.home.root) as store:
            result = store.query(query)
    for warning in result.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    write_result(result, chosen, output)
