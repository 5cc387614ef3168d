"""Estimated cost of a study before it runs, for the search at worst and at best, and for the confirmation.

At worst every trial is trained to its end; at best pruning continues as few trials as it may. Response tokens are upper
bounds in both, and GPU hours are estimates for that number of tokens. The effect of a trial's parameters on its cost is
not counted: all trials have the cost of the experiment's own values.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pipelines.planning.evaluations import evaluated_on_the_way, evaluation_problems, measures_base
from pipelines.planning.gpu_hours import evaluation_hours, gpu_hours
from pipelines.planning.memory import batch_algebra
from pipelines.planning.model_shape import model_shape
from pipelines.studies.conditions import trial_seeds
from pipelines.studies.confirmation import fresh_seeds
from specs.schema.study import Halving, Hyperband, MedianRule, NoPruner, Study
from specs.study_document import StudyDocument
from specs.study_space import num_candidates, num_combinations

CHANGE_COST = ("training", "rollout", "data", "model", "evaluation")
"""Sections whose fields change the cost of a run."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of a part of a study."""

    runs: int
    """Number of runs. Each is a trial, or an arm, with one seed."""
    trained_to_end: int
    """Number of those runs that reach the last step."""
    steps: int
    """Training steps over all runs."""
    tokens: int
    """Largest number of response tokens to sample for training."""
    evaluation_samples: int | None
    """Responses for the evaluation of checkpoints; None if the size of an evaluation set is not known yet."""
    gpu_hours: float | None
    """Hours of training and evaluation on H100s; only of training if `evaluation_samples` is None. It is None if the
    model's config is not on this machine."""


@dataclass(frozen=True, slots=True)
class StudyCost:
    """Cost of a whole study."""

    trials: int
    seeds: tuple[int, ...]
    """Seeds of each trial."""
    worst: Cost
    """Largest cost of the search."""
    best: Cost
    confirmation: Cost
    varying: tuple[str, ...]
    """Searched parameters that change the cost of a run."""


def study_cost(document: StudyDocument) -> StudyCost:
    """Returns the cost of the whole study, including its finished part."""
    study, experiment = document.study, document.experiment.experiment
    trials = study.trials
    if study.sampler.type == "grid" and all(num_candidates(searched) for searched in study.parameters.values()):
        _, outside = document.own_params()
        trials = min(trials, num_combinations(study.parameters) + bool(outside))
    seeds = trial_seeds(study, experiment.seeds)
    horizon = experiment.training.steps
    arms = study.confirm.candidates + 1 if study.confirm else 0
    fresh = len(fresh_seeds(study, experiment.seeds))
    return StudyCost(
        trials=trials,
        seeds=seeds,
        worst=_cost(document, [horizon] * trials, len(seeds)),
        best=_cost(document, least_steps(study, trials, horizon), len(seeds)),
        confirmation=_cost(document, [horizon] * arms, fresh, pruned=False),
        varying=tuple(path for path in study.parameters if path.startswith(CHANGE_COST)),
    )


def least_steps(study: Study, trials: int, horizon: int) -> list[int]:
    """Returns the last step of each trial, the baseline first, if pruning continues as few trials as possible.

    Args:
        horizon: the step at which a trial ends.
    """
    pruner, others = study.pruner, trials - 1
    if isinstance(pruner, NoPruner) or not others:
        return [horizon] * trials
    if isinstance(pruner, Halving):
        ends = _halved(pruner, trials, horizon)
        if horizon not in ends:  # if none earns it, the best of the highest rung is trained to its end
            ends = [*sorted(ends)[:-1], horizon]
        return [horizon, *ends]
    if isinstance(pruner, MedianRule):
        spared = min(others, max(0, pruner.startup_trials - 1))
        return [horizon] * (1 + spared) + [pruner.rungs[0]] * (others - spared)
    stopped = pruner.rungs[pruner.patience] if pruner.patience < len(pruner.rungs) else horizon
    return [horizon, *[stopped] * others]


def _halved(pruner: Halving, trials: int, horizon: int) -> list[int]:
    """Returns the last step of each trial except the baseline (trial 0), which has no rungs."""
    brackets = len(pruner.rungs) if isinstance(pruner, Hyperband) else 1
    ends: list[int] = []
    for bracket in range(brackets):
        there = len([number for number in range(1, trials) if number % brackets == bracket])
        for step in pruner.rungs[bracket:]:
            promoted = there // pruner.eta
            ends += [step] * (there - promoted)
            there = promoted
        ends += [horizon] * there
    return ends


def _cost(document: StudyDocument, ends: Sequence[int], seeds: int, *, pruned: bool = True) -> Cost:
    """Returns the cost of trials that end at these steps, the first of them the baseline's.

    Args:
        pruned: whether the study's rungs apply to them.
    """
    study, experiment = document.study, document.experiment.experiment
    horizon, algebra, shape = experiment.training.steps, batch_algebra(experiment), model_shape(experiment)
    steps = sum(ends) * seeds
    problems = evaluation_problems(experiment)
    looks = 0
    for index, end in enumerate(ends):
        looks += evaluated_on_the_way(experiment, end) + (end == horizon)
        looks += sum(step <= end for step in study.rungs) if pruned and index else 0
        # The base model is evaluated only with the baseline.
        looks += index == 0 and measures_base(experiment)
    hours = None
    if shape:
        run = gpu_hours(experiment, shape)
        evaluation = looks * seeds * (evaluation_hours(experiment, shape) or 0)
        hours = (run.sampling + run.training) / horizon * steps + evaluation
    return Cost(
        runs=len(ends) * seeds,
        trained_to_end=sum(end == horizon for end in ends) * seeds,
        steps=steps,
        tokens=steps * algebra.tokens_to_sample // horizon,
        evaluation_samples=None
        if problems is None
        else looks * seeds * problems * experiment.evaluation.samples_per_problem,
        gpu_hours=hours,
    )
