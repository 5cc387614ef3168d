"""Gaussian process over a study's space, with a model of the observations' noise.

An observation is a trial's value at a step. It is the point's own value there, plus the seed noise of that trial's
runs, which stays the same from rung to rung, plus a noise of each evaluation. A value at an early step informs the end
as far as the two steps' values have been correlated. The code handles only arrays; noisy_gp.py makes them from trials.

Source: Rasmussen and Williams 2006, chapters 2 and 5 (the process, its likelihood, basis functions under a flat prior);
the exponential correlation over the logarithm of steps is an Ornstein-Uhlenbeck process; the knowledge gradient for
correlated beliefs, Frazier, Powell and Dayanik 2009.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Whole = NDArray[np.intp]

_FLAT = 30.0
"""Prior variance of a step's mean, in units of standardised values. It is so large that the mean counts as unknown."""
_JITTER = 1e-6
_EVALUATION = 0.1
"""Share of a run's noise that comes from each evaluation. The rest is the seed noise, which a trial keeps from rung to
rung."""
MOST = 1000
"""Largest number of observations of the process."""
MOST_FITTED = 150
"""Largest number of observations in the fit of the hyperparameters."""
_QUANTILES = 15


@dataclass(frozen=True, slots=True)
class Observations:
    """Measured values of a study."""

    points: Array
    """[n, columns] in the encoding of the space."""
    levels: Array
    """[n] logarithm to base 2 of the step over the last step: 0 at the end, negative before it."""
    trials: Whole
    """[n] trial numbers; observations of one number share their seed noise."""
    runs: Array
    """[n] number of runs over which the value is a mean."""
    values: Array
    """[n] values, larger is better."""

    def some(self, chosen: Whole) -> "Observations":
        """Returns a subset of the observations."""
        return Observations(
            self.points[chosen], self.levels[chosen], self.trials[chosen], self.runs[chosen], self.values[chosen]
        )


@dataclass(frozen=True, slots=True)
class Prior:
    """Beliefs before any measurement, for standardised values, as means and standard deviations of logarithms."""

    length: tuple[float, float] = (-1.3, 0.4)
    """Distance over which values change little, for one parameter, in the unit range. It grows with the number of
    parameters."""
    signal: tuple[float, float] = (-0.2, 0.4)
    """Standard deviation of the points' values."""
    luck: tuple[float, float] = (-0.2, 0.4)
    """Standard deviation of a run's noise."""
    decay: tuple[float, float] = (-1.6, 0.8)
    """Loss of correlation when the step is halved."""
    growth: tuple[float, float] = (-1.2, 0.8)
    """Exponent with which the values' spread grows over the steps."""


