"""Confirmation: the best trials and the baseline once more, each on the same seeds, which no trial of the search had.

The best of many trials flatters itself: its value is its worth and its luck. Only fresh seeds tell the two apart.
A unit of the confirmation is one arm with one seed; units are the trials of a second Optuna study, `NAME/confirmation`.

Seeds come in rounds, and after each the arms are held against each other. The error that all looks may make is spent
over the rounds, see `level` in rpg/statistics/comparison.py: the last one has the whole of a single look, those before
it the small shares of further looks. So a confirmation that goes to its end with all its arms claims as much as one
that looks once. To stop a candidate that cannot win any more costs no error, but its fewer seeds make the verdict claim
less of the others: of candidates 4 and 0 points ahead it tells one in 64 % of studies instead of 67 %.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count, islice
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from pipelines.home.home import Home
from pipelines.studies import noisy_gp
from pipelines.studies.answers.results import Arm, StudyRecord, undominated
from pipelines.studies.space import text_of
from pipelines.studies.trials import Trial, violations
from specs.schema.study import Study

CONFIRMATION = "-confirmation"
"""End of the name of the experiment that confirms a study."""
LARGEST_SEED = 2**32
LEAST_CHANCE = 0.05
"""Chance of being told from the baseline after all seeds, below which a candidate stops."""


def experiment_name(study: Study) -> str:
    """Returns the experiment that the confirmation's runs are: one group of seeds an arm, the baseline first."""
    return experiment_of_confirmation(study.name)


def experiment_of_confirmation(study: str) -> str:
    """Name of the experiment that confirms the study of a name."""
    return f"{study[:50]}{CONFIRMATION}"


def fresh_seeds(study: Study, searched: Sequence[int]) -> list[int]:
    """Seeds that no trial of the search has, the same at every call."""
    wanted, first = study.confirm.seeds if study.confirm else 0, max(searched) + 1
    candidates = count(first) if first + wanted <= LARGEST_SEED else count()
    unused = (seed for seed in candidates if seed not in searched)
    return list(islice(unused, wanted))


def arms(study: Study, trials: Sequence[Trial], *, horizon: int = 0) -> list[Arm]:
    """Returns the baseline and the candidates, the best first, without units; of several goals the front's, by the
    first goal.

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
    baseline's cost, or the mean of finished trials where it has none; empty without a confirmation, and until a trial
    has finished."""
    finished = [trial for trial in trials if trial.values is not None]
    costing = [trial.about for trial in finished if trial.baseline] or [trial.about for trial in finished]
    if study.confirm is None or not costing:
        return {}
    measured = sum(len(about.get("run_ids", ())) for about in costing)
    runs = (study.confirm.candidates + 1) * study.confirm.seeds / max(1, measured)
    costs = {
        name: runs * sum(float(about.get(name, 0.0)) for about in costing)
        for name in ("tokens", "gpu_hours", "seconds")
    }
    # Workers share the runs, and so the hours.
    return {**costs, "hours": costs.pop("seconds") / 3600 / study.parallel}


def ranked(study: Study, trials: Sequence[Trial], *, horizon: int = 0) -> list[Trial]:
    """Returns the finished trials that keep the constraints, the best first; of several goals those of the front first.

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
    """Returns whether a finished trial keeps the study's constraints."""
    return all(missed <= 0 for missed in violations(study, trial.about.get("constraints") or {}).values())


# The rounds.


def rounds(most: int) -> list[int]:
    """Numbers of seeds at which the arms are held against each other: `most`, its half and so on, from two seeds on.

    Example:
        >>> rounds(5), rounds(8)
        ([2, 3, 5], [2, 4, 8])
    """
    numbers = [most]
    while numbers[0] > 2:
        numbers.insert(0, max(2, math.ceil(numbers[0] / 2)))
    return numbers


def may_win(candidate: ArrayLike, baseline: ArrayLike, most: int, confidence: float) -> bool:
    """Returns whether a candidate has a chance to be told from the baseline after all seeds, by what it has shown.

    Its remaining seeds are predicted from those it has; it has to come out as far ahead as a look after `most` seeds
    tells apart.

    Args:
        candidate, baseline: a figure a seed, equally many, the larger the better.
        most: seeds of each at the end.
        confidence: of the last look.
    Example: what lies behind by three times its scatter does not win.
        >>> may_win([0.4, 0.41, 0.39], [0.43, 0.44, 0.45], 5, 0.95)
        False
    """
    from scipy import special

    ahead, behind = np.asarray(candidate, dtype=np.float64), np.asarray(baseline, dtype=np.float64)
    if not (np.isfinite(ahead).all() and np.isfinite(behind).all()):
        return False  # a seed is lost that nothing can count with: nothing will be claimed
    seen, left = len(ahead), most - len(ahead)
    gap = float(ahead.mean() - behind.mean())
    scatter = math.sqrt((ahead.var(ddof=1) + behind.var(ddof=1)) / 2)
    if scatter == 0:
        return gap > 0
    wanted = special.stdtrit(2 * (most - 1), (1 + confidence) / 2) * scatter * math.sqrt(2 / most)
    of_the_rest = (wanted * most - gap * seen) / left
    beyond = (of_the_rest - gap) / (scatter * math.sqrt(2 / seen + 2 / left))
    return bool(special.stdtr(2 * (seen - 1), -beyond) >= LEAST_CHANCE)


