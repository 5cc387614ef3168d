"""Issues with a study's measures, sampler, pruner and confirmation, and with settings that have no effect."""

import math
import re
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Literal, NamedTuple, assert_never

from specs.bounds import repeats
from specs.errors import Issue, Path
from specs.metrics import BY_NAME, lower_is_better
from specs.reading.validate import show
from specs.rules.search_space import describe
from specs.schema.experiment import Experiment
from specs.schema.fields import nearest
from specs.schema.study import (
    Cases,
    Choice,
    Constraint,
    Goal,
    Halving,
    MedianRule,
    Patience,
    SearchSampler,
    Study,
)
from specs.study_space import candidates, num_candidates, num_combinations

EVALUATED = re.compile(r"(mean|pass|maj|score)@[1-9][0-9]{0,3}")
"""Names of measures of an evaluation's answers."""
_OF_SETS = {"accuracy": (0.0, 1.0), "bits_per_byte": (0.0, math.inf)}
"""Metric of sets that are scored by likelihood -> its bounds."""
LEAST_CAUTIOUS, WELL_CAUTIOUS = 3, 5
"""Numbers of seeds per trial below which `lower_bound` is refused, and below which it is discouraged."""


def is_evaluated(measured: Goal | Constraint) -> bool:
    """Returns whether an evaluation measures it on a set. Other measures are training metrics."""
    return bool(measured.dataset) or EVALUATED.fullmatch(measured.metric) is not None


class _Nature(NamedTuple):
    """A sampler's use of spaces and results (Optuna 5.0)."""

    learns_from: Literal["all", "finished", "nothing"]
    """Trials that the sampler learns from: all including pruned ones, only finished ones, or none."""
    models: bool
    """Whether the sampler has a model, and draws at random, or evenly, until it has startup_trials."""
    needs_one_space: bool
    """Whether the sampler draws parameters at random if some trials do not have them."""


def _nature(sampler: SearchSampler) -> _Nature:
    match sampler.type:
        case "auto" | "noisy_gp" | "tpe":
            return _Nature("all", models=True, needs_one_space=False)
        case "gp" | "cma":
            return _Nature("finished", models=True, needs_one_space=True)
        case "nsga2":
            return _Nature("finished", models=False, needs_one_space=True)
        case "qmc":
            return _Nature("nothing", models=False, needs_one_space=True)
        case "random" | "grid":
            return _Nature("nothing", models=False, needs_one_space=False)
        case never:
            assert_never(never)


def issues_of(study: Study, experiment: Experiment) -> list[Issue]:
    """Returns the errors that make the study impossible. Its search space alone is checked before."""
    return [issue for rule in RULES for issue in rule(study, experiment)]


def warnings_of(study: Study, experiment: Experiment) -> list[Issue]:
    """Returns warnings about settings that have no effect or are discouraged. Each names the setting."""
    idle = (issue for rule in IDLE_KNOBS for issue in rule(study))
    return [*idle, *_few_seeds(study, experiment)]


def _few_seeds(study: Study, experiment: Experiment) -> Iterator[Issue]:
    seeds = _num_seeds(study, experiment)
    for index, goal in enumerate(study.targets):
        if goal.over_seeds == "lower_bound" and LEAST_CAUTIOUS <= seeds < WELL_CAUTIOUS:
            yield Issue(
                "is dominated by noise with few seeds",
                (*(("goal",) if study.goal else ("goals", index)), "over_seeds"),
                f"lower_bound with {seeds} seeds per trial",
                hint=f"take the mean, or {WELL_CAUTIOUS} seeds",
            )


def _matrix(_: Study, experiment: Experiment) -> Iterator[Issue]:
    if experiment.matrix is not None:
        hint = "a study varies fields itself; write overrides: {matrix: null}"
        yield Issue("the experiment has a matrix", ("experiment",), hint=hint)


