"""The sampler `noisy_gp`. It models a study's trials by a Gaussian process, and chooses the next trial and the
candidates.

The next trial is the one that is expected to raise the best posterior mean most (the knowledge gradient). Every trial
with a value informs it, at all of its rungs; one under way counts with its expected value; one whose values caused its
failure marks a region to avoid. With several goals each trial follows another weighting of them (ParEGO, Knowles 2006).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.studies.samplers.surrogate import MOST, Array, Observations, Surrogate, Whole, spread_out
from pipelines.studies.space import text_of
from pipelines.studies.trials import ForeignResult, Trial, violations
from specs.schema.study import Cases, Choice, IntRange, Range, Study
from specs.study_space import (
    Params,
    Space,
    bounds,
    build,
    combinations,
    in_order,
    is_active,
    is_among,
    is_same,
    names,
    num_candidates,
    num_combinations,
    on_grid,
    wanted_values,
)

_LEADING = 100
"""Number of tried points that may be the best when the next trial is chosen."""
_OPTIONS = 128
"""Number of points among which the next trial is first chosen. Then the neighbours of the best are tried."""
_NEIGHBOURS = 12
_DRAWS = 2000
_DRAWN = 200
"""Number of trials that may be the best. The probability of the others is practically 0."""


# The space as numbers.


@dataclass(frozen=True, slots=True)
class Encoding:
    """Encoding of a space as numbers. A *place* has one coordinate in [0, 1] for each parameter; a row has one column
    for each range of numbers, and one for each candidate of a choice or of cases.

    A parameter that is not searched is in the middle: the parameter in its `when` distinguishes it.
    """

    space: Space

    @property
    def groups(self) -> Whole:
        """[columns] index of the parameter of each column."""
        widths = [len(_names(searched)) or 1 for searched in self.space.values()]
        return np.repeat(np.arange(len(widths)), widths)

    def encode(self, places: Array) -> Array:
        """Returns places as rows."""
        active = self._active(places)
        columns: list[Array] = []
        for index, searched in enumerate(self.space.values()):
            place = np.where(active[:, index], places[:, index], 0.5)
            if count := len(_names(searched)):
                # Two different candidates are at distance 1.
                chosen = np.minimum((place * count).astype(np.intp), count - 1)
                known = active[:, index] & (places[:, index] >= 0)
                columns += list(math.sqrt(0.5) * ((chosen == np.arange(count)[:, None]) & known))
            else:
                columns.append(place)
        return np.stack(columns, axis=1)

    def decode(self, place: Array) -> Params:
        """Returns the params at a place."""
        at = dict(zip(self.space, place, strict=True))
        return build(self.space, lambda path: _value(self.space[path], float(at[path])))

    def places(self, every: Sequence[Mapping[str, Any]]) -> Array:
        """Returns the places that `decode` turns into the params."""
        rows = [[_place(searched, params.get(path)) for path, searched in self.space.items()] for params in every]
        return np.array(rows, dtype=np.float64).reshape(len(every), len(self.space))

    def _active(self, places: Array) -> NDArray[np.bool_]:
        """Returns [places, parameters]: whether the parameter is searched at the place."""
        index = {path: number for number, path in enumerate(self.space)}
        active = np.ones(places.shape, dtype=bool)
        for path in in_order(self.space):
            for parent, condition in self.space[path].when.items():
                searched, column = self.space[parent], index[parent]
                values, which = np.unique(places[:, column], return_inverse=True)
                wanted = wanted_values(condition)
                holds = np.array([is_among(_value(searched, float(value)), wanted) for value in values], dtype=bool)
                active[:, index[path]] &= active[:, column] & holds[which]
        return active


def _names(searched: Range) -> list[Any]:
    return names(searched) if isinstance(searched, (Choice, Cases)) else []


def _value(searched: Range, place: float) -> Any:
    if isinstance(searched, (Choice, Cases)):
        every = names(searched)
        return every[max(0, min(int(place * len(every)), len(every) - 1))]
    count, (low, high) = num_candidates(searched), bounds(searched)
    if not searched.log:
        return on_grid(searched, min(int(place * count), count - 1)) if count else _between(low, high, place)
    if isinstance(searched, IntRange):
        low, high = low - 0.5, high + 0.5
    value = math.exp(_between(math.log(low), math.log(high), place))
    least, most = bounds(searched)
    return min(most, max(least, round(value) if isinstance(searched, IntRange) else value))


def _between(low: float, high: float, place: float) -> float:
    return low + (high - low) * place


def _place(searched: Range, value: Any) -> float:
    """Returns a value's position: 0 to 1 within its range, beyond these outside it. A missing value is at 0.5, an
    unknown candidate at -1."""
    if value is None:
        return 0.5
    if isinstance(searched, (Choice, Cases)):
        every = names(searched)
        index = next((index for index, name in enumerate(every) if is_same(name, value)), None)
        return -1.0 if index is None else (index + 0.5) / len(every)
    low, high = (float(end) for end in bounds(searched))
    value = float(value)
    if isinstance(searched, IntRange):
        low, high = (low - 0.5, high + 0.5) if searched.log else (low - searched.step / 2, high + searched.step / 2)
    if searched.log:
        low, high, value = math.log(low), math.log(high), math.log(max(value, 1e-300))
    return min(1.5, max(-0.5, (value - low) / (high - low))) if high > low else 0.5


# Data of a study's trials.


@dataclass(frozen=True, slots=True)
class Known:
    """Training data of a model: a study's trials and results from elsewhere."""

    params: list[Params]
    """Params of each observation."""
    levels: list[float]
    trials: list[int]
    runs: list[int]
    values: list[tuple[float, ...]]
    """Values of each observation, one per goal. Larger is better."""
    pending: list[Params]
    """Trials under way."""
    failed: list[Params]
    """Params of trials whose values caused their failure."""
    missed: list[tuple[Params, dict[str, float]]]
    """Params of trials that broke constraints, with the amount by which each constraint was missed."""
    luck: tuple[float, float] | None
    """See Surrogate."""

    @classmethod
    def of(cls, study: Study, trials: Sequence[Trial], foreign: Sequence[ForeignResult], horizon: int) -> "Known":
        """Returns a study's present data. `horizon`: the step at which a trial ends."""
        known = cls([], [], [], [], [], [], [], [], _pooled_luck(trials))
        signs = [1.0 if goal.direction == "maximize" else -1.0 for goal in study.targets]
        last = horizon or 2 * max(study.rungs, default=1)
        for trial in trials:
            if not _is_whole(study, trial.params):
                continue
            if trial.state == "failed":
                if trial.about.get("at_fault"):
                    known.failed.append(trial.params)
                continue
            runs = max(1, len(trial.about.get("run_ids", ())))
            for step, score in trial.rungs.items():
                known._add(trial.params, math.log2(step / last), trial.number, runs, (signs[0] * score.value,))
            if trial.values is not None:
                values = tuple(sign * value for sign, value in zip(signs, trial.values, strict=True))
                known._add(trial.params, 0.0, trial.number, runs, values)
                if study.constraints:
                    known.missed.append((trial.params, violations(study, trial.about.get("constraints") or {})))
            elif trial.state in ("running", "pending", "cancelled"):
                known.pending.append(trial.params)
        for number, result in enumerate(foreign):
            values = tuple(sign * value for sign, value in zip(signs, result.values, strict=True))
            known._add(result.params, 0.0, -1 - number, 1, values)
            if study.constraints and result.measured:
                known.missed.append((result.params, violations(study, result.measured)))
        return known

    def _add(self, params: Params, level: float, trial: int, runs: int, values: tuple[float, ...]) -> None:
        if all(map(math.isfinite, values)):
            self.params.append(params)
            self.levels.append(level)
            self.trials.append(trial)
            self.runs.append(runs)
            self.values.append(values)

    def observations(self, encoding: Encoding, values: Array) -> Observations:
        """Returns the observations, each with a single value."""
        return Observations(
            encoding.encode(encoding.places(self.params)),
            np.array(self.levels),
            np.array(self.trials, dtype=np.intp),
            np.array(self.runs, dtype=np.float64),
            values,
        )


