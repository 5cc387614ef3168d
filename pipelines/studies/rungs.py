"""Pruning with promotion: decides which trials continue from a rung. All functions are pure, from trials to decisions.

A trial reaches the rungs of its ladder, then the horizon (`training.steps`). At each rung it is evaluated and pauses; a
promoted trial resumes from its checkpoint. The baseline has no rungs: the others are compared with it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal, assert_never

from pipelines.studies.trials import Trial
from specs.schema.study import Halving, Hyperband, MedianRule, NoPruner, Patience, Study

Verdict = Literal["go on", "pause", "stop"]


@dataclass(frozen=True, slots=True)
class Promotion:
    """A paused trial that continues."""

    trial: Trial
    until: int
    """The step to train to; 0 means the end."""


def first_step(study: Study, bracket: int) -> int:
    """Returns the first rung to which a trial of this bracket trains; 0 means the end."""
    return next(iter(study.rungs[bracket:]), 0)


def next_step(study: Study, trial: Trial) -> int:
    """Returns the next rung after the one that a trial has reached; 0 means the end."""
    return next((step for step in study.rungs[trial.bracket :] if step > trial.rung), 0)


def bracket_of(study: Study, number: int) -> int:
    """Returns the number of rungs that a new trial skips at the beginning."""
    return number % len(study.rungs) if isinstance(study.pruner, Hyperband) else 0


def verdict(study: Study, trial: Trial, others: Iterable[Trial]) -> tuple[Verdict, str]:
    """Returns the decision on a trial that has just been evaluated at a rung, and the reason.

    With successive halving it waits for the others; the other rules decide by the present results.
    """
    pruner, step = study.pruner, trial.rung
    match pruner:
        case NoPruner():
            return "go on", ""
        case Halving():
            return "pause", ""
        case MedianRule():
            known = [other.rungs[step].value for other in others if step in other.rungs and other.id != trial.id]
            if trial.number < pruner.startup_trials or len(known) < 2:
                return "go on", ""
            middle = median(known)
            if _sign(study) * (trial.rungs[step].value - middle) >= 0:
                return "go on", ""
            return "stop", f"{trial.rungs[step].value:.4f} at step {step}, worse than the median {middle:.4f} there"
        case Patience():
            steps, sign = sorted(trial.rungs), _sign(study)
            if len(steps) <= pruner.patience:
                return "go on", ""
            earlier, recent = steps[: -pruner.patience], steps[-pruner.patience :]
            best = sign * max(sign * trial.rungs[at].value for at in earlier)
            if any(sign * (trial.rungs[at].value - best) > pruner.min_delta for at in recent):
                return "go on", ""
            return "stop", f"no better than {best:.4f} since step {earlier[-1]}"
        case never:
            assert_never(never)


def promotion(study: Study, trials: Sequence[Trial]) -> Promotion | None:
    """Returns the paused trial that continues now, if one has earned it: one among the best 1/eta of those that reached
    its rung.

    The highest rung comes first, as in arXiv:1810.05934, algorithm 2.
    """
    if not isinstance(study.pruner, Halving):
        return None
    for step in reversed(study.rungs):
        for bracket in sorted({trial.bracket for trial in trials}):
            there = [trial for trial in trials if step in trial.rungs and trial.bracket == bracket]
            for trial in _ranked(study, there, step)[: len(there) // study.pruner.eta]:
                if trial.state == "paused" and trial.rung == step:
                    return Promotion(trial, next_step(study, trial))
    return None


def last_promotion(study: Study, trials: Sequence[Trial]) -> Promotion | None:
    """Returns the best paused trial of the highest rung, which is to be trained to its end; None if a trial of the
    search has already reached its end."""
    searched = [trial for trial in trials if not trial.baseline]
    if any(trial.state == "finished" for trial in searched):
        return None
    paused = [trial for trial in searched if trial.state == "paused"]
    if not paused:
        return None
    highest = max(trial.rung for trial in paused)
    best = _ranked(study, [trial for trial in paused if trial.rung == highest], highest)[0]
    return Promotion(best, next_step(study, best))


def reason_not_promoted(study: Study, trial: Trial, trials: Sequence[Trial]) -> str:
    """Returns why a trial that still waits at a rung when the search ends was not promoted."""
    step = trial.rung
    there = _ranked(study, [other for other in trials if step in other.rungs and other.bracket == trial.bracket], step)
    place = [other.id for other in there].index(trial.id) + 1
    return f"{trial.rungs[step].value:.4f} at step {step}: place {place} of {len(there)} there"


def _ranked(study: Study, trials: Iterable[Trial], step: int) -> list[Trial]:
    """Returns the trials, best first. Of equal trials the older comes first."""
    return sorted(trials, key=lambda trial: (-_sign(study) * trial.rungs[step].value, trial.number))


def _sign(study: Study) -> int:
    """Returns 1 if more is better, -1 if less is."""
    return 1 if study.targets[0].direction == "maximize" else -1
