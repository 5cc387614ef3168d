"""Confirmation: the best trials and the baseline once more, each on the same seeds, which no trial of the search had.

The best of many trials flatters itself: its value is its worth and its luck. Only fresh seeds tell the two apart.
A unit of the confirmation is one arm with one seed; units are the trials of a second Optuna study, `NAME/confirmation`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

from pipelines.studies import noisy_gp
from pipelines.studies.answers.results import undominated
from pipelines.studies.space import text_of
from pipelines.studies.trials import Trial, violations
from specs.schema.study import Study

LARGEST_SEED = 2**32


@dataclass(frozen=True, slots=True)
class Arm:
    """A configuration that is confirmed on fresh seeds."""

    trial: int
    """The trial's number in the search."""
    params: Mapping[str, Any]
    baseline: bool

    @property
    def label(self) -> str:
        """Label on pages."""
        return "baseline" if self.baseline else f"trial {self.trial}"


def experiment_name(study: Study) -> str:
    """The experiment that the confirmation's runs are: one group of seeds an arm, the baseline first."""
    return f"{study.name[:50]}-confirmation"


def fresh_seeds(study: Study, searched: Sequence[int]) -> list[int]:
    """Seeds that no trial of the search has, the same at every call."""
    wanted, first = study.confirm.seeds if study.confirm else 0, max(searched) + 1
    candidates = count(first) if first + wanted <= LARGEST_SEED else count()
    unused = (seed for seed in candidates if seed not in searched)
    return list(islice(unused, wanted))


def arms(study: Study, trials: Sequence[Trial], *, horizon: int = 0) -> list[Arm]:
    """The baseline and the candidates, the best first; of several goals the front's, by the first goal.

    A candidate keeps the constraints, differs from the baseline and from the candidates before it. Without a candidate
    there is nothing to confirm.
    """
    if study.confirm is None:
        return []
    baseline = next((trial for trial in trials if trial.baseline), None)
    chosen = [Arm(baseline.number, baseline.params, baseline=True)] if baseline else []
    for trial in ranked(study, trials, horizon=horizon):
        if len(chosen) - bool(baseline) == study.confirm.candidates:
            break
        if not trial.baseline and all(text_of(trial.params) != text_of(arm.params) for arm in chosen):
            chosen.append(Arm(trial.number, trial.params, baseline=False))
    return [] if all(arm.baseline for arm in chosen) else chosen


def set_aside(study: Study, trials: Sequence[Trial]) -> dict[str, float]:
    """What the confirmation may cost at most, by limit of the budget: as many whole runs as it may have, each at the
    baseline's cost; empty without a confirmation, and until the baseline has finished."""
    baseline = next((trial.about for trial in trials if trial.baseline and trial.values is not None), None)
    if study.confirm is None or baseline is None:
        return {}
    runs = (study.confirm.candidates + 1) * study.confirm.seeds / max(1, len(baseline.get("run_ids", ())))
    costs = {name: runs * float(baseline.get(name, 0.0)) for name in ("tokens", "gpu_hours", "seconds")}
    # Of runs at a time none is waited for.
    return {**costs, "hours": costs.pop("seconds") / 3600 / study.parallel}


def ranked(study: Study, trials: Sequence[Trial], *, horizon: int = 0) -> list[Trial]:
    """The finished trials that keep the constraints, the best first; of several goals those of the front first.

    By noisy_gp a trial's place is that of its posterior mean, which its own luck has little part in.
    """
    finished = [trial for trial in trials if trial.values is not None and is_feasible(study, trial)]
    signs = [1 if goal.direction == "maximize" else -1 for goal in study.targets]
    merits = {
        trial.number: tuple(sign * value for sign, value in zip(signs, trial.values or (), strict=True))
        for trial in finished
    }
    front = set(undominated(merits))
    if known := standings(study, trials, horizon=horizon):
        merits = {number: (signs[0] * standing.mean,) for number, standing in known.items()}
        finished, front = [trial for trial in finished if trial.number in known], set(known)

    def place(trial: Trial) -> tuple[float, ...]:
        return (trial.number not in front, *(-merit for merit in merits[trial.number]), trial.number)

    return sorted(finished, key=place)


def standings(study: Study, trials: Sequence[Trial], *, horizon: int = 0) -> dict[int, noisy_gp.Standing]:
    """What the sampler's model says of the finished trials that keep the constraints, by number; empty without a
    model, and of several goals."""
    if study.sampler.type not in ("auto", "noisy_gp") or len(study.targets) > 1:
        return {}
    finished = [trial for trial in trials if trial.values is not None and is_feasible(study, trial)]
    return noisy_gp.standings(study, trials, finished, horizon=horizon)


def is_feasible(study: Study, trial: Trial) -> bool:
    """Whether a finished trial keeps the study's constraints."""
    return all(missed <= 0 for missed in violations(study, trial.about.get("constraints") or {}).values())