@dataclass(frozen=True, slots=True)
class Look:
    """One look at the arms, after a round."""

    seeds: int
    """Seeds of each arm that was still there."""
    share: int
    """Which share of the error it has; see `rpg.statistics.comparison.level`."""
    most: int
    """Seeds of each arm at most, as the study had it then."""
    arms: tuple[int, ...]
    """Numbers of their trials."""
    dataset: str
    """The evaluation set that confirms."""
    stopped: tuple[int, ...] = ()
    """Arms that stop here, since they cannot win any more."""
    won: bool = False
    """Whether a candidate is better than the baseline, which ends the confirmation."""

    def plain(self) -> dict[str, Any]:
        """Returns the look as JSON data."""
        return asdict(self)

    @classmethod
    def read(cls, plain: Mapping[str, Any]) -> "Look":
        """Reads what `plain` wrote."""
        return cls(**{**plain, "arms": tuple(plain["arms"]), "stopped": tuple(plain["stopped"])})


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a confirmation is."""

    seeds: Mapping[int, int]
    """Trial's number -> how many seeds are wanted of it by now."""
    due: int
    """The number of seeds at the end of the round under way; 0: the confirmation is over."""
    stopped: Mapping[int, int]
    """Trial's number -> after how many seeds it stopped, before the others."""


def progress(looks: Sequence[Look], ended: Mapping[int, int], baseline: int | None, most: int) -> Progress:
    """Returns how far a confirmation is.

    Args:
        looks: those at these very arms.
        ended: arm, as its trial's number -> how many of its seeds have ended, from the first on.
        baseline: the baseline among them.
        most: seeds of each arm at most.
    """
    looks = [look for look in looks if look.seeds <= most]
    last = max((look.seeds for look in looks), default=0)
    # What was decided by another number of seeds is open again.
    bound = [look for look in looks if look.most == most]
    stopped = {arm: look.seeds for look in bound for arm in look.stopped}
    going = [arm for arm in ended if arm not in stopped]
    ahead = [number for number in rounds(most) if number > last]
    due = 0
    if ahead and set(going) - {baseline} and not any(look.won for look in bound):
        # Seeds that are there already are looked at together.
        whole = [number for number in ahead if all(ended[arm] >= number for arm in going)]
        due = max(whole, default=ahead[0])
    return Progress({arm: stopped.get(arm, due or last) for arm in ended}, due, stopped)


def share_of(seeds: int, most: int, taken: Mapping[int, int]) -> int:
    """Which share of the error a look has.

    Args:
        taken: number of seeds -> share of the looks before. A look at as many seeds once more costs nothing.
    """
    if seeds in taken:
        return taken[seeds]
    later = sum(number > seeds for number in rounds(most))
    return next(share for share in count(later) if share not in taken.values())


def look_at(home: Home, record: StudyRecord, look: Look) -> Look:
    """Returns the look with what it finds: whether a candidate has won, and who stops.

    Args:
        record: the study's, with the arms on the seeds that they have by now.
        look: what is known of it beforehand.
    """
    from pipelines.studies.answers.answer import better_arms

    assert record.confirmation is not None
    baseline = next((arm for arm in record.confirmation.arms if arm.baseline), None)
    won = bool(better_arms(home, record))
    if won or baseline is None or look.seeds == look.most:
        return replace(look, won=won)
    own = _figures(record, baseline)
    stopped = [
        arm.trial
        for arm in record.confirmation.arms
        if not arm.baseline
        and len(arm.units) == look.seeds
        and not may_win(_figures(record, arm), own, look.most, record.confidence)
    ]
    return replace(look, stopped=tuple(stopped))


def _figures(record: StudyRecord, arm: Arm) -> list[float]:
    """Returns the figure of each seed, the larger the better, a failed one at the goal's worst value."""
    worst = record.first.worst
    values = [worst if unit.value is None else unit.value for unit in arm.units]
    return [-math.inf if value is None else record.first.better(value) for value in values]