def _goals(study: Study, experiment: Experiment) -> Iterator[Issue]:
    goals = [((("goal",) if study.goal else ("goals", index)), goal) for index, goal in enumerate(study.targets)]
    again = set(repeats(_measure(goal) for _, goal in goals))
    for index, (place, goal) in enumerate(goals):
        yield from _measured(place, goal, experiment)
        if index in again:
            yield Issue("is a goal already", (*place, "metric"), _named(goal), hint="keep one of the two")
        seeds = _num_seeds(study, experiment)
        if goal.over_seeds == "lower_bound" and seeds < LEAST_CAUTIOUS:
            yield Issue(
                "one seed has no interval over seeds"
                if seeds == 1
                else "the interval of two seeds is mostly noise: a search by it finds worse values than one by the"
                " mean",
                (*place, "over_seeds"),
                f"lower_bound with {seeds} seed{'s' * (seeds > 1)} per trial",
                "mean",
                f"give the trials {WELL_CAUTIOUS} seeds: overrides: {{seeds: [0, 1, 2, 3, 4]}}, seeds_per_trial: 5",
            )


def _constraints(study: Study, experiment: Experiment) -> Iterator[Issue]:
    again = set(repeats(map(_measure, study.constraints)))
    for index, constraint in enumerate(study.constraints):
        place = ("constraints", index)
        yield from _measured(place, constraint, experiment)
        if index in again:
            hint = "one constraint takes both max and min"
            yield Issue("is bounded already", (*place, "metric"), _named(constraint), hint=hint)
        name, metric = constraint.metric, BY_NAME.get(constraint.metric)
        least, most = _OF_SETS.get(name) or ((metric.least, metric.most) if metric else (-math.inf, math.inf))
        if constraint.max is not None and constraint.max < least:
            given, allowed = f"{constraint.max:g}", f"{least:g} or more"
            yield Issue("no trial can satisfy it", (*place, "max"), given, allowed, f"{name} is never below that")
        if constraint.min is not None and constraint.min > most:
            given, allowed = f"{constraint.min:g}", f"{most:g} or less"
            yield Issue("no trial can satisfy it", (*place, "min"), given, allowed, f"{name} is never above that")


def _measure(measured: Goal | Constraint) -> tuple[str, str]:
    return measured.dataset, measured.metric


def _named(measured: Goal | Constraint) -> str:
    """Returns the name of the measure in records: `kl/reverse`, `mean@4 on held_out`."""
    return f"{measured.metric} on {measured.dataset}" if measured.dataset else measured.metric


def _measured(place: Path, measured: Goal | Constraint, experiment: Experiment) -> Iterator[Issue]:
    """Yields the issues with the measure of a goal or a constraint."""
    at = (*place, "metric")
    unanswered = next((s for s in experiment.data.evaluation if s.name == measured.dataset and not s.answered), None)
    if unanswered:
        yield from _evaluation_set((*place, "dataset"), measured.dataset, experiment)
        if unanswered.measures and measured.metric not in unanswered.measures:
            message = f"is not measured on a set of source {unanswered.source}"
            yield Issue(message, at, show(measured.metric), ", ".join(unanswered.measures))
        return
    if measured.dataset and measured.metric.startswith("drift/") and measured.metric in BY_NAME:
        yield from _evaluation_set((*place, "dataset"), measured.dataset, experiment)
        if not experiment.evaluation.drift:
            hint = "set it under overrides: evaluation.drift"
            yield Issue("is recorded only with evaluation.drift", at, measured.metric, hint=hint)
        return
    if not EVALUATED.fullmatch(measured.metric):
        yield from _trained(place, measured, experiment)
        return
    yield from _evaluation_set((*place, "dataset"), measured.dataset, experiment)
    measure, _, digits = measured.metric.partition("@")
    k, samples = int(digits), experiment.evaluation.samples_per_problem
    if k > samples:
        hint = "raise evaluation.samples_per_problem"
        yield Issue("more samples than an evaluation has", at, measured.metric, f"k at most {samples}", hint)
    elif (reward := experiment.reward_on(measured.dataset)).grades() != (measure == "score"):
        graded = reward.grades()
        reason = (
            "is graded and does not mark answers right or wrong"
            if graded
            else "marks answers right or wrong and is not graded"
        )
        allowed = f"score@{k}" if graded else f"mean@{k}, pass@{k} or maj@{k}"
        yield Issue(f"is not measured: reward.type {reward.type} {reason}", at, measured.metric, allowed)
    elif measure not in ("mean", "score") and k != samples and k & (k - 1):
        powers = [2**exponent for exponent in range(samples.bit_length())]
        allowed = ", ".join(f"{measure}@{size}" for size in sorted({*powers, samples}))
        yield Issue("is not a measure of an evaluation", at, measured.metric, allowed)


