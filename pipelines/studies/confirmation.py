"""Confirmation: the best trials and the baseline are run again on the same fresh seeds, which no trial of the search
had.

The best of many trials is biased upward: its value is its true value plus the variation of its seeds. Only fresh seeds
separate the two. A unit of the confirmation is one arm with one seed; units are the trials of a second Optuna study,
`NAME/confirmation`.

Seeds come in rounds, and an interim analysis after each compares the arms. The allowed error of all analyses is spent
over the rounds, see `level` in rpg/statistics/comparison.py: the last one has the whole error of a single analysis, the
earlier ones the small shares of further analyses. So a confirmation that reaches its end with all its arms claims as
much as one with a single analysis. Stopping a candidate that can no longer win costs no error, but its fewer seeds
weaken the verdict on the others: with candidates 4 and 0 points ahead it finds one better in 64 % of studies instead of
67 %.
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
"""Suffix of the name of the experiment that confirms a study."""
LARGEST_SEED = 2**32
LEAST_CHANCE = 0.05
"""A candidate stops if its probability of differing from the baseline after all seeds is below this."""


def experiment_name(study: Study) -> str:
    """Returns the name of the experiment with the confirmation's runs: one group of seeds for each arm, the baseline
    first."""
    return experiment_of_confirmation(study.name)


def experiment_of_confirmation(study: str) -> str:
    """Returns the name of the experiment that confirms a study."""
    return f"{study[:50]}{CONFIRMATION}"


def fresh_seeds(study: Study, searched: Sequence[int]) -> list[int]:
    """Returns seeds that no trial of the search has. Every call returns the same ones."""
    wanted, first = study.confirm.seeds if study.confirm else 0, max(searched) + 1
    candidates = count(first) if first + wanted <= LARGEST_SEED else count()
    unused = (seed for seed in candidates if seed not in searched)
    return list(islice(unused, wanted))


def arms(study: Study, trials: Sequence[Trial], *, horizon: int = 0) -> list[Arm]:
    """Returns the arms, without units: the baseline, then the candidates, the best first. With several goals the
    candidates are those of the Pareto front, ordered by the first goal.

    A candidate satisfies the constraints, and differs from the baseline and from the candidates before it. Returns no
    arms without a candidate.
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
    """Returns the largest cost of the confirmation, for each limit of the budget. All its possible runs count, each at
    the baseline's cost, or at the mean of finished trials if the baseline has none. Empty without a confirmation, and
    until a trial has finished."""
    finished = [trial for trial in trials if trial.values is not None]
    costing = [trial for trial in finished if trial.baseline] or finished
    if study.confirm is None or not costing:
        return {}
    measured = sum(len(trial.about.get("run_ids", ())) for trial in costing)
    runs = (study.confirm.candidates + 1) * study.confirm.seeds / max(1, measured)
    costs = {name: runs * sum(trial.own_cost(name) for trial in costing) for name in ("tokens", "gpu_hours", "seconds")}
    # Workers share the runs, and therefore the hours.
    return {**costs, "hours": costs.pop("seconds") / 3600 / study.parallel}


def ranked(study: Study, trials: Sequence[Trial], *, horizon: int = 0) -> list[Trial]:
    """Returns the finished trials that satisfy the constraints, the best first. With several goals, trials of the
    Pareto front come first.

    With noisy_gp they are ordered by posterior mean, on which the variation of a trial's own seeds has little
    influence.
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
    """Returns the sampler model's view of each finished trial that satisfies the constraints, by number; empty without
    a model, and with several goals."""
    if study.sampler.type not in ("auto", "noisy_gp") or len(study.targets) > 1:
        return {}
    finished = [trial for trial in trials if trial.values is not None and is_feasible(study, trial)]
    return noisy_gp.standings(study, trials, finished, horizon=horizon)


def is_feasible(study: Study, trial: Trial) -> bool:
    """Returns whether a finished trial satisfies the study's constraints."""
    return all(missed <= 0 for missed in violations(study, trial.about.get("constraints") or {}).values())


# The rounds.


def rounds(most: int) -> list[int]:
    """Returns the numbers of seeds at which the arms are compared: `most`, half of it and so on, down to two.

    Example:
        >>> rounds(5), rounds(8)
        ([2, 3, 5], [2, 4, 8])
    """
    numbers = [most]
    while numbers[0] > 2:
        numbers.insert(0, max(2, math.ceil(numbers[0] / 2)))
    return numbers


