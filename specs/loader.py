"""YAML text -> Experiment or Study, or SpecError with everything that is wrong, each with its line."""

import os
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel

from specs.document import Document, checked
from specs.errors import Problem, SpecError
from specs.positions import Path, Positions
from specs.reading import override, read_tree
from specs.schema.experiment import Experiment
from specs.schema.objective import Objective
from specs.schema.study import Study
from specs.study_document import StudyDocument, checked_study
from specs.translate import parse
from specs.tree import positions_of

__all__ = [
    "Document",
    "StudyDocument",
    "load_document",
    "load_either",
    "load_experiment",
    "load_study",
    "load_study_document",
    "parse_objective",
]

FilePath = str | os.PathLike[str]


def load_document(path: FilePath, overrides: Iterable[str] = ()) -> Document:
    """Reads an experiment's file, with `path.to.field=value` overrides. Raises SpecError with every problem."""
    source, positions = _source(path, overrides, Experiment)
    if _is_study(source):
        problem = Problem("this is a study, not an experiment", file=os.fspath(path), hint=f"`rpg study run {path}`")
        raise SpecError(problem)
    return checked(source, positions)


def load_experiment(path: FilePath, overrides: Iterable[str] = ()) -> Experiment:
    """The experiment that a file describes. Raises SpecError with every problem as file:line."""
    return load_document(path, overrides).experiment


def load_study_document(path: FilePath, overrides: Iterable[str] = ()) -> StudyDocument:
    """Reads a study's file and that of its experiment. Raises SpecError with every problem as file:line."""
    source, positions = _source(path, overrides, Study)
    if not _is_study(source):
        problem = Problem("this is an experiment, not a study", file=os.fspath(path), hint=f"`rpg run {path}`")
        raise SpecError(problem)
    return checked_study(source, positions, load_document)


def load_study(path: FilePath, overrides: Iterable[str] = ()) -> Study:
    """The study that a file describes. Raises SpecError with every problem as file:line."""
    return load_study_document(path, overrides).study


def load_either(path: FilePath, overrides: Iterable[str] = ()) -> Document | StudyDocument:
    """Reads whichever of the two the file holds."""
    is_study = _is_study(read_tree(os.fspath(path), Experiment).plain())
    return load_study_document(path, overrides) if is_study else load_document(path, overrides)


def _is_study(source: Mapping[str, Any]) -> bool:
    return "experiment" in source or "parameters" in source


def parse_objective(data: Mapping[str, Any]) -> Objective:
    """The objective that a mapping describes, validated as in a file. Raises SpecError."""
    objective, problems = parse(Objective, dict(data))
    if problems:
        raise SpecError(*(_below(problem, ("objective",)) for problem in problems))
    assert isinstance(objective, BaseModel)
    return objective  # type: ignore[return-value]


def _below(problem: Problem, prefix: Path) -> Problem:
    return Problem(problem.message, (*prefix, *problem.path), problem.given, problem.allowed, problem.hint)


def _source(path: FilePath, overrides: Iterable[str], schema: type[BaseModel]) -> tuple[dict[str, Any], Positions]:
    root = read_tree(os.fspath(path), schema)
    problems: list[Problem] = []
    for setting in overrides:
        try:
            root = override(root, setting, schema)
        except SpecError as error:
            problems += error.problems
    if problems:
        raise SpecError(*problems)
    return root.plain(), positions_of(root)