def _evaluation_set(place: Path, name: str, experiment: Experiment) -> Iterator[Issue]:
    evaluated = experiment.evaluation.datasets or tuple(source.name for source in experiment.data.evaluation)
    allowed = ", ".join(evaluated) or "none: data.evaluation is empty"
    if not name:
        yield Issue("missing", place, allowed=allowed, hint="say on which evaluation set")
    elif name not in evaluated:
        yield Issue("no such evaluation set", place, show(name), allowed, nearest(name, evaluated))


def _trained(place: Path, measured: Goal | Constraint, experiment: Experiment) -> Iterator[Issue]:
    """Yields the issues with a measure that is a training metric."""
    known, at = list(BY_NAME), (*place, "metric")
    if measured.metric in _OF_SETS:
        yield from _evaluation_set((*place, "dataset"), measured.dataset, experiment)
        if any(source.name == measured.dataset for source in experiment.data.evaluation):
            source = "multiple_choice" if measured.metric == "accuracy" else "text"
            message, hint = "is not measured on a set that is answered", f"it is of sets of source {source}"
            yield Issue(message, at, show(measured.metric), "mean@k, pass@k, maj@k or score@k", hint)
        return
    if measured.metric not in known:
        allowed = "mean@k, pass@k, maj@k, score@k, accuracy, bits_per_byte or a metric of training (docs/metrics.md)"
        yield Issue("no such measure", at, show(measured.metric), allowed, nearest(measured.metric, known))
        return
    if measured.dataset:
        yield Issue("a training metric has no evaluation set", (*place, "dataset"), show(measured.dataset))
    section, _, key = BY_NAME[measured.metric].recorded_with.partition(".")
    if section in Experiment.model_fields and not getattr(getattr(experiment, section), key):
        hint = f"set it under overrides: {section}.{key}"
        yield Issue(f"is recorded only with {section}.{key}", at, measured.metric, hint=hint)
    elif measured.metric.startswith("drift/") and not experiment.answers_sets:
        hint = "name a set of problems in data.evaluation"
        yield Issue("needs responses to an evaluation set, and no set gets any", at, measured.metric, hint=hint)


def _num_seeds(study: Study, experiment: Experiment) -> int:
    return study.seeds_per_trial or len(experiment.seeds)


def _seeds(study: Study, experiment: Experiment) -> Iterator[Issue]:
    if study.seeds_per_trial > len(experiment.seeds):
        yield Issue(
            "more seeds than the experiment has",
            ("seeds_per_trial",),
            str(study.seeds_per_trial),
            f"at most {len(experiment.seeds)}",
            "give the experiment more of them: overrides: {seeds: [0, 1, 2]}",
        )