def _is_whole(study: Study, params: Params) -> bool:
    """Returns whether the params include every parameter that is searched together with them."""
    return all((path in params) == is_active(searched, params) for path, searched in study.parameters.items())


def _pooled_luck(trials: Sequence[Trial]) -> tuple[float, float] | None:
    """Returns the standard deviation of one run around its trial's mean, and its degrees of freedom; see `by_seed`."""
    squares = freedom = 0.0
    for trial in trials:
        by_seed = np.array(trial.about.get("by_seed", ()), dtype=np.float64)
        if len(by_seed) > 1:
            squares += float(((by_seed - by_seed.mean()) ** 2).sum())
            freedom += len(by_seed) - 1
    return (math.sqrt(squares / freedom), freedom) if freedom else None


def _one_value(known: Known, rng: np.random.Generator) -> Array:
    """Returns one value for each observation. With several goals it is the closeness to the best values of all goals,
    with weights that `rng` draws."""
    values = np.array(known.values)
    if values.shape[1] == 1:
        return values[:, 0]
    low, high = values.min(axis=0), values.max(axis=0)
    lost = (high - values) / np.where(high > low, high - low, 1.0)
    weights = rng.dirichlet(np.ones(values.shape[1]))
    return np.asarray(-(lost * weights).max(axis=1) - 0.05 * lost @ weights)


