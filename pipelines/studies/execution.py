"""Execution of one trial: runs its experiment, and measures the results in the record."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from pipelines.home.home import Home
from pipelines.planning.certificates import certified
from pipelines.prefect.flows.experiment import RunOutcome
from pipelines.running.failures import cause_of_error
from pipelines.studies import conditions, confirmation, measures
from pipelines.studies.trials import Score, StudyInterruptedError, Trial
from specs.document import Document
from specs.errors import SpecError
from specs.machine.exit_cause import Cause
from specs.schema.study import measure_label
from specs.study_document import StudyDocument
from specs.study_space import settings
from storage import Store

Execute = Callable[[Document, int], tuple[RunOutcome, ...]]
"""Runs a trial's experiment, like `execute_experiment`, until a step; 0 means to its end."""
INFRASTRUCTURE: frozenset[Cause] = frozenset({"lost_peer", "preempted", "hung"})
"""Causes of failure that do not depend on a trial's values. The trial is retried."""
AT_FAULT: frozenset[Cause] = frozenset({"diverged", "out_of_memory", "sampler_out_of_memory"})
"""Causes of failure that come from a trial's values. The sampler should avoid such values."""


@dataclass(frozen=True, slots=True)
class Task:
    """A trial that this worker has claimed."""

    trial: Trial
    confirming: bool = False
    """Whether the task is a unit of the confirmation."""


@dataclass(frozen=True, slots=True)
class Result:
    """Result of a task."""

    run_ids: tuple[str, ...] = ()
    values: tuple[Score, ...] = ()
    """Scores by goal; empty if there is no value."""
    paused_at: int = 0
    """The rung that the trial has reached; 0 means its end."""
    constraints: Mapping[str, float] | None = None
    tokens: float = 0.0
    gpu_hours: float = 0.0
    shared_seconds: float = 0.0
    """Time that the task spent on data and base model, which all trials share."""
    reason: str = ""
    """The reason why there is no value."""
    at_fault: bool = False
    """Whether the trial's values are the reason."""
    again: bool = False
    """Whether the trial failed for a reason other than its values, and may be retried."""
    busy: bool = False
    """Whether another process executes one of the trial's runs."""
    cancelled: bool = False
    """Whether one of the trial's runs was cancelled."""


def trial_document(document: StudyDocument, trial: Trial, seeds: Sequence[int]) -> Document:
    """Returns the experiment of a trial.

    All trials have the study's name, so that equal values give one run, executed once. Their varied values are a matrix
    of one cell, by which the dashboard, comparisons and SQL distinguish them. The base model is evaluated only with the
    baseline: it is the same for all.

    Raises:
        SpecError: the experiment does not accept the values; the issue's path is the field's.
    """
    study = document.study
    values = {} if trial.baseline else settings(trial.params, study.parameters)
    name = confirmation.experiment_name(study) if "arm" in trial.about else study.name
    common: dict[str, Any] = {"name": name, "seeds": list(seeds)}
    if study.question:
        common["question"] = study.question
    if not trial.baseline and document.experiment.experiment.evaluation.checkpoints == "initial_and_final":
        common["evaluation.checkpoints"] = "final"
    document.trial({**values, **common})
    if values:
        common["matrix"] = {"product": {path: [value] for path, value in values.items()}}
    return document.trial(common)


def run_task(task: Task, document: StudyDocument, home: Home, execute: Execute) -> Result:
    """Runs a trial's experiment and measures it.

    Raises:
        SpecError: the experiment names a missing file or model, independent of the trial's values.
        StudyInterruptedError: asked to stop.
    """
    trial, began = task.trial, datetime.now(UTC)
    seeds = conditions.trial_seeds(document.study, document.experiment.experiment.seeds)
    try:
        trial_experiment = trial_document(document, trial, [trial.about["seed"]] if task.confirming else seeds)
        if refused := _refused_formula(document, trial):
            return Result(reason=refused, at_fault=True)
        outcomes = execute(trial_experiment, trial.work.until)
    except SpecError as error:
        if not _blames(error, trial.params):
            raise
        return Result(reason=str(error), at_fault=True)
    run_ids = tuple(outcome.run.run_id for outcome in outcomes)
    if any(outcome.interrupted for outcome in outcomes):
        raise StudyInterruptedError("interrupted")
    if busy := [outcome for outcome in outcomes if outcome.status == "busy"]:
        return Result(run_ids, reason=str(busy[0].error), busy=True)
    with Store.open(home.root) as store:
        tokens = measures.sampled_tokens(store, home, run_ids)
        if cancelled := [outcome.run.run_id for outcome in outcomes if outcome.status == "cancelled"]:
            result = Result(run_ids, tokens=tokens, reason=f"{cancelled[0]} was cancelled", cancelled=True)
        elif failed := [outcome for outcome in outcomes if outcome.status not in ("finished", "paused")]:
            result = _failure(run_ids, failed[0], tokens)
        else:
            result = _measured(task, document, home, store, run_ids, tokens)
        return replace(result, shared_seconds=measures.shared_seconds(store, run_ids, began))


def _refused_formula(document: StudyDocument, trial: Trial) -> str:
    """Returns why the trial's formula is refused: its claim is false with these values, or it is not finite. Empty if
    it is not."""
    values = {} if trial.baseline else settings(trial.params, document.study.parameters)
    with_values = document.trial(values)
    issues = certified(with_values.experiment).issues
    return str(SpecError(*map(with_values.locate, issues))) if issues else ""


def _measured(
    task: Task, document: StudyDocument, home: Home, store: Store, run_ids: tuple[str, ...], tokens: float
) -> Result:
    study, until = document.study, task.trial.work.until
    goals, dataset = study.targets, ""
    if task.confirming and study.confirm:
        # One seed for each unit: caution over seeds comes from the interval over all of them.
        goals = (goals[0].model_copy(update={"over_seeds": "mean"}),)
        dataset = study.confirm.dataset
    confidence = document.experiment.experiment.evaluation.confidence
    scores: list[Score] = []
    for goal in goals:
        scored = measures.score(store, home, goal, run_ids, until, dataset=dataset, confidence=confidence)
        if scored is None:
            reason = f"no finite {measure_label(goal.metric, goal.dataset)}"
            return Result(run_ids, tokens=tokens, reason=reason, at_fault=True)
        scores.append(scored)
    bounded = measures.constraint_values(store, home, study, run_ids) if study.constraints else None
    return Result(run_ids, tuple(scores), paused_at=until, constraints=bounded, tokens=tokens)


def _failure(run_ids: tuple[str, ...], outcome: RunOutcome, tokens: float) -> Result:
    cause = cause_of_error(outcome.error)
    reason = f"{outcome.run.run_id} {outcome.status}: {outcome.error}"
    if cause in AT_FAULT:
        return Result(run_ids, tokens=tokens, reason=f"{cause.replace('_', ' ')}: {reason}", at_fault=True)
    return Result(run_ids, tokens=tokens, reason=reason, again=cause in INFRASTRUCTURE)


def _blames(error: SpecError, params: Mapping[str, Any]) -> bool:
    """Returns whether the error comes from this trial's values, not from settings that all trials share."""
    searched = [tuple(path.split(".")) for path in params]
    blamed = [tuple(map(str, issue.path)) for issue in error.issues]
    return any(path and (path[: len(s)] == s or s[: len(path)] == path) for path in blamed for s in searched)