def _sampler(study: Study, _: Experiment) -> Iterator[Issue]:
    place = ("sampler", "type")
    if study.sampler.type == "cma":
        if len(study.targets) > 1:
            given = f"cma with {len(study.targets)} goals"
            yield Issue("searches for one goal only", place, given, "tpe, gp, nsga2, qmc, random, grid")
        if find_spec("cmaes") is None:
            yield Issue(
                "needs the package cmaes, which is not installed",
                place,
                "cma",
                hint='pip install "rpg-experiments[cma]"',
            )
    for path, searched in study.parameters.items():
        at = ("parameters", path)
        if study.sampler.type == "cma" and isinstance(searched, (Choice, Cases)):
            hint = "take tpe or gp, or write one study for each candidate"
            yield Issue("cma searches numbers only", at, describe(searched), "float or int", hint)
        if study.sampler.type == "grid" and not num_candidates(searched):
            hint = "give it a step, list the values as a choice, or take qmc"
            yield Issue("a grid needs a finite range", at, f"any number in {describe(searched)}", "a step", hint)


def _pruner(study: Study, experiment: Experiment) -> Iterator[Issue]:
    if not study.rungs:
        return
    if len(study.targets) > 1:
        given = f"{study.pruner.type} with {len(study.targets)} goals"
        hint = "keep one goal, and bound the others as constraints"
        yield Issue("trials are pruned by one goal only", ("pruner", "type"), given, "none", hint)
    searched = study.parameters.get("training.steps")
    steps = experiment.training.steps
    if searched and num_candidates(searched):
        steps = min(value for value in candidates(searched) if isinstance(value, int))
    for index, rung in enumerate(study.rungs):
        if rung >= steps:
            place, hint = ("pruner", "rungs", index), "a trial is evaluated at its last step anyway"
            yield Issue("the rung is not below training.steps", place, f"{rung}", f"at most {steps - 1}", hint)


def _confirmation(study: Study, experiment: Experiment) -> Iterator[Issue]:
    if study.confirm is None or not study.confirm.dataset:
        return
    goal = study.targets[0]
    if is_evaluated(goal):
        yield from _evaluation_set(("confirm", "dataset"), study.confirm.dataset, experiment)
    else:
        yield Issue("a training metric has no evaluation set", ("confirm", "dataset"), show(study.confirm.dataset))


def _idle_pruner(study: Study) -> Iterator[Issue]:
    pruner = study.pruner
    if isinstance(pruner, Patience) and pruner.patience >= len(pruner.rungs):
        yield Issue(
            "no trial is ever stopped",
            ("pruner", "patience"),
            f"{pruner.patience} rungs without an improvement after the first, of {len(pruner.rungs)} rungs",
            f"at most {len(pruner.rungs) - 1}" if len(pruner.rungs) > 1 else "",
            "lower patience or add rungs",
        )
    if isinstance(pruner, MedianRule) and pruner.startup_trials >= study.trials:
        given = f"the first {pruner.startup_trials} of {study.trials} trials"
        yield Issue("no trial is ever stopped", ("pruner", "startup_trials"), given, hint="lower startup_trials")
    if isinstance(pruner, Halving) and pruner.eta > study.trials:
        given = f"1 of {pruner.eta} continues from a rung, of {study.trials} trials"
        yield Issue("no trial continues", ("pruner", "eta"), given, hint="lower eta or raise trials")


def _left_to_maximize(study: Study) -> Iterator[Issue]:
    for index, goal in enumerate(study.targets):
        metric, by_default = BY_NAME.get(goal.metric), "direction" not in goal.model_fields_set
        if by_default and (metric.better == "lower" if metric else lower_is_better(goal.metric)):
            place = ("goal",) if study.goal else ("goals", index)
            hint = "write direction: minimize, or direction: maximize if larger values are meant"
            yield Issue("smaller values are better, and the goal maximizes them", place, _named(goal), hint=hint)


