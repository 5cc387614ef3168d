"""Writing of study.json, the record of a study, from its trials. SQL tables, the page and lists read it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipelines.studies import noisy_gp, space
from pipelines.studies.answers.results import COSTS, Arm
from pipelines.studies.confirmation import Progress, is_feasible
from pipelines.studies.trials import Trial
from specs.machine.files import now
from specs.schema.study import Study, measure_label
from specs.study_document import StudyDocument


@dataclass(frozen=True, slots=True)
class Confirming:
    """Progress of a study's confirmation."""

    seeds: Sequence[int]
    """The fresh seeds, as many as an arm may have."""
    progress: Progress
    shares: Mapping[int, int]
    """Number of seeds -> share of the error of the interim analysis at that number."""
    share: int
    """The last analysis's share of the error."""


def study_record(
    document: StudyDocument,
    trials: Sequence[Trial],
    units: Sequence[Trial],
    arms: Sequence[Arm],
    *,
    status: str,
    seeds: Sequence[int],
    confirming: Confirming,
    standings: Mapping[int, noisy_gp.Standing],
    created_at: str,
) -> dict[str, Any]:
    """Returns the record of a study.

    Args:
        units: the confirmation's trials.
        arms: the confirmation's arms, as far as they are chosen.
        confirming: progress of the confirmation.
        status: searching, confirming, finished, or stopped (by a failure, see on_failure).
        seeds: seeds of each trial.
        standings: the sampler's model of trials, by number.
    """
    study = document.study
    experiment = document.experiment.experiment
    goals = [
        goal.model_dump(mode="json")
        | ({"least": experiment.reward_on(goal.dataset).worst_value()} if goal.metric.startswith("score@") else {})
        for goal in study.targets
    ]
    return {
        "name": study.name,
        "question": study.question,
        "experiment": study.experiment,
        "goal": "; ".join(f"{goal.direction} {measure_label(goal.metric, goal.dataset)}" for goal in study.targets),
        "direction": study.targets[0].direction,
        "goals": goals,
        "constraints": [constraint.model_dump(mode="json") for constraint in study.constraints],
        "sampler": study.sampler.type,
        "pruner": study.pruner.model_dump(mode="json"),
        "trials_wanted": study.trials,
        "seeds": list(seeds),
        "confidence": document.experiment.experiment.evaluation.confidence,
        "status": status,
        "parameters": space.plain(study.parameters),
        "overrides": study.overrides,
        "outside": _outside(document, trials),
        "budget": study.budget.model_dump(mode="json"),
        "spent": {name: sum(float(each.about.get(name, 0.0)) for each in (*trials, *units)) for name in COSTS},
        "warm_start": study.warm_start.model_dump(mode="json"),
        "created_at": created_at,
        "updated_at": now(),
        "trials": [_trial(study, trial, standings.get(trial.number)) for trial in trials],
        "confirmation": _confirmation(study, arms, units, confirming) if study.confirm and arms else None,
    }


def _outside(document: StudyDocument, trials: Sequence[Trial]) -> dict[str, Any]:
    """Returns the experiment's own values outside the ranges, by path; empty without a baseline."""
    baseline = next((trial for trial in trials if trial.baseline), None)
    if baseline is None:
        return {}
    _, outside = document.own_params()
    return {path: document.own_value(path) for path in outside if path not in baseline.params}


def _trial(study: Study, trial: Trial, standing: noisy_gp.Standing | None) -> dict[str, Any]:
    about = trial.about
    return {
        "number": trial.number,
        "state": trial.state,
        "run_ids": about.get("run_ids", []),
        "run_id": next(iter(about.get("run_ids", [])), None),
        "value": trial.values[0] if trial.values else None,
        "values": list(trial.values) if trial.values else None,
        "value_low": about.get("value_low"),
        "value_high": about.get("value_high"),
        "posterior_mean": standing and standing.mean,
        "posterior_deviation": standing and standing.deviation,
        "chance_of_best": standing and standing.chance,
        "expected_gain": trial.sampler_notes.get(noisy_gp.GAIN),
        "baseline": trial.baseline,
        "params": trial.params,
        "rung": trial.rung or None,
        "rungs": {str(step): score.plain() for step, score in trial.rungs.items()},
        "constraints": about.get("constraints", {}),
        "feasible": is_feasible(study, trial) if trial.values else None,
        "reason": about.get("reason", ""),
        **{name: about.get(name) for name in COSTS},
        "attempts": trial.attempts,
        # Optuna's own times are local, without a time zone.
        "started_at": about.get("started_at"),
        "ended_at": about.get("ended_at"),
    }


def _confirmation(study: Study, arms: Sequence[Arm], units: Sequence[Trial], at: Confirming) -> Mapping[str, Any]:
    assert study.confirm is not None
    wanted = {trial: set(at.seeds[:number]) for trial, number in at.progress.seeds.items()}
    return {
        "dataset": study.confirm.dataset or study.targets[0].dataset,
        "seeds": list(at.seeds[: max(at.progress.seeds.values())]),
        "most": len(at.seeds),
        "looks": sorted(at.shares),
        "share": at.share,
        "decided": not at.progress.due,
        "arms": [
            {
                "label": arm.label,
                "trial": arm.trial,
                "baseline": arm.baseline,
                "params": dict(arm.params),
                "stopped_after": at.progress.stopped.get(arm.trial, 0),
                "units": [
                    _unit(unit)
                    for unit in units
                    if unit.about["arm"] == arm.trial and unit.about["seed"] in wanted[arm.trial]
                ],
            }
            for arm in arms
        ],
    }


def _unit(unit: Trial) -> dict[str, Any]:
    return {
        "seed": unit.about["seed"],
        "run_id": next(iter(unit.about.get("run_ids", [])), None),
        "state": unit.state,
        "value": unit.values[0] if unit.values else None,
        "reason": unit.about.get("reason", ""),
        "constraints": unit.about.get("constraints", {}),
        **{name: unit.about.get(name) for name in COSTS},
    }
