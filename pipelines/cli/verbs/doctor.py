"""`rpg doctor`: reports the state of the installation; with `--gpu`, whether the GPUs can train."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipelines.cli.options import AsJson, Overrides

if TYPE_CHECKING:
    from specs.schema.experiment import Experiment


def doctor(
    file: Annotated[
        Path | None, typer.Argument(help="A spec: also check the machines and services that its launcher uses.")
    ] = None,
    gpu: Annotated[
        bool,
        typer.Option(
            "--gpu", help="Test real work on this node's GPUs, or on the spec's machines; this takes minutes."
        ),
    ] = False,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Reports installed packages, reachable services and misconfigurations. Exits 1 if a required part is broken."""
    if file is None and overrides:
        raise typer.BadParameter("name the spec file, of which this option overrides a field", param_hint="--set")
    from specs.loader import load_experiment

    experiment = load_experiment(file, overrides or ()) if file else None
    healthy = _check_gpus(experiment, as_json) if gpu else _examine(experiment, as_json)
    if not healthy:
        raise typer.Exit(1)


def _examine(experiment: Experiment | None, as_json: bool) -> bool:
    """Prints the findings of `rpg doctor`. Returns whether every required part works."""
    import json
    from dataclasses import asdict

    from pipelines.doctor.installation import examine
    from pipelines.home.home import Home

    findings = examine(Home.from_environment(), experiment)
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        signs = {"ok": "ok     ", "note": "note   ", "broken": "BROKEN "}
        for finding in findings:
            print(f"{signs[finding.status]} {finding.name:<18} {finding.message}")
    return all(finding.status != "broken" for finding in findings)


def _check_gpus(experiment: Experiment | None, as_json: bool) -> bool:
    """Prints the results of `rpg doctor --gpu`. Returns whether no check failed."""
    import json
    import sys
    from dataclasses import asdict

    from pipelines.cli.gpu_table import lines
    from pipelines.doctor.gpu_checks.catalogue import CHECKS
    from pipelines.doctor.gpu_checks.check import Result
    from pipelines.doctor.gpu_checks.session import NoGpuError, check_gpus
    from pipelines.home.home import Home

    if experiment and experiment.resources.device == "cpu":
        print("on CPUs, because of the spec's `resources.device`; this tests no GPU", file=sys.stderr)

    def say(result: Result) -> None:
        if result.rank == 0:
            print(f"{result.check}: {result.status} after {result.seconds:.0f} s", file=sys.stderr)

    try:
        results = check_gpus(Home.from_environment(), experiment, on_result=say)
    except NoGpuError as error:
        print(error, file=sys.stderr)
        return False
    if as_json:
        remedies = {check.name: check.remedy for check in CHECKS}
        failed = {"failed"}
        shown = [asdict(each) | ({"remedy": remedies[each.check]} if each.status in failed else {}) for each in results]
        print(json.dumps(shown, indent=2))
    else:
        print("\n".join(lines(results)))
    return all(result.status != "failed" for result in results)