def _idle_sampler(study: Study) -> Iterator[Issue]:
    sampler, place = study.sampler, ("sampler", "type")
    nature = _nature(sampler)
    if study.rungs and nature.learns_from == "finished":
        given = f"{sampler.type} with {study.pruner.type}"
        hint = "take tpe, which learns from pruned trials too"
        yield Issue("the sampler learns from finished trials only", place, given, hint=hint)
    conditional = [path for path, searched in study.parameters.items() if searched.when]
    if conditional and nature.needs_one_space:
        given, hint = ", ".join(conditional), "take tpe, which searches them too"
        yield Issue(f"{sampler.type} draws parameters that have conditions at random", place, given, hint=hint)
    if study.constraints and sampler.type == "cma":
        hint = "take tpe, gp or nsga2; the best trial satisfies the constraints with any sampler"
        yield Issue("the sampler does not learn from constraints", place, "cma", hint=hint)
    if nature.models and sampler.startup_trials >= study.trials:
        spread = sampler.type in ("auto", "noisy_gp")
        given = f"{sampler.startup_trials} {'evenly spread' if spread else 'random'} trials, of {study.trials}"
        hint = "lower startup_trials or raise trials"
        hint += "" if spread else "; or take qmc, which spreads them evenly"
        yield Issue(
            "the sampler will not fit its model: `startup_trials` is not below `trials`",
            ("sampler", "startup_trials"),
            given,
            hint=hint,
        )
    if not nature.models and "startup_trials" in sampler.model_fields_set:
        yield Issue("startup_trials has no effect", ("sampler", "startup_trials"), sampler.type)
    if sampler.type == "grid" and "seed" in sampler.model_fields_set:
        yield Issue("seed has no effect", ("sampler", "seed"), "grid")
    if nature.learns_from == "nothing" and (study.warm_start.studies or study.warm_start.runs):
        yield Issue(
            "the sampler does not learn from results", ("warm_start",), sampler.type, hint="take tpe, gp or nsga2"
        )


def _idle_trials(study: Study) -> Iterator[Issue]:
    if study.sampler.type == "grid":
        wanted = num_combinations(study.parameters) + 1
        given = f"{study.trials}, of {wanted - 1} combinations and the baseline"
        if study.trials < wanted:
            hint = f"raise trials to {wanted}, or take qmc, which spreads them evenly"
            yield Issue("the grid is not finished", ("trials",), given, hint=hint)
        elif study.trials > wanted:
            yield Issue("the grid has fewer combinations", ("trials",), given, hint=f"lower trials to {wanted}")
    if study.parallel > study.trials:
        yield Issue("more concurrent trials than trials", ("parallel",), f"{study.parallel} of {study.trials}")
    if study.confirm and study.confirm.candidates >= study.trials:
        given = f"{study.confirm.candidates} of {study.trials} trials"
        hint = "the baseline is confirmed anyway: lower candidates"
        yield Issue("every trial is confirmed", ("confirm", "candidates"), given, hint=hint)


def _idle_constraints(study: Study) -> Iterator[Issue]:
    for index, constraint in enumerate(study.constraints):
        place = ("constraints", index)
        metric = BY_NAME.get(constraint.metric)
        for name, bound in (("max", constraint.max), ("min", constraint.min)):
            if bound is None:
                continue
            if metric and (bound >= metric.most if name == "max" else bound <= metric.least):
                edge = f"at most {metric.most:g}" if name == "max" else f"at least {metric.least:g}"
                yield Issue("every trial satisfies it", (*place, name), f"{bound:g}: {metric.name} is always {edge}")
            goal, better = study.targets[0], "minimize" if name == "max" else "maximize"
            if len(study.targets) == 1 and _measure(goal) == _measure(constraint) and goal.direction == better:
                given, hint = f"{_named(goal)} is the goal", "bound another measure"
                yield Issue("does not change which trial is best", (*place, name), given, hint=hint)


RULES = (_matrix, _goals, _constraints, _seeds, _sampler, _pruner, _confirmation)
IDLE_KNOBS = (_left_to_maximize, _idle_pruner, _idle_sampler, _idle_trials, _idle_constraints)