def may_win(candidate: ArrayLike, baseline: ArrayLike, most: int, confidence: float) -> bool:
    """Returns whether, by its results so far, a candidate may still differ from the baseline after all seeds.

    Its remaining seeds are predicted from its present ones; its lead has to reach the least difference that an analysis
    after `most` seeds can detect.

    Args:
        candidate, baseline: one value for each seed, equally many, larger is better.
        most: seeds of each arm at the end.
        confidence: confidence of the last analysis.
    Example: an arm that is behind by three times its scatter does not win.
        >>> may_win([0.4, 0.41, 0.39], [0.43, 0.44, 0.45], 5, 0.95)
        False
    """
    from scipy import special

    ahead, behind = np.asarray(candidate, dtype=np.float64), np.asarray(baseline, dtype=np.float64)
    if not (np.isfinite(ahead).all() and np.isfinite(behind).all()):
        return False  # a failed seed without a value: nothing will be claimed
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
    """One interim analysis of the arms, after a round."""

    seeds: int
    """Seeds of each remaining arm."""
    share: int
    """The analysis's share of the error; see `rpg.statistics.comparison.level`."""
    most: int
    """Largest number of seeds of each arm, in the study at that time."""
    arms: tuple[int, ...]
    """Numbers of the arms' trials."""
    dataset: str
    """The evaluation set of the confirmation."""
    stopped: tuple[int, ...] = ()
    """Arms that stop here, because they can no longer win."""
    won: bool = False
    """Whether a candidate is better than the baseline. If so, the confirmation ends."""

    def plain(self) -> dict[str, Any]:
        """Returns the analysis as JSON data."""
        return asdict(self)

    @classmethod
    def read(cls, plain: Mapping[str, Any]) -> "Look":
        """Returns the analysis that `plain` wrote."""
        return cls(**{**plain, "arms": tuple(plain["arms"]), "stopped": tuple(plain["stopped"])})


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a confirmation."""

    seeds: Mapping[int, int]
    """Trial's number -> number of its seeds that have been requested so far."""
    due: int
    """The number of seeds at the end of the current round; 0 after the confirmation."""
    stopped: Mapping[int, int]
    """Trial's number -> number of seeds after which the arm stopped early."""


def progress(looks: Sequence[Look], ended: Mapping[int, int], baseline: int | None, most: int) -> Progress:
    """Returns the progress of a confirmation.

    Args:
        looks: the interim analyses of exactly these arms.
        ended: arm, by its trial's number -> number of its seeds that have ended, from the first on.
        baseline: the baseline among them.
        most: most seeds of each arm.
    """
    looks = [look for look in looks if look.seeds <= most]
    last = max((look.seeds for look in looks), default=0)
    # A decision that was made for another largest number of seeds is made again.
    bound = [look for look in looks if look.most == most]
    stopped = {arm: look.seeds for look in bound for arm in look.stopped}
    going = [arm for arm in ended if arm not in stopped]
    ahead = [number for number in rounds(most) if number > last]
    due = 0
    if ahead and set(going) - {baseline} and not any(look.won for look in bound):
        # Seeds that have ended already are analysed together.
        whole = [number for number in ahead if all(ended[arm] >= number for arm in going)]
        due = max(whole, default=ahead[0])
    return Progress({arm: stopped.get(arm, due or last) for arm in ended}, due, stopped)


def share_of(seeds: int, most: int, taken: Mapping[int, int]) -> int:
    """Returns an interim analysis's share of the error.

    Args:
        taken: number of seeds -> share of the earlier analyses. A repeated analysis at the same number costs nothing.
    """
    if seeds in taken:
        return taken[seeds]
    later = sum(number > seeds for number in rounds(most))
    return next(share for share in count(later) if share not in taken.values())


def look_at(home: Home, record: StudyRecord, look: Look) -> Look:
    """Returns the interim analysis with its findings: whether a candidate has won, and the arms that stop.

    Args:
        record: the study's record, with the arms on their present seeds.
        look: the analysis's known fields.
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
    """Returns the value of each seed, with a sign such that larger is better. A failed seed has the goal's worst
    value."""
    worst = record.first.worst
    values = [worst if unit.value is None else unit.value for unit in arm.units]
    return [-math.inf if value is None else record.first.better(value) for value in values]