# The next trial.


_NOTHING = 1e-300
"""Worth of a trial that brings no information. It is above 0, so that such trials are ordered by their probability to
count.
"""
GAIN = "noisy_gp:expected_gain"
"""Name of a trial's note with the expected improvement of the best posterior mean when the trial was proposed."""


def propose(
    study: Study, trials: Sequence[Trial], foreign: Sequence[ForeignResult] = (), *, horizon: int = 0
) -> tuple[Params, dict[str, float]]:
    """Returns the next trial's params and note. The note is empty with several goals, and before there is a model."""
    encoding, number = Encoding(study.parameters), len(trials)
    rng = np.random.default_rng([study.sampler.seed, number])
    known = Known.of(study, trials, foreign, horizon)
    place = sum(not trial.baseline for trial in trials)
    if place + len(foreign) < study.sampler.startup_trials or len({*known.trials}) < 2:
        return encoding.decode(_sequence(len(study.parameters), study.sampler.seed, place + 1)[place]), {}
    seen = known.observations(encoding, _one_value(known, rng))
    model = Surrogate(seen, encoding.groups, luck=known.luck)
    tried = _unique([known.params[index] for index in spread_out(seen, MOST)])
    mean, _ = model.marginal(encoding.encode(encoding.places(tried)))
    leading = [tried[index] for index in np.argsort(-mean, kind="stable")[:_LEADING]]
    begun = {text_of(trial.params) for trial in trials}
    params, worth = _Search(encoding, known, model, leading, begun).best(rng)
    return params, {GAIN: worth if worth > _NOTHING else 0.0} if len(study.targets) == 1 else {}


def _sequence(dimensions: int, seed: int, count: int) -> Array:
    """Returns the first points of a low-discrepancy sequence: multiples of the powers of the generalised golden
    ratio, from a start that the seed sets (Roberts 2018, "The unreasonable effectiveness of quasirandom sequences")."""
    ratio = 1.5
    for _ in range(60):
        ratio = (1 + ratio) ** (1 / (dimensions + 1))
    strides = ratio ** -np.arange(1.0, dimensions + 1)
    start = np.random.default_rng(seed).random(dimensions)
    return np.asarray((start + np.arange(1, count + 1)[:, None] * strides) % 1.0)


@dataclass(frozen=True, slots=True)
class _Search:
    """Search for the point whose observation has the highest worth."""

    encoding: Encoding
    known: Known
    model: Surrogate
    leading: list[Params]
    """Tried params with the best posterior means, the best first."""
    begun: set[str]
    """Params that are trials already. They would give no new run."""

    def best(self, rng: np.random.Generator) -> tuple[Params, float]:
        """Returns the best params and their worth."""
        space, encoding = self.encoding.space, self.encoding
        if all(map(num_candidates, space.values())) and num_combinations(space) <= _OPTIONS:
            places = encoding.places(list(combinations(space)))
            place, worth = self._best_of(places, places)
            return encoding.decode(place), worth
        options = _sequence(len(space), int(rng.integers(2**31)), _OPTIONS)
        tried = encoding.places(self.leading)
        options = np.concatenate([options, *(self._near(leader, rng, 0.12) for leader in tried[:3])])
        points = np.concatenate([options, tried])
        first, _ = self._best_of(options, points)
        place, worth = self._best_of(np.concatenate([first[None], self._near(first, rng, 0.05)]), points)
        return encoding.decode(place), worth

    def _best_of(self, options: Array, points: Array) -> tuple[Array, float]:
        """Returns the place of highest worth that is not a trial yet, and its worth. If all places are trials, they all
        count."""
        worth = self._worth(options, points)
        ranked = np.argsort(-worth, kind="stable")
        new = (index for index in ranked if text_of(self.encoding.decode(options[index])) not in self.begun)
        chosen = next(new, ranked[0])
        return options[chosen], float(worth[chosen])

    def _near(self, place: Array, rng: np.random.Generator, width: float) -> Array:
        """Returns places near a place: numbers are changed, and sometimes the candidate of a choice."""
        moved = np.clip(place, 0.0, 1.0) + width * rng.standard_normal((_NEIGHBOURS, len(place)))
        for column, searched in enumerate(self.encoding.space.values()):
            if _names(searched):
                other = rng.random(_NEIGHBOURS) < 0.2
                moved[:, column] = np.where(other, rng.random(_NEIGHBOURS), place[column])
        return _folded(moved)

    def _worth(self, options: Array, points: Array) -> Array:
        """Returns the knowledge gradient of each option, times the probability that a trial with it counts."""
        encoded, targets = self.encoding.encode(options), self.encoding.encode(points)
        allowed = self._counts(targets) > 0.5
        targets = targets[allowed] if allowed.any() else targets
        pending = self.encoding.encode(self.encoding.places(self.known.pending))
        worth = self.model.knowledge_gradient(encoded, targets, runs=float(np.median(self.known.runs)), pending=pending)
        return np.asarray(np.maximum(worth, _NOTHING) * self._counts(encoded))

    def _counts(self, encoded: Array) -> Array:
        """Returns the probability that a trial neither fails because of its values nor breaks a constraint."""
        chance = _chance_to_end(self.encoding, self.known, encoded)
        for label in sorted({label for _, missed in self.known.missed for label in missed}):
            chance = chance * _chance_to_keep(self.encoding, self.known, label, encoded)
        return chance


