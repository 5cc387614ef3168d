"""`rpg validate`, `rpg schema`, `rpg init`: spec files themselves. Nothing here needs torch, Prefect or DuckDB."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from specs.document import Document
    from specs.study_document import StudyDocument

STARTER = "experiment.yaml"
IGNORED = "# What rpg records, and can make again.\n.rpg/\n"


class Kind(enum.StrEnum):
    """What a spec file describes."""

    experiment = "experiment"
    study = "study"


def register(app: typer.Typer) -> None:
    """Adds `validate`, `schema` and `init`."""
    app.command("validate", short_help="Checks spec files.")(validate)
    app.command("schema", short_help="Prints the JSON Schema, for editor completion.")(schema)
    app.command("init", short_help="Writes a commented spec to start from.")(init)


def validate(
    files: Annotated[list[Path], typer.Argument(help="Spec files: experiments or studies.")],
    overrides: Annotated[list[str] | None, typer.Option("--set", help="path.to.field=value")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Checks spec files and says what each describes. Exit code 2 if anything is wrong with one."""
    import json
    import sys

    from specs.errors import Issue, SpecError, render
    from specs.loader import load_either

    findings: list[dict[str, Any]] = []
    problems: list[Issue] = []
    warnings: list[Issue] = []
    for file in files:
        try:
            document = load_either(file, tuple(overrides or ()))
        except SpecError as error:
            problems += error.issues
            findings.append(_finding(file, problems=error.issues))
        else:
            warnings += document.warnings
            findings.append(_finding(file, document=document, problems=()))
    if as_json:
        print(json.dumps(findings, indent=2))
    else:
        for finding in findings:
            if "kind" in finding:
                print(f"{finding['file']}: {finding['kind']} {finding['name']}: {finding['summary']}")
    if warnings:
        print(render(warnings, noun="warning"), file=sys.stderr)
    if problems:
        print(render(problems), file=sys.stderr)
        raise typer.Exit(2)


def _finding(
    file: Path, *, problems: tuple[Any, ...], document: Document | StudyDocument | None = None
) -> dict[str, Any]:
    from dataclasses import asdict

    finding: dict[str, Any] = {"file": str(file), "valid": not problems}
    if document:
        finding |= _described(document)
        finding["warnings"] = [asdict(warning) for warning in document.warnings]
    return {**finding, "problems": [asdict(problem) for problem in problems]}


def _described(document: Document | StudyDocument) -> dict[str, Any]:
    """What the file is, for people (`summary`) and programs."""
    from specs.document import Document, expand

    if not isinstance(document, Document):
        study, paths = document.study, list(document.study.parameters)
        summary = f"{_count(study.trials, 'trial')} of {document.experiment.experiment.name} over {', '.join(paths)}"
        about = {"trials": study.trials, "parameters": paths, "experiment": document.experiment.experiment.name}
        return {"kind": "study", "name": study.name, "question": study.question, "summary": summary, **about}
    experiment = document.experiment
    runs, seeds = len(expand(document)), list(experiment.seeds)
    cells = runs // len(seeds)
    parts = [_count(cells, "cell")] if experiment.matrix else []
    summary = f"{_count(runs, 'run')} ({' x '.join([*parts, _count(len(seeds), 'seed')])})"
    about = {"runs": runs, "cells": cells, "seeds": seeds}
    return {"kind": "experiment", "name": experiment.name, "question": experiment.question, "summary": summary, **about}


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def schema(kind: Annotated[Kind, typer.Argument(help="experiment or study")] = Kind.experiment) -> None:
    """Prints the JSON Schema of a spec file, every field with its documentation."""
    import json

    from specs.json_schema import json_schema

    print(json.dumps(json_schema(kind.value), indent=2))


def init(directory: Annotated[Path, typer.Argument(help="Where to write.")] = Path()) -> None:
    """Writes a commented spec to start from, and a .gitignore. Overwrites nothing."""
    import specs
    from specs.errors import Issue, SpecError

    starter = Path(specs.__file__).parent / "experiments" / "starter.yaml"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        written = [
            _write_new(directory / STARTER, starter.read_text("utf-8")),
            _write_new(directory / ".gitignore", IGNORED),
        ]
    except OSError as error:
        raise SpecError(Issue(f"cannot be written: {error.strerror}", file=str(error.filename or directory))) from None
    if written[0]:
        print(f"next: rpg run {directory / STARTER}")


def _write_new(path: Path, text: str) -> bool:
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        print(f"kept  {path}, which exists")
        return False
    print(f"wrote {path}")
    return True
