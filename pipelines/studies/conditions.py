"""Conditions that make trials comparable. A stored study continues only under the conditions of its existing trials."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from pipelines.planning import fingerprint as fp
from pipelines.planning.code import ENTRIES, Code, release
from pipelines.studies import space
from specs.errors import Issue
from specs.schema.study import Study, measure_label
from specs.study_document import StudyDocument


def conditions(document: StudyDocument) -> dict[str, Any]:
    """Returns the conditions of a study, as they are stored."""
    study = document.study
    goals = [goal.model_dump(mode="json") for goal in study.targets]
    return {
        "parameters": space.plain(study.parameters),
        "goal": goals[0] if len(goals) == 1 else goals,
        "results": results_digest(document),
        "code": _code(document),
        "baseline": results_digest(document, of_baseline=True),
        "rungs": list(study.rungs),
        "seeds_per_trial": study.seeds_per_trial,
    }


def _code(document: StudyDocument) -> dict[str, Any]:
    """Returns, for each stage of a trial, the results number and the difference of its code from the release."""
    code, experiment = Code(), document.experiment.experiment
    differing = {stage: found for stage in ENTRIES if (found := code.of_stage(stage, experiment))}
    return {"numbers": {stage: release().results[stage] for stage in ENTRIES}, "differing": differing}


def results_digest(document: StudyDocument, *, of_baseline: bool = False) -> str:
    """Returns a digest of everything that determines a trial's result except the searched fields. Only trials of one
    experiment are comparable.

    It covers the same inputs as the stages' fingerprints: files enter by their content; the place and manner of
    execution do not enter.

    Args:
        of_baseline: include the experiment's own values of the searched fields.
    """
    experiment = document.experiment.experiment
    searched = () if of_baseline else tuple(document.study.parameters)
    parts = (fp.data_identity, fp.base_identity, fp.train_identity, fp.evaluate_identity)
    identity = [
        {
            path: value
            for path, value in part(experiment).items()
            if not any(path == varied or path.startswith(f"{varied}.") for varied in searched)
        }
        for part in parts
    ]
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def changes(before: Mapping[str, Any], document: StudyDocument) -> list[Issue]:
    """Returns the reasons why a stored study cannot continue with this document.

    Args:
        before: the result of `conditions` when its last trial was created.
    """
    study, now = document.study, conditions(document)
    issues = space.changes(before["parameters"], study.parameters)
    hint = f"trials with other measures are not comparable: give the study another name than {study.name!r}"
    if before["goal"] != now["goal"]:
        given, allowed = (json.dumps(side["goal"]) for side in (now, before))
        place = "goal" if study.goal else "goals"
        issues.append(Issue("differs from the stored study", (place,), given=given, allowed=allowed, hint=hint))
    if before["results"] != now["results"]:
        issues.append(Issue("is no longer the experiment of the stored study", ("experiment",), hint=hint))
    elif before["code"] != now["code"]:
        sides = [(code["numbers"], code["differing"]) for code in (before["code"], now["code"])]
        made, here = ({stage: (number[stage], found.get(stage)) for stage in ENTRIES} for number, found in sides)
        stages = [stage for stage in ENTRIES if made[stage] != here[stage]]
        message = f"is run by other code than the stored study's trials; it differs in: {', '.join(stages)}"
        issues.append(Issue(message, ("experiment",), hint=hint))
    elif before["baseline"] != now["baseline"]:
        message = "has another baseline than the stored study: its own values of searched fields have changed"
        issues.append(Issue(message, ("experiment",), hint=hint))
    if before["rungs"] != now["rungs"]:
        given, allowed = (json.dumps(side["rungs"]) for side in (now, before))
        issues.append(Issue("differs from the stored study", ("pruner",), given=given, allowed=allowed, hint=hint))
    if before["seeds_per_trial"] != study.seeds_per_trial:
        given, allowed = str(study.seeds_per_trial), str(before["seeds_per_trial"])
        at = ("seeds_per_trial",)
        issues.append(Issue("differs from the stored study", at, given=given, allowed=allowed, hint=hint))
    return issues


def unmeasured(document: StudyDocument, finished: Sequence[Mapping[str, Any]]) -> list[Issue]:
    """Returns the constraints whose measure no finished trial has recorded. Every trial would seem to break them.

    Args:
        finished: the values that each finished trial has measured, by `measure_label`.
    """
    measured = {label for constraints in finished for label in constraints}
    hint = f"constraints are measured as trials end: give the study another name than {document.study.name!r}"
    issues = []
    for index, constraint in enumerate(document.study.constraints):
        label = measure_label(constraint.metric, constraint.dataset)
        if finished and label not in measured:
            place = ("constraints", index, "metric")
            issues.append(Issue("was not measured in the stored study's trials", place, given=label, hint=hint))
    return issues


def trial_seeds(study: Study, seeds: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the seeds of each trial of the search.

    Args:
        seeds: the experiment's seeds.
    """
    return seeds[: study.seeds_per_trial] if study.seeds_per_trial else seeds
