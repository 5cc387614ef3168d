"""Reading of spec files, and of a run's spec under another objective. Raises SpecError with every issue."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from shlex import quote
from typing import Any, Literal, TypeVar

from pydantic import BaseModel

from specs.bounds import TooLargeError, read_within
from specs.cells import setting_order
from specs.document import Document, checked, experiment_of
from specs.errors import Issue, Position, Positions, SpecError
from specs.evaluation_document import WeightsOf, evaluation_document, no_weights
from specs.model_evaluation import ModelEvaluation
from specs.reading.files import override, override_value, read_tree, tree_of
from specs.reading.reward_files import NONE_OWN, OwnRewards, with_reward_files
from specs.reading.tree import positions_of
from specs.reading.validate import parse
from specs.reading.yaml import YamlNode, parse_bytes, parse_text, too_large
from specs.schema.experiment import Experiment
from specs.schema.fields import split
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
Spec = FilePath | Mapping[str, Any]
"""A file, or a mapping with the content of one."""
Overrides = Iterable[str] | Mapping[str, Any]
"""`path.to.field=value` each, the value as YAML; or path -> value."""
Kind = Literal["experiment", "study", "evaluation"]
SCHEMAS: Mapping[Kind, type[BaseModel]] = {"experiment": Experiment, "study": Study, "evaluation": ModelEvaluation}
"""Kind of file -> its schema."""
_NOUNS = {"experiment": "an experiment", "study": "a study", "evaluation": "an evaluation of models as they are"}
_VERBS = {"experiment": "rpg run", "study": "rpg study run", "evaluation": "rpg evaluate"}


def load_document(spec: Spec, overrides: Overrides = (), *, rewards: OwnRewards = NONE_OWN) -> Document:
    """Reads an experiment's file, with `path.to.field=value` overrides. Raises SpecError with every issue.

    Args:
        rewards: see `load_any`.
    """
    source, positions = _source(spec, overrides, "experiment", rewards)
    return checked(source, positions)


def load_experiment(spec: Spec, overrides: Overrides = ()) -> Experiment:
    """Returns the experiment that a file describes. Raises SpecError with every issue as file:line."""
    return load_document(spec, overrides).experiment


def load_study_document(spec: Spec, overrides: Overrides = (), *, rewards: OwnRewards = NONE_OWN) -> StudyDocument:
    """Reads a study's file and that of its experiment. Raises SpecError with every issue as file:line.

    Args:
        rewards: see `load_any`; the study's file or its experiment's may name them.
    """
    source, positions = _source(spec, overrides, "study", rewards)
    return checked_study(source, positions, partial(load_document, rewards=rewards))


def load_study(spec: Spec, overrides: Overrides = ()) -> Study:
    """Returns the study that a file describes. Raises SpecError with every issue as file:line."""
    return load_study_document(spec, overrides).study


def load_evaluation(
    spec: Spec, overrides: Overrides = (), *, weights_of: WeightsOf = no_weights, rewards: OwnRewards = NONE_OWN
) -> Document:
    """Reads the file of an evaluation of models. Raises SpecError with every issue as file:line.

    Args:
        weights_of: finds the weights of the runs that the file names.
        rewards: see `load_any`.
    """
    source, positions = _source(spec, overrides, "evaluation", rewards)
    return evaluation_document(source, positions, weights_of)


def load_runs(
    spec: Spec, overrides: Overrides = (), *, weights_of: WeightsOf = no_weights, rewards: OwnRewards = NONE_OWN
) -> Document:
    """Reads the file of an experiment or evaluation; both describe runs."""
    if kind_of(spec) == "evaluation":
        return load_evaluation(spec, overrides, weights_of=weights_of, rewards=rewards)
    return load_document(spec, overrides, rewards=rewards)


def load_any(
    spec: Spec, overrides: Overrides = (), *, weights_of: WeightsOf = no_weights, rewards: OwnRewards = NONE_OWN
) -> Document | StudyDocument:
    """Reads a file of any kind.

    Args:
        weights_of: finds the weights of the runs that an evaluation names.
        rewards: name -> replacement for a reward of that name, which is not built in.
    """
    if kind_of(spec) == "study":
        return load_study_document(spec, overrides, rewards=rewards)
    return load_runs(spec, overrides, weights_of=weights_of, rewards=rewards)


def kind_of(spec: Spec) -> Kind:
    """Returns the kind of document of a file or mapping. Raises SpecError if it cannot be read."""
    return _kind(_tree(spec, Experiment).plain())


def _tree(spec: Spec, schema: type[BaseModel]) -> YamlNode:
    return tree_of(spec, schema) if isinstance(spec, Mapping) else read_tree(os.fspath(spec), schema)


def _kind(source: Mapping[str, Any]) -> Kind:
    """Returns the kind of document, by keys that only this kind has."""
    if "experiment" in source or "parameters" in source:
        return "study"
    return "evaluation" if "models" in source else "experiment"


def parse_objective(data: Mapping[str, Any]) -> Objective:
    """Returns the objective that a mapping describes, validated as in a file. Raises SpecError."""
    objective, issues = parse(Objective, dict(data))
    if issues:
        raise SpecError(*(replace(issue, path=("objective", *issue.path)) for issue in issues))
    assert isinstance(objective, BaseModel)
    return objective  # type: ignore[return-value]


def _source(spec: Spec, overrides: Overrides, wanted: Kind, rewards: OwnRewards) -> tuple[dict[str, Any], Positions]:
    """Returns the source of the file or mapping. Raises SpecError if it is not of the wanted kind."""
    schema = SCHEMAS[wanted]
    root = _tree(spec, schema)
    if (kind := _kind(root.plain())) != wanted:
        file = "" if isinstance(spec, Mapping) else os.fspath(spec)
        message, hint = f"this is {_NOUNS[kind]}, not {_NOUNS[wanted]}", f"`{_VERBS[kind]} {quote(file)}`"
        raise SpecError(Issue(message, file=file, hint=hint if file else ""))
    issues: list[Issue] = []
    settings: Iterable[str | tuple[str, Any]] = overrides.items() if isinstance(overrides, Mapping) else overrides
    for setting in _in_order(settings):
        try:
            if isinstance(setting, str):
                root = override(root, setting, schema)
            else:
                root = override_value(root, setting[0], setting[1], schema)
        except SpecError as error:
            issues += error.issues
    if issues:
        raise SpecError(*issues)
    root = with_reward_files(root, rewards)
    return root.plain(), positions_of(root)


Setting = TypeVar("Setting", bound=str | tuple[str, Any])


def _in_order(settings: Iterable[Setting]) -> list[Setting]:
    """Returns overrides in the order in which they apply: a section's type before its fields, which would be lost with
    the old type. Of two overrides of one field the last one applies."""

    def order(setting: str | tuple[str, Any]) -> tuple[int, bool]:
        name = setting.partition("=")[0] if isinstance(setting, str) else setting[0]
        return setting_order(split(name.strip()))

    return sorted(settings, key=order)


_SECTIONS = ("objective", "advantage")


def with_objective(spec: Mapping[str, Any], given: str, overrides: Iterable[str] = ()) -> Experiment:
    """Returns the experiment of a run's resolved spec under another objective.

    The advantage comes with the objective: from the given spec file, else the run's own if the objective has the run's
    type, else the objective's published setting. Overrides apply last.

    Args:
        given: a mapping (`{type: grpo}`), a file with one, or an experiment's spec file. Empty means the run's own
            objective.
        overrides: `objective.kl_coef=0.1`, `advantage.scale=none`.
    Raises:
        SpecError: has every issue with the arguments.
    """
    own = YamlNode.of(spec, Position("the run's spec", 0, ""))
    assert isinstance(own.value, dict)
    sections = _given(given) if given else {}
    kept = dict(own.value)
    if "objective" in sections and _type(sections["objective"]) != _type(own.value["objective"]):
        del kept["advantage"]
    root = YamlNode({**kept, **sections}, own.at)
    for setting in _in_order(overrides):
        if setting.partition(".")[0] not in _SECTIONS:
            message, allowed = "a replay changes these alone", "objective.FIELD=VALUE, advantage.FIELD=VALUE"
            raise SpecError(Issue(message, file=f"--set {setting}", allowed=allowed))
        root = override(root, setting, Experiment)
    return experiment_of(root.plain(), positions_of(root))


def _given(text: str) -> dict[str, YamlNode]:
    """Returns the sections in a mapping or a file."""
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
