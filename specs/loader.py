"""Spec files, and a run's spec under another objective: what they describe, or SpecError with every issue."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from shlex import quote
from typing import Any, Literal

from pydantic import BaseModel

from specs.bounds import TooLargeError, read_within
from specs.document import Document, checked, experiment_of
from specs.errors import Issue, Position, Positions, SpecError
from specs.evaluation_document import WeightsOf, evaluation_document, no_weights
from specs.model_evaluation import ModelEvaluation
from specs.reading.files import override, read_tree
from specs.reading.tree import positions_of
from specs.reading.validate import parse
from specs.reading.yaml import YamlNode, parse_bytes, parse_text, too_large
from specs.schema.experiment import Experiment
from specs.schema.objective import Objective
from specs.schema.study import Study
from specs.study_document import StudyDocument, checked_study

__all__ = [
    "Document",
    "StudyDocument",
    "load_any",
    "load_document",
    "load_evaluation",
    "load_experiment",
    "load_runs",
    "load_study",
    "load_study_document",
    "parse_objective",
]

FilePath = str | os.PathLike[str]
Kind = Literal["experiment", "study", "evaluation"]
SCHEMAS: Mapping[Kind, type[BaseModel]] = {"experiment": Experiment, "study": Study, "evaluation": ModelEvaluation}
"""What each kind of file describes."""
_NOUNS = {"experiment": "an experiment", "study": "a study", "evaluation": "an evaluation of models as they are"}
_VERBS = {"experiment": "rpg run", "study": "rpg study run", "evaluation": "rpg evaluate"}


def load_document(path: FilePath, overrides: Iterable[str] = ()) -> Document:
    """Reads an experiment's file, with `path.to.field=value` overrides. Raises SpecError with every issue."""
    source, positions = _source(path, overrides, "experiment")
    return checked(source, positions)


def load_experiment(path: FilePath, overrides: Iterable[str] = ()) -> Experiment:
    """The experiment that a file describes. Raises SpecError with every issue as file:line."""
    return load_document(path, overrides).experiment


def load_study_document(path: FilePath, overrides: Iterable[str] = ()) -> StudyDocument:
    """Reads a study's file and that of its experiment. Raises SpecError with every issue as file:line."""
    source, positions = _source(path, overrides, "study")
    return checked_study(source, positions, load_document)


def load_study(path: FilePath, overrides: Iterable[str] = ()) -> Study:
    """The study that a file describes. Raises SpecError with every issue as file:line."""
    return load_study_document(path, overrides).study


def load_evaluation(path: FilePath, overrides: Iterable[str] = (), *, weights_of: WeightsOf = no_weights) -> Document:
    """Reads the file of an evaluation of models as they are. Raises SpecError with every issue as file:line.

    Args:
        weights_of: finds the weights of the runs that the file names.
    """
    source, positions = _source(path, overrides, "evaluation")
    return evaluation_document(source, positions, weights_of)


def load_runs(path: FilePath, overrides: Iterable[str] = (), *, weights_of: WeightsOf = no_weights) -> Document:
    """Reads an experiment's or an evaluation's file: either describes runs."""
    if kind_of_file(path) == "evaluation":
        return load_evaluation(path, overrides, weights_of=weights_of)
    return load_document(path, overrides)


def load_any(
    path: FilePath, overrides: Iterable[str] = (), *, weights_of: WeightsOf = no_weights
) -> Document | StudyDocument:
    """Reads a file of any kind."""
    if kind_of_file(path) == "study":
        return load_study_document(path, overrides)
    return load_runs(path, overrides, weights_of=weights_of)


def kind_of_file(path: FilePath) -> Kind:
    """Kind of document in a file. Raises SpecError where it cannot be read."""
    return _kind(read_tree(os.fspath(path), Experiment).plain())


def _kind(source: Mapping[str, Any]) -> Kind:
    """Kind of document, by the keys that only its kind has."""
    if "experiment" in source or "parameters" in source:
        return "study"
    return "evaluation" if "models" in source else "experiment"


def parse_objective(data: Mapping[str, Any]) -> Objective:
    """The objective that a mapping describes, validated as in a file. Raises SpecError."""
    objective, issues = parse(Objective, dict(data))
    if issues:
        raise SpecError(*(replace(issue, path=("objective", *issue.path)) for issue in issues))
    assert isinstance(objective, BaseModel)
    return objective  # type: ignore[return-value]


def _source(path: FilePath, overrides: Iterable[str], wanted: Kind) -> tuple[dict[str, Any], Positions]:
    """Source of the file, if it is of the wanted kind."""
    schema = SCHEMAS[wanted]
    root = read_tree(os.fspath(path), schema)
    if (kind := _kind(root.plain())) != wanted:
        message = f"this is {_NOUNS[kind]}, not {_NOUNS[wanted]}"
        raise SpecError(Issue(message, file=os.fspath(path), hint=f"`{_VERBS[kind]} {quote(os.fspath(path))}`"))
    issues: list[Issue] = []
    for setting in overrides:
        try:
            root = override(root, setting, schema)
        except SpecError as error:
            issues += error.issues
    if issues:
        raise SpecError(*issues)
    return root.plain(), positions_of(root)


_SECTIONS = ("objective", "advantage")


def with_objective(spec: Mapping[str, Any], given: str, overrides: Iterable[str] = ()) -> Experiment:
    """The experiment of a run's resolved spec under another objective.

    The advantage is the one that comes with the objective: what a spec file says of it, else the run's own where the
    objective is of the run's type, else the objective's published setting; overrides last.

    Args:
        given: a mapping (`{type: grpo}`), a file that holds one, or an experiment's spec file. Empty: the run's own.
        overrides: `objective.kl_coef=0.1`, `advantage.scale=none`.
    Raises:
        SpecError: every issue with what was given.
    """
    own = YamlNode.of(spec, Position("the run's spec", 0, ""))
    assert isinstance(own.value, dict)
    sections = _given(given) if given else {}
    kept = dict(own.value)
    if "objective" in sections and _type(sections["objective"]) != _type(own.value["objective"]):
        del kept["advantage"]
    root = YamlNode({**kept, **sections}, own.at)
    for setting in overrides:
        if setting.partition(".")[0] not in _SECTIONS:
            message, allowed = "a replay changes these alone", "objective.FIELD=VALUE, advantage.FIELD=VALUE"
            raise SpecError(Issue(message, file=f"--set {setting}", allowed=allowed))
        root = override(root, setting, Experiment)
    return experiment_of(root.plain(), positions_of(root))


def _given(text: str) -> dict[str, YamlNode]:
    """The sections that a mapping or a file gives."""
    if text.lstrip().startswith("{"):
        at = Position(f"--objective {text}", 0, "")
        return {"objective": parse_text(text, lambda _line: at) or YamlNode({}, at)}
    if os.path.isfile(text):
        try:
            root = parse_bytes(read_within(text), text)
        except TooLargeError:
            raise SpecError(too_large(text)) from None
        if isinstance(root.value, dict) and "type" in root.value:
            return {"objective": root}
    root = read_tree(text, Experiment)
    assert isinstance(root.value, dict)
    if "objective" not in root.value:
        raise SpecError(
            Issue("has no objective", file=text, allowed="an experiment's spec, or the fields of an objective")
        )
    return {name: root.value[name] for name in _SECTIONS if name in root.value}


def _type(objective: YamlNode) -> Any:
    plain = objective.plain()
    return plain.get("type", "rpg") if isinstance(plain, dict) else None
