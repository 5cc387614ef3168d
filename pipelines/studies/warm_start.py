"""Results that a study's sampler learns from in addition to its own trials: trials of other studies, and runs, in the
same home."""

from collections.abc import Mapping
from typing import Any

from pipelines.home.home import Home
from pipelines.studies.answers.results import StudyRecord
from pipelines.studies.measures import constraint_values, score
from pipelines.studies.trials import ForeignResult
from specs.errors import Issue, SpecError
from specs.machine.files import read_json
from specs.reading.recorded import recorded_spec, unreadable
from specs.schema.fields import item_at, split
from specs.schema.study import Cases
from specs.study_document import StudyDocument
from specs.study_space import Params, holds, in_order, is_active, settings
from storage import Store


def foreign_results(document: StudyDocument, home: Home) -> list[ForeignResult]:
    """Returns those results that `warm_start` names whose values are in this study's space.

    Raises:
        SpecError: a study or run is missing, or has no usable results.
    """
    issues: list[Issue] = []
    results: list[ForeignResult] = []
    for section in ("studies", "runs"):
        collect = _of_study if section == "studies" else _of_run
        for index, name in enumerate(getattr(document.study.warm_start, section)):
            usable, why = collect(document, home, name)
            results += usable
            if why:
                issues.append(document.locate(Issue(why, ("warm_start", section, index), given=name)))
    if issues:
        raise SpecError(*issues)
    return results


def _of_study(document: StudyDocument, home: Home, name: str) -> tuple[list[ForeignResult], str]:
    record = read_json(home.study(name) / "study.json")
    if not record:
        return [], "no such study in this home"
    judged_by = [(goal.dataset, goal.metric, goal.direction) for goal in StudyRecord.of(record).goals]
    cautious = [goal["over_seeds"] for goal in record["goals"]]
    goals = document.study.targets
    if (judged_by, cautious) != (
        [(goal.dataset, goal.metric, goal.direction) for goal in goals],
        [goal.over_seeds for goal in goals],
    ):
        return [], f"it was judged by another goal: {record['goal']}"
    searched = document.study.parameters
    usable = [
        ForeignResult(
            {path: value for path, value in trial.params.items() if path in searched}, trial.values, trial.constraints
        )
        for trial in StudyRecord.of(record).finished
        if _fits(document, trial.params)
    ]
    return usable, "" if usable else "none of its finished trials has values of this study's parameters"


def _of_run(document: StudyDocument, home: Home, run_id: str) -> tuple[list[ForeignResult], str]:
    if not (directory := home.run(run_id)).exists():
        return [], "no such run in this home"
    if why := unreadable(directory):
        return [], f"its spec cannot be read: {'; '.join(why)}"
    params = _params_of(document, recorded_spec(directory).model_dump(mode="json"))
    if not _fits(document, params):
        return [], "its values are not in this study's ranges"
    with Store.open(home.root) as store:
        scores = [score(store, home, goal, [run_id]) for goal in document.study.targets]
        measured = constraint_values(store, home, document.study, [run_id])
    values = tuple(scored.value for scored in scores if scored is not None)
    if len(values) < len(scores):
        return [], "it lacks the goal's measure"
    return [ForeignResult(params, values, measured)], ""


def _params_of(document: StudyDocument, spec: Mapping[str, Any]) -> Params:
    """Returns the params that stand for the settings of a run's spec, without those outside the space."""
    searched = document.study.parameters
    params: Params = {}
    for path in in_order(searched):
        if not is_active(searched[path], params):
            continue
        value = item_at(spec, split(path))
        if isinstance(parameter := searched[path], Cases):
            value = next(
                (name for name in parameter.cases if _has_case(document, spec, path, {**params, path: name})), None
            )
        if value is not None:
            params[path] = value
    return params


def _has_case(document: StudyDocument, spec: Mapping[str, Any], path: str, params: Params) -> bool:
    """Returns whether a run's section equals the case in the params. Fields that the case leaves out have their
    defaults, and parameters that are searched inside the case may have any value."""
    searched = document.study.parameters
    inside = {
        other: item_at(spec, split(other))
        for other in searched
        if other.startswith(f"{path}.") and is_active(searched[other], params)
    }
    try:
        trial = document.trial({**settings({path: params[path]}, searched), **inside})
    except SpecError:
        return False
    return bool(item_at(trial.experiment.model_dump(mode="json"), split(path)) == item_at(spec, split(path)))


def _fits(document: StudyDocument, params: dict[str, object]) -> bool:
    searched = document.study.parameters
    active = [path for path in in_order(searched) if is_active(searched[path], params)]
    return all(path in params and holds(searched[path], params[path]) for path in active)
