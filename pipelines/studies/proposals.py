"""Proposal of the next trial's params. Each sampler sees a temporary study, with the trials in the form that suits it.

The stored trials carry more than Optuna's samplers understand: a paused trial counts as stopped at its rung, one whose
values caused its failure counts as pruned, results from elsewhere count without being trials, and a range that has
moved since would hide a trial's param. So each proposal fills a study in memory, under the present ranges.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, assert_never

from pipelines.studies import noisy_gp, space
from pipelines.studies.samplers import optuna_inside
from pipelines.studies.trials import ForeignResult, Trial, violations
from specs.schema.study import FloatRange, IntRange, Study, measure_label
from specs.study_space import Params, combinations, holds, in_order, is_active

if TYPE_CHECKING:
    import optuna


@dataclass(frozen=True, slots=True)
class Proposal:
    """Proposal of a sampler, with its notes for later proposals."""

    params: Params
    sampler_notes: Mapping[str, Any]
    """Notes that are stored with the trial."""


MOST_PARAMETERS = 20
"""Largest number of parameters for which `auto` chooses noisy_gp."""


def automatic(study: Study) -> str:
    """Returns the sampler that `auto` means."""
    return "noisy_gp" if len(study.parameters) <= MOST_PARAMETERS else "tpe"


def is_exhausted(study: Study, trials: Sequence[Trial]) -> bool:
    """Returns whether the sampler has nothing more to propose: every combination of a grid is a trial."""
    return study.sampler.type == "grid" and next(_left_of_grid(study, trials), None) is None


def propose(
    study: Study, trials: Sequence[Trial], foreign: Sequence[ForeignResult] = (), *, horizon: int = 0
) -> Proposal:
    """Returns the next trial's params, unless the sampler is exhausted. `horizon`: the step at which a trial ends.

    The same study proposes the same params after the same results: each trial has a sampler seeded by the study's seed
    and the trial's number.
    """
    if study.sampler.type == "grid":
        return Proposal(next(_left_of_grid(study, trials)), {})
    if study.sampler.type == "noisy_gp" or (study.sampler.type == "auto" and automatic(study) == "noisy_gp"):
        return Proposal(*noisy_gp.propose(study, trials, foreign, horizon=horizon))
    import optuna

    view = optuna.create_study(directions=[goal.direction for goal in study.targets], sampler=_sampler(study, trials))
    shown = [_as_shown(study, trial) for trial in trials] + [_foreign(study, result) for result in foreign]
    view.add_trials([trial for trial in shown if trial is not None])
    asked = view.ask()
    return Proposal(space.suggest(asked, study.parameters), optuna_inside.notes_of(view, asked))


def _left_of_grid(study: Study, trials: Sequence[Trial]) -> Iterator[Params]:
    """Yields the combinations that are not trials yet."""
    done = {space.text_of(trial.params) for trial in trials if not trial.baseline}
    return (params for params in combinations(study.parameters) if space.text_of(params) not in done)


def stored_params(study: Study, params: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns params and distributions in Optuna's form. A number outside its range gets its own range, which contains
    it. A choice that is not among the candidates is left out."""
    from optuna.distributions import FloatDistribution, IntDistribution

    kept: dict[str, Any] = {}
    distributions: dict[str, Any] = {}
    for path, value in params.items():
        searched = study.parameters[path]
        if holds(searched, value):
            distributions[path] = space.distribution(searched)
        elif isinstance(searched, FloatRange) and isinstance(value, (int, float)):
            low, high = searched.float
            distributions[path] = FloatDistribution(min(low, value), max(high, value), log=searched.log and value > 0)
        elif isinstance(searched, IntRange) and isinstance(value, int):
            low, high = searched.int
            distributions[path] = IntDistribution(min(low, value), max(high, value), log=searched.log and value > 0)
        else:
            continue
        kept[path] = space.stored(value, searched)
    return kept, distributions


def _as_shown(study: Study, trial: Trial) -> "optuna.trial.FrozenTrial | None":
    """Returns the trial in the sampler's form; None if the trial carries no information."""
    from optuna.trial import TrialState, create_trial

    inside = all(holds(study.parameters[path], value) for path, value in trial.params.items())
    expected = [path for path in in_order(study.parameters) if path in trial.params]
    active = [path for path in in_order(study.parameters) if is_active(study.parameters[path], trial.params)]
    at_fault = trial.about.get("at_fault")
    if not inside or expected != active or (trial.state == "failed" and not at_fault):
        return None
    if trial.state == "finished":
        state = TrialState.COMPLETE
    elif trial.state in ("running", "pending", "cancelled"):
        state = TrialState.RUNNING
    else:
        state = TrialState.PRUNED
    params, distributions = stored_params(study, trial.params)
    kept = trial.about.get("constraints")
    return create_trial(
        state=state,
        values=trial.values,
        params=params,
        distributions=distributions,
        system_attrs={**optuna_inside.first_generation(), **trial.sampler_notes},
        intermediate_values={step: score.value for step, score in trial.rungs.items()},
        constraints=violations(study, kept) if kept is not None and trial.state == "finished" else None,
    )


def _foreign(study: Study, result: ForeignResult) -> "optuna.trial.FrozenTrial":
    from optuna.trial import create_trial

    params, distributions = stored_params(study, result.params)
    known = all(measure_label(bound.metric, bound.dataset) in result.measured for bound in study.constraints)
    return create_trial(
        values=result.values,
        params=params,
        distributions=distributions,
        system_attrs=optuna_inside.first_generation(),
        constraints=violations(study, result.measured) if study.constraints and known else None,
    )


def _sampler(study: Study, trials: Sequence[Trial]) -> "optuna.samplers.BaseSampler":
    import warnings

    import numpy as np
    from optuna import samplers
    from optuna.exceptions import ExperimentalWarning

    startup = study.sampler.startup_trials
    seed = int(np.random.SeedSequence([study.sampler.seed, len(trials)]).generate_state(1)[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        match study.sampler.type:
            case "random":
                return samplers.RandomSampler(seed=seed)
            case "tpe" | "auto":
                conditional = any(searched.when for searched in study.parameters.values())
                return samplers.TPESampler(seed=seed, n_startup_trials=startup, group=conditional)
            case "gp":
                return samplers.GPSampler(seed=seed, n_startup_trials=startup, warn_independent_sampling=False)
            case "cma":
                return samplers.CmaEsSampler(seed=seed, n_startup_trials=startup, warn_independent_sampling=False)
            case "nsga2":
                return samplers.NSGAIISampler(seed=seed, population_size=max(2, min(50, study.trials // 4)))
            case "qmc":
                place = sum(not trial.baseline for trial in trials)
                independent = samplers.RandomSampler(seed=seed)
                return optuna_inside.one_sequence(place, seed=study.sampler.seed, independent=independent)
            case "noisy_gp" | "grid":
                raise ValueError(f"{study.sampler.type} is not a sampler of Optuna")
            case never:
                assert_never(never)