class Surrogate:
    """The Gaussian process after some observations.

    Args:
        groups: [columns] parameter of each column; columns of one parameter share a length.
        luck: pooled standard deviation of one run around its trial's mean, and its degrees of freedom, if trials have
            several runs; None if the noise is known only from the scatter of the observations.
    """

    def __init__(
        self,
        observations: Observations,
        groups: Whole,
        *,
        luck: tuple[float, float] | None = None,
        prior: Prior | None = None,
    ) -> None:
        observations = observations.some(spread_out(observations, MOST))
        at_end = observations.values[observations.levels == observations.levels.max()]
        of_steps = [observations.values[observations.levels == level] for level in np.unique(observations.levels)]
        # Observations at the end were selected, and may be close to each other.
        spread = max(float(np.std(values)) for values in of_steps)
        self._scale = spread if spread > 1e-12 else 1.0
        self._shift = float(np.mean(at_end))
        self._seen = observations
        self._values = (observations.values - self._shift) / self._scale
        self._groups = groups
        self._prior = prior or Prior()
        self._means, self._deviations = self._beliefs(luck)
        chosen = spread_out(observations, MOST_FITTED)
        self._fitted = _Fixed.of(observations.some(chosen), groups), self._values[chosen]
        self._theta = self._fit()
        self._factor, self._weights = self._solved(self._theta)

    @property
    def luck(self) -> float:
        """Standard deviation of one run's noise at the end."""
        return float(np.exp(self._theta[-3])) * self._scale

    def posterior(self, points: Array) -> tuple[Array, Array]:
        """Returns the mean [n] and covariance [n, n] of the points' values at the last step, without noise, in the unit
        of the observations."""
        mean, left = self._projected(points)
        covariance = self._kernel(points, points, self._theta) - left.T @ left
        return self._shift + self._scale * mean, self._scale**2 * covariance

    def marginal(self, points: Array) -> tuple[Array, Array]:
        """Returns the mean and standard deviation of each point's value at the last step, without noise."""
        parts = [self.posterior(part) for part in np.array_split(points, -(-len(points) // 256))]
        means, variances = ([part[0] for part in parts], [np.diag(part[1]) for part in parts])
        return np.concatenate(means), np.sqrt(np.maximum(np.concatenate(variances), 0.0))

    def knowledge_gradient(self, options: Array, points: Array, *, runs: float = 1.0, pending: Array) -> Array:
        """Returns, for each option, the expected increase of the best posterior mean by one more observation there.

        Args:
            options: [m, columns] possible points of the next trial.
            points: [n, columns] points among which the best will be chosen.
            runs: number of runs over which the trial's value will be a mean.
            pending: [k, columns] points of trials under way, which count with their mean until they end.
        """
        mean, covariance = self.posterior(np.concatenate([options, points, pending]))
        noise = self.luck**2 / runs
        if len(pending):
            across = covariance[:, -len(pending) :]
            inside = across[-len(pending) :] + noise * np.eye(len(pending))
            covariance = covariance - across @ np.linalg.solve(inside, across.T)
        m, n = len(options), len(points)
        own = np.maximum(np.diag(covariance)[:m], 0.0)
        moves = covariance[:m, m : m + n] / np.sqrt(own + noise + 1e-12 * self._scale**2)[:, None]
        return _expected_rise(mean[m : m + n], moves)

    def draws(self, points: Array, count: int, rng: np.random.Generator) -> Array:
        """Returns joint draws of the points' values, [count, points]."""
        mean, covariance = self.posterior(points)
        variances, directions = np.linalg.eigh((covariance + covariance.T) / 2)
        root = directions * np.sqrt(np.maximum(variances, 0.0))
        return np.asarray(mean + rng.standard_normal((count, len(points))) @ root.T, dtype=np.float64)

    # The kernel and its fit. theta: logarithms of the lengths, the signal, the seed noise, the decay and the growth.

    def _beliefs(self, luck: tuple[float, float] | None) -> tuple[Array, Array]:
        """Returns the means and deviations of theta's prior."""
        count = int(self._groups.max()) + 1
        length, prior = self._prior.length, self._prior
        longer = 0.4 * np.log(count)
        rows = [(length[0] + longer, length[1])] * count + [prior.signal, prior.luck, prior.decay, prior.growth]
        if luck is not None and luck[0] > 0:
            deviation, freedom = luck
            rows[count + 1] = (float(np.log(deviation / self._scale)), max(float(np.sqrt(0.5 / freedom)), 0.05))
        means, deviations = np.array(rows).T
        return means, deviations

    def _fit(self) -> Array:
        """Returns the most likely theta under the prior, fitted to at most MOST_FITTED observations."""
        from scipy.optimize import minimize

        starts = [self._means]
        louder = self._means.copy()
        louder[-4] -= 1.0
        starts.append(louder)
        found = [
            minimize(
                self.loss,
                start,
                jac=True,
                method="L-BFGS-B",
                bounds=list(zip(self._means - 3 * self._deviations, self._means + 3 * self._deviations, strict=True)),
                options={"maxiter": 25},
            )
            for start in starts
        ]
        best = min(found, key=lambda result: float(result.fun))
        return np.asarray(best.x, dtype=np.float64)

    def loss(self, theta: Array) -> tuple[float, Array]:
        """Returns the negative logarithm of the posterior density of theta, and its gradient."""
        from scipy.linalg import cho_factor, cho_solve

        fixed, values = self._fitted
        matrix, slopes = fixed.covariance(theta)
        try:
            factor = cho_factor(matrix, lower=True)
        except np.linalg.LinAlgError:
            return 1e10, np.zeros_like(theta)
        weights = cho_solve(factor, values)
        inverse = cho_solve(factor, np.eye(len(values)))
        distance = (theta - self._means) / self._deviations
        loss = 0.5 * values @ weights + np.log(np.diag(factor[0])).sum() + 0.5 * distance @ distance
        inner = inverse - np.outer(weights, weights)
        gradient = np.array([0.5 * np.sum(inner * slope) for slope in slopes]) + distance / self._deviations
        return float(loss), gradient

    def _solved(self, theta: Array) -> tuple[Array, Array]:
        from scipy.linalg import cho_solve

        matrix, _ = _Fixed.of(self._seen, self._groups).covariance(theta, slopes=False)
        factor = np.linalg.cholesky(matrix)
        return np.asarray(factor, dtype=np.float64), np.asarray(
            cho_solve((factor, True), self._values), dtype=np.float64
        )

    def _projected(self, points: Array) -> tuple[Array, Array]:
        from scipy.linalg import solve_triangular

        seen, theta = self._seen, self._theta
        decay, growth = np.exp(theta[-2:])
        far = np.exp(-decay * np.abs(seen.levels)) * 2.0 ** (growth * seen.levels)
        cross = self._kernel(seen.points, points, theta) * far[:, None]
        cross = cross + _FLAT * (seen.levels == 0)[:, None]
        return cross.T @ self._weights, solve_triangular(self._factor, cross, lower=True)

    def _kernel(self, one: Array, other: Array, theta: Array) -> Array:
        lengths, signal = np.exp(theta[:-4]), np.exp(theta[-4])
        scaled = 1 / lengths[self._groups]
        squares = _squares(one * scaled, other * scaled)
        return np.asarray(signal**2 * _matern(np.sqrt(squares)) + (_FLAT if one is other else 0.0), dtype=np.float64)


@dataclass(frozen=True, slots=True)
class _Fixed:
    """Parts of a covariance that do not depend on hyperparameters."""

    squares: Array
    """[parameters, n, n] squared distances."""
    gaps: Array
    """[n, n] difference of the levels."""
    sums: Array
    """[n, n] sum of the levels."""
    shared: Array
    """[n, n] share of the seed noise that two observations have in common, before the difference of levels is taken
    into account."""
    own: Array
    """[n] noise of each evaluation, relative to the variance of one run's seed noise."""
    means: Array
    """[n, n] whether two observations are at the same step."""

    @classmethod
    def of(cls, seen: Observations, groups: Whole) -> "_Fixed":
        squares = np.stack(
            [
                _squares(seen.points[:, groups == group], seen.points[:, groups == group])
                for group in range(int(groups.max()) + 1)
            ]
        )
        level = seen.levels
        same = (seen.trials[:, None] == seen.trials[None]) / np.sqrt(seen.runs[:, None] * seen.runs[None])
        return cls(
            squares,
            np.abs(level[:, None] - level[None]),
            level[:, None] + level[None],
            (1 - _EVALUATION) * same,
            _EVALUATION / seen.runs,
            (level[:, None] == level[None]).astype(np.float64),
        )

    def covariance(self, theta: Array, *, slopes: bool = True) -> tuple[Array, list[Array]]:
        """Returns the observations' covariance, and its derivative with respect to each element of theta."""
        inverse = np.exp(-2 * theta[:-4])
        signal, luck, decay, growth = np.exp(theta[-4:])
        distances = np.sqrt(np.tensordot(inverse, self.squares, 1))
        alike, spread = np.exp(-decay * self.gaps), 2.0 ** (growth * self.sums)
        carried = alike * spread
        value = signal**2 * _matern(distances) * carried
        noise = luck**2 * (self.shared * carried + np.diag(self.own))
        matrix = value + noise + _FLAT * self.means + _JITTER * np.eye(len(distances))
        if not slopes:
            return matrix, []
        root = np.sqrt(5) * distances
        steep = signal**2 * carried * (5 / 3) * (1 + root) * np.exp(-root)
        known = [
            *(steep * (part * squares) for part, squares in zip(inverse, self.squares, strict=True)),
            2 * value,
            2 * noise,
        ]
        if not self.gaps.any():
            return matrix, [*known, np.zeros((1, 1)), np.zeros((1, 1))]
        learnt = value + luck**2 * self.shared * carried
        return matrix, [
            *known,
            -decay * self.gaps * learnt,
            np.log(2) * growth * self.sums * learnt,
        ]


def spread_out(seen: Observations, most: int) -> Whole:
    """Returns the indices of `most` observations for a model. Half of them are those at the last step with the best
    values; the rest are evenly spaced from first to last."""
    count = len(seen.values)
    if count <= most:
        return np.arange(count)
    merit = np.where(seen.levels == 0, seen.values, -np.inf)
    best = np.argsort(-merit, kind="stable")[: most // 2]
    rest = np.setdiff1d(np.arange(count), best)
    even = rest[np.unique(np.linspace(0, len(rest) - 1, most - len(best)).round().astype(np.intp))]
    return np.sort(np.concatenate([best, even]))


def _squares(one: Array, other: Array) -> Array:
    squares = (one**2).sum(1)[:, None] + (other**2).sum(1)[None] - 2 * one @ other.T
    return np.asarray(np.maximum(squares, 0.0), dtype=np.float64)


def _matern(distances: Array) -> Array:
    """Returns Matern's correlation of smoothness 5/2."""
    root = np.sqrt(5) * distances
    return np.asarray((1 + root + root**2 / 3) * np.exp(-root))


def _expected_rise(mean: Array, moves: Array) -> Array:
    """Returns E[max(mean + move Z)] - max(mean) for each row of moves. Z is standard normal and replaced by equally
    likely quantiles."""
    from scipy.special import ndtri

    quantiles = ndtri((np.arange(_QUANTILES) + 0.5) / _QUANTILES)
    best = np.stack([(mean + moves * z).max(axis=1) for z in quantiles])
    return np.asarray(best.mean(axis=0) - mean.max())
