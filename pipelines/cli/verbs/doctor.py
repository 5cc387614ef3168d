"""`rpg doctor`: what is installed, reachable, misconfigured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipelines.cli.options import AsJson


def doctor(
    file: Annotated[Path | None, typer.Argument(help="A spec: what its launcher reaches is looked at too.")] = None,
    as_json: AsJson = False,
) -> None:
    """Says what is installed, reachable and misconfigured. Exits 1 where something that is needed is broken."""
    import json
    from dataclasses import asdict

    from pipelines.doctor import examine
    from pipelines.home import Home
    from specs.loader import load_experiment

    findings = examine(Home.from_environment(), load_experiment(file) if file else None)
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        signs = {"ok": "ok     ", "note": "note   ", "broken": "BROKEN "}
        for finding in findings:
            print(f"{signs[finding.status]} {finding.name:<18} {finding.message}")
    if any(finding.status == "broken" for finding in findings):
        raise typer.Exit(1)
