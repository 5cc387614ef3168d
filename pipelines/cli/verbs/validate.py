"""`rpg validate`: checks spec files. Without --deep it needs no torch, Prefect or DuckDB."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipelines.cli.options import AsJson, Overrides

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specs.document import Document
    from specs.errors import Issue
    from specs.study_document import StudyDocument


def validate(
    files: Annotated[list[Path], typer.Argument(help="Spec files: experiments, studies or evaluations.")],
    overrides: Overrides = None,
    deep: Annotated[
        bool, typer.Option("--deep", help="Also check the data's first rows, the model and its tokenizer.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Checks spec files and describes each. Exits 2 if any file has an error.

    For a valid file, --deep also reports the problems that a stage would meet: columns, tasks of reasoning_gym and
    their settings, architectures, prompts that are too long. `rpg plan` and the verbs that run it make the same check.
    """
    import json
    import sys

    from pipelines.home.home import Home
    from pipelines.jobs.load import load
    from specs.errors import SpecError, render

    findings: list[dict[str, Any]] = []
    issues: list[Issue] = []
    warnings: list[Issue] = []
    for file in files:
        try:
            document = load(file, overrides or (), Home.from_environment())
            odd = [*document.warnings, *(_looked_at(document) if deep else ())]
        except SpecError as error:
            issues += error.issues
            findings.append(_finding(file, issues=error.issues))
        else:
            warnings += odd
            findings.append(_finding(file, document=document, warnings=odd))
    if as_json:
        print(json.dumps(findings, indent=2))
    else:
        for finding in findings:
            if "kind" in finding:
                print(f"{finding['file']}: {finding['kind']} {finding['name']}: {finding['summary']}")
    if warnings:
        print(render(warnings, noun="warning"), file=sys.stderr)
    if issues:
        print(render(issues), file=sys.stderr)
        raise typer.Exit(2)


def _looked_at(document: Document | StudyDocument) -> list[Issue]:
    """Returns the warnings about the data and models of the file's runs. Raises SpecError if they have errors.

    The runs are planned, so that inputs that this home has made, or has checked before, are not checked again.
    """
    from pipelines.home.home import Home
    from pipelines.jobs.preflight import examined
    from pipelines.planning.plan import make_plan
    from specs.document import Document
    from specs.errors import SpecError, in_file_order

    experiment = document if isinstance(document, Document) else document.experiment
    errors, absent, warnings = examined(document, make_plan(experiment, Home.from_environment()).runs, thorough=True)
    if errors := in_file_order([*errors, *absent]):
        raise SpecError(*errors)
    return warnings


def _finding(
    file: Path,
    *,
    issues: Sequence[Issue] = (),
    document: Document | StudyDocument | None = None,
    warnings: Sequence[Issue] = (),
) -> dict[str, Any]:
    from dataclasses import asdict

    finding: dict[str, Any] = {"file": str(file), "valid": not issues}
    if document:
        finding |= _described(document)
        finding["warnings"] = [asdict(warning) for warning in warnings]
    return {**finding, "problems": [asdict(issue) for issue in issues]}


def _described(document: Document | StudyDocument) -> dict[str, Any]:
    """Returns a description of the file, for people (`summary`) and programs."""
    from specs.cells import cell_label, combinations
    from specs.document import Document

    if not isinstance(document, Document):
        study, paths = document.study, list(document.study.parameters)
        summary = f"{_count(study.trials, 'trial')} of {document.experiment.experiment.name} over {', '.join(paths)}"
        about = {"trials": study.trials, "parameters": paths, "experiment": document.experiment.experiment.name}
        return {"kind": "study", "name": study.name, "question": study.question, "summary": summary, **about}
    experiment = document.experiment
    if not experiment.trains:
        measured = combinations(experiment.matrix)
        labels = [label for values in measured if (label := cell_label(experiment.matrix, values))]
        named = {"name": experiment.name, "question": experiment.question, "runs": len(measured), "labels": labels}
        sets = [source.name for source in experiment.data.evaluation]
        listed = f" ({'; '.join(labels)})" if labels else ""
        summary = f"{_count(len(measured), 'run')}{listed} on {', '.join(sets)}"
        return {"kind": "evaluation", **named, "summary": summary}
    cells, seeds = len(combinations(experiment.matrix)), list(experiment.seeds)
    runs = cells * len(seeds)
    parts = [_count(cells, "cell")] if experiment.matrix else []
    summary = f"{_count(runs, 'run')} ({' x '.join([*parts, _count(len(seeds), 'seed')])})"
    about = {"runs": runs, "cells": cells, "seeds": seeds}
    return {"kind": "experiment", "name": experiment.name, "question": experiment.question, "summary": summary, **about}


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