def _folded(places: Array) -> Array:
    """Mirrors places outside the unit cube into it. If they were clipped instead, the cube's faces would attract the
    search."""
    return np.asarray(np.clip(1 - np.abs(1 - np.abs(places)), 0.0, 1.0))


def _chance_to_end(encoding: Encoding, known: Known, encoded: Array) -> Array:
    """Returns the probability that a trial does not fail because of its values, from nearby trials and one assumed
    success."""
    if not known.failed:
        return np.ones(len(encoded))

    def near(params: list[Params]) -> Array:
        gaps = encoded[:, None] - encoding.encode(encoding.places(params))[None]
        return np.asarray(np.exp(-0.5 * (gaps**2).sum(axis=2) / 0.15**2).sum(axis=1))

    ended = near(_unique(known.params)) + 0.2
    return np.asarray(ended / (ended + near(known.failed)))


def _chance_to_keep(encoding: Encoding, known: Known, label: str, encoded: Array) -> Array:
    """Returns the probability that a trial satisfies a constraint."""
    from scipy.special import ndtr

    rows = [(params, missed[label]) for params, missed in known.missed if missed.get(label, 1e9) < 1e9]
    if len(rows) < 3:
        return np.ones(len(encoded))
    count = len(rows)
    seen = Observations(
        encoding.encode(encoding.places([params for params, _ in rows])),
        np.zeros(count),
        np.arange(count),
        np.ones(count),
        -np.array([missed for _, missed in rows]),
    )
    mean, deviations = Surrogate(seen, encoding.groups).marginal(encoded)
    return np.asarray(ndtr(mean / np.maximum(deviations, 1e-9)))


def _unique(every: Sequence[Params]) -> list[Params]:
    return list({text_of(params): params for params in every}.values())


# Candidates.


@dataclass(frozen=True, slots=True)
class Standing:
    """The model's view of a trial."""

    mean: float
    """Posterior mean of the trial's value, with the goal's own sign."""
    deviation: float
    chance: float
    """Probability that this trial is the best of those under consideration."""


def standings(
    study: Study, trials: Sequence[Trial], among: Sequence[Trial], *, horizon: int = 0
) -> dict[int, Standing]:
    """Returns the model's view of the trials by the first goal: number -> standing; empty if there is too little
    data."""
    encoding = Encoding(study.parameters)
    known = Known.of(study, trials, (), horizon)
    sign = 1.0 if study.targets[0].direction == "maximize" else -1.0
    best = sorted(among, key=lambda trial: -sign * trial.values[0] if trial.values else math.inf)[:MOST]
    rated = [trial for trial in best if _is_whole(study, trial.params)]
    if len({*known.trials}) < 3 or not rated:
        return {}
    first = np.array([values[0] for values in known.values])
    model = Surrogate(known.observations(encoding, first), encoding.groups, luck=known.luck)
    different = _unique([trial.params for trial in rated])
    encoded = encoding.encode(encoding.places(different))
    mean, deviations = model.marginal(encoded)
    leaders = np.argsort(-(mean + deviations), kind="stable")[:_DRAWN]
    drawn = model.draws(encoded[leaders], _DRAWS, np.random.default_rng(study.sampler.seed))
    chances = np.zeros(len(different))
    chances[leaders] = np.bincount(drawn.argmax(axis=1), minlength=len(leaders)) / _DRAWS
    at = {text_of(params): index for index, params in enumerate(different)}
    return {
        trial.number: Standing(sign * float(mean[index]), float(deviations[index]), float(chances[index]))
        for trial in rated
        for index in [at[text_of(trial.params)]]
    }
