"""An evaluation's file as a document: a matrix with a row for each model and sampling setting.

Plan, flow and record then treat an evaluation like an experiment in which nothing is trained.
"""

import dataclasses
import os
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specs.bounds import MAX_RUNS, comparable, repeats
from specs.document import Document, checked
from specs.errors import Issue, Path, Position, Positions, SpecError, locate, refuse
from specs.labels import of_same
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
"""Finder of the directory with a run's exported weights. It raises SpecError with paths relative to the model."""
_PROMPT = "data.prompt"
_SETTINGS = tuple(name for name in SamplingSetting.model_fields if name != "name")


def no_weights(model: EvaluatedRun) -> str:
    """Raises SpecError, for a file that is read without a home."""
    raise SpecError(Issue("names a run, but no home was given in which to find it", ("run",), model.run))


@dataclass(frozen=True, slots=True)
class _Row:
    """One run: a model with a sampling setting."""

    model: int
    """Index in `models`."""
    setting: int | None
    """Index in `sampling`; None if `sampling` is empty."""
    label: str


def evaluation_document(source: dict[str, Any], positions: Positions, weights_of: WeightsOf) -> Document:
    """Returns the document of an evaluation's source. Raises SpecError with every issue, located."""
    evaluation, issues = parse(ModelEvaluation, source)
    refuse([misplaced(issue, ModelEvaluation) for issue in issues], positions)
    assert isinstance(evaluation, ModelEvaluation)
    refuse(_names_taken(evaluation), positions)
    models = _models(evaluation, source["models"], positions, weights_of)
    same = _same_weights(evaluation, models)
    refuse(_given_twice(evaluation, same), positions)
    if len(same) * max(len(evaluation.sampling), 1) > MAX_RUNS:
        given = f"{len(same)} models x {len(evaluation.sampling)} settings"
        refuse([Issue("too many runs", ("models",), given, f"at most {MAX_RUNS}")], positions)
    rows = [
        _Row(first, setting, _label(evaluation, same[first], setting))
        for first in same
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
    document = checked(compiled, positions | dict(_places(positions, rows, list(varied))))
    together = (locate(issue, positions) for issue in _measured_once(evaluation, same))
    return dataclasses.replace(document, warnings=(*together, *document.warnings))


def evaluation_source(run: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Returns the evaluation's source reduced to one of its runs.

    Figures from the literature are left out: they belong to the whole evaluation.

    Args:
        run: the run's data, from its document (`cell_source`) or resolved.
        name: name of the model, with the sampling setting.
    """
    written: dict[str, Any] = {}
    for key, value in run.items():
        if key == "model":
            written["models"] = [{"name": name, **value}]
        elif key in ModelEvaluation.model_fields:
            written[key] = value
    evaluation = {key: value for key, value in run.get("evaluation", {}).items() if key != "literature"}
    return written | {"evaluation": evaluation, "ranks": run["training"]["ranks"]}


def name_of(model: EvaluatedModel) -> str:
    """Returns the name of a model."""
    if model.name:
        return model.name
    if isinstance(model, EvaluatedRun):
        checkpoint = model.checkpoint if isinstance(model.checkpoint, str) else f"step {model.checkpoint}"
        return f"{model.run} {checkpoint}"
    return os.path.basename(model.path.rstrip("/")) if isinstance(model, EvaluatedPretrained) else model.model_type


def _label(evaluation: ModelEvaluation, models: Sequence[int], setting: int | None) -> str:
    """Returns a row's label: `ours last, greedy`, or `ours last = ours best, greedy` for identical checkpoints."""
    parts = [of_same(name_of(evaluation.models[model]) for model in models)]
    return ", ".join(parts if setting is None else [*parts, evaluation.sampling[setting].name])


def _names_taken(evaluation: ModelEvaluation) -> Iterator[Issue]:
    names = {
        "models": [name_of(model) for model in evaluation.models],
        "sampling": [each.name for each in evaluation.sampling],
    }
    for section, given in names.items():
        for index in repeats(given):
            yield Issue("the name is taken", (section, index, "name"), given[index], hint="give each its own name")


def _models(
    evaluation: ModelEvaluation, written: Sequence[Mapping[str, Any]], positions: Positions, weights_of: WeightsOf
) -> list[dict[str, Any]]:
    """Returns each model as the section `model` of its runs. A run's weights become a directory like any other."""
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


def _same_weights(evaluation: ModelEvaluation, models: Sequence[Mapping[str, Any]]) -> dict[int, list[int]]:
    """Returns the models' indices, grouped under the first one with the same weights and prompt."""
    first: dict[Hashable, int] = {}
    same: dict[int, list[int]] = {}
    for index, model in enumerate(models):
        prompt = evaluation.models[index].prompt
        asked = comparable([model, prompt and prompt.model_dump()])
        same.setdefault(first.setdefault(asked, index), []).append(index)
    return same


def _given_twice(evaluation: ModelEvaluation, same: Mapping[int, Sequence[int]]) -> Iterator[Issue]:
    """Yields models given twice. Only checkpoints of runs may coincide, since no file knows which checkpoint is the
    best."""
    for first, *others in same.values():
        checkpoints = [_checkpoint(evaluation.models[first])]
        for index in others:
            checkpoint = _checkpoint(evaluation.models[index])
            if None in checkpoints or checkpoint is None or checkpoint in checkpoints:
                message = f"the same weights as {name_of(evaluation.models[first])}"
                yield Issue(message, ("models", index), hint="leave one of the two out")
            checkpoints.append(checkpoint)


def _checkpoint(model: EvaluatedModel) -> tuple[str, str | int] | None:
    """Returns the checkpoint that a model names; None if the model does not come from a run."""
    return (model.run, model.checkpoint) if isinstance(model, EvaluatedRun) else None


def _measured_once(evaluation: ModelEvaluation, same: Mapping[int, Sequence[int]]) -> Iterator[Issue]:
    """Yields a warning for each checkpoint that is identical to another one and shares its row."""
    for first, *others in same.values():
        label = _label(evaluation, [first, *others], None)
        for index in others:
            message = f"the same checkpoint as {name_of(evaluation.models[first])}"
            yield Issue(message, ("models", index), hint=f"it is measured once and shown in one row, `{label}`")


def _setting(evaluation: ModelEvaluation, source: Mapping[str, Any], row: _Row, field: str) -> Any:
    """Returns a row's value for a field of `evaluation`, as it is written in the file."""
    assert row.setting is not None
    written = source["sampling"][row.setting].get(field)
    if written is not None:
        return written
    default = evaluation.evaluation.model_dump(mode="json")[field]
    return source.get("evaluation", {}).get(field, default)


def _places(positions: Positions, rows: Sequence[_Row], varied: Sequence[str]) -> Iterator[tuple[Path, Position]]:
    """Yields the positions, in the file, of the matrix's parts."""
    below = _by_section(positions)

    def moved(old: Path, new: Path) -> Iterator[tuple[Path, Position]]:
        return (((*new, *path[len(old) :]), at) for path, at in below.get(old, ()))

    yield from moved(("ranks",), ("training", "ranks"))
    for section in (("model",), ("matrix",), *(("matrix", "zip", path) for path in varied)):
        yield section, positions["models",]
    for index, row in enumerate(rows):
        model = ("models", row.model)
        yield from moved(model, ("matrix", "zip", "model", index))
        yield from moved(model, ("matrix", "zip", _PROMPT, index))
        yield from moved((*model, "prompt"), ("matrix", "zip", _PROMPT, index))
        for field in _SETTINGS if row.setting is not None else ():
            place = ("matrix", "zip", f"evaluation.{field}", index)
            yield from moved(("evaluation", field), place)
            yield from moved(("sampling", row.setting or 0), place)
            yield from moved(("sampling", row.setting or 0, field), place)


def _by_section(positions: Positions) -> dict[Path, list[tuple[Path, Position]]]:
    """Returns, for each section down to the fields of a model, the positions in it. The section's own position is
    first."""
    below: dict[Path, list[tuple[Path, Position]]] = {}
    for path, at in positions.items():
        for length in range(1, min(len(path), 3) + 1):
            below.setdefault(path[:length], []).append((path, at))
    return below
