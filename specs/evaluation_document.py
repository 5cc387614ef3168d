"""An evaluation's file as a document: a matrix whose rows are its models, each with each sampling setting.

What follows of a document (plan, flow, record) then needs to know of evaluations only that nothing is trained.
"""

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specs.document import Document, checked
from specs.errors import Issue, Path, Position, Positions, SpecError, refuse
from specs.model_evaluation import (
    EvaluatedModel,
    EvaluatedPretrained,
    EvaluatedRun,
    ModelEvaluation,
    SamplingSetting,
)
from specs.reading.files import misplaced
from specs.reading.validate import parse
from specs.records import EVALUATION

WeightsOf = Callable[[EvaluatedRun], str]
"""The directory with the weights that a run has exported. Raises SpecError, its paths relative to the model."""
_PROMPT = "data.prompt"
_SETTINGS = tuple(name for name in SamplingSetting.model_fields if name != "name")


def no_weights(model: EvaluatedRun) -> str:
    """Finds no run, for a file that is read where there is no home."""
    raise SpecError(Issue("names a run, and there is no home to look for it", ("run",), model.run))


@dataclass(frozen=True, slots=True)
class _Row:
    """One run: a model with a sampling setting."""

    model: int
    """Its place in `models`."""
    setting: int | None
    """Its place in `sampling`; None where that is empty."""
    label: str


def evaluation_document(source: dict[str, Any], positions: Positions, weights_of: WeightsOf) -> Document:
    """The document of an evaluation's source. Raises SpecError with every issue, located."""
    evaluation, issues = parse(ModelEvaluation, source)
    refuse([misplaced(issue, ModelEvaluation) for issue in issues], positions)
    assert isinstance(evaluation, ModelEvaluation)
    refuse(_names_taken(evaluation), positions)
    models = _models(evaluation, source["models"], positions, weights_of)
    refuse(_given_twice(evaluation, models), positions)
    rows = [
        _Row(model, setting, _label(evaluation, model, setting))
        for model in range(len(models))
        for setting in (range(len(evaluation.sampling)) or (None,))
    ]
    varied: dict[str, list[Any]] = {"model": [models[row.model] for row in rows]}
    if any(model.prompt for model in evaluation.models):
        shared = source["data"].get("prompt", {"type": "template"})
        varied[_PROMPT] = [source["models"][row.model].get("prompt") or shared for row in rows]
    for field in _SETTINGS:
        if any(getattr(setting, field) is not None for setting in evaluation.sampling):
            varied[f"evaluation.{field}"] = [_setting(evaluation, source, row, field) for row in rows]
    kept = {key: value for key, value in source.items() if key not in ("models", "sampling", "ranks")}
    compiled = kept | {
        "kind": EVALUATION,
        "training": {"ranks": evaluation.ranks},
        "matrix": {"zip": varied, "labels": [row.label for row in rows]},
    }
    return checked(compiled, positions | dict(_places(positions, rows, list(varied))))


def name_of(model: EvaluatedModel) -> str:
    """What a model is called."""
    if model.name:
        return model.name
    if isinstance(model, EvaluatedRun):
        checkpoint = model.checkpoint if isinstance(model.checkpoint, str) else f"step {model.checkpoint}"
        return f"{model.run} {checkpoint}"
    return os.path.basename(model.path.rstrip("/")) if isinstance(model, EvaluatedPretrained) else model.model_type


def _label(evaluation: ModelEvaluation, model: int, setting: int | None) -> str:
    parts = [name_of(evaluation.models[model])]
    return ", ".join(parts if setting is None else [*parts, evaluation.sampling[setting].name])


def _names_taken(evaluation: ModelEvaluation) -> Iterator[Issue]:
    names = {
        "models": [name_of(model) for model in evaluation.models],
        "sampling": [each.name for each in evaluation.sampling],
    }
    for section, given in names.items():
        for index, name in enumerate(given):
            if name in given[:index]:
                yield Issue("the name is taken", (section, index, "name"), name, hint="give each a name of its own")


def _models(
    evaluation: ModelEvaluation, written: Sequence[Mapping[str, Any]], positions: Positions, weights_of: WeightsOf
) -> list[dict[str, Any]]:
    """Each model as the section `model` of its runs. A run's weights are a directory like any other."""
    models: list[dict[str, Any]] = []
    issues: list[Issue] = []
    for index, model in enumerate(evaluation.models):
        if not isinstance(model, EvaluatedRun):
            plain = {key: value for key, value in written[index].items() if key not in ("name", "prompt")}
            models.append({"source": model.source, **plain})
            continue
        try:
            models.append({"source": "pretrained", "path": weights_of(model)})
        except SpecError as error:
            issues += [dataclasses.replace(issue, path=("models", index, *issue.path)) for issue in error.issues]
    refuse(issues, positions)
    return models


def _given_twice(evaluation: ModelEvaluation, models: Sequence[Mapping[str, Any]]) -> Iterator[Issue]:
    """A model that another one is too, asked in the same way: their runs would be one."""
    asked = [(dict(model), evaluation.models[index].prompt) for index, model in enumerate(models)]
    for index, one in enumerate(asked):
        if one in asked[:index]:
            first = name_of(evaluation.models[asked.index(one)])
            yield Issue(f"the same weights as {first}", ("models", index), hint="leave one of the two out")


def _setting(evaluation: ModelEvaluation, source: Mapping[str, Any], row: _Row, field: str) -> Any:
    """What a row has for a field of `evaluation`, as the file writes it."""
    assert row.setting is not None
    written = source["sampling"][row.setting].get(field)
    if written is not None:
        return written
    default = evaluation.evaluation.model_dump(mode="json")[field]
    return source.get("evaluation", {}).get(field, default)


def _places(positions: Positions, rows: Sequence[_Row], varied: Sequence[str]) -> Iterator[tuple[Path, Position]]:
    """Where the parts of the matrix stand in the file."""
    yield from _moved(positions, ("ranks",), ("training", "ranks"))
    for section in (("model",), ("matrix",), *(("matrix", "zip", path) for path in varied)):
        yield section, positions["models",]
    for index, row in enumerate(rows):
        model = ("models", row.model)
        yield from _moved(positions, model, ("matrix", "zip", "model", index))
        yield from _moved(positions, model, ("matrix", "zip", _PROMPT, index))
        yield from _moved(positions, (*model, "prompt"), ("matrix", "zip", _PROMPT, index))
        for field in _SETTINGS if row.setting is not None else ():
            place = ("matrix", "zip", f"evaluation.{field}", index)
            yield from _moved(positions, ("evaluation", field), place)
            yield from _moved(positions, ("sampling", row.setting or 0), place)
            yield from _moved(positions, ("sampling", row.setting or 0, field), place)


def _moved(positions: Positions, old: Path, new: Path) -> Iterator[tuple[Path, Position]]:
    """The places of a section and of what is in it, under another path."""
    for path, at in positions.items():
        if path[: len(old)] == old:
            yield (*new, *path[len(old) :]), at
