"""Importance of parameters for a trial's value by PED-ANOVA, compared with its values for pure noise.

PED-ANOVA measures the distance between a parameter's distribution among the best trials and that among all trials. Even
of pure noise some parameter has the largest share, of 30 trials often more than half. So each parameter is compared
with a null distribution: the same estimate with the values permuted among the trials. Parameters that are not above it
are not shown.

Source: Watanabe 2023, PED-ANOVA, arXiv:2304.10255; the estimator is Optuna's, as in optuna.importance.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.studies.answers.results import StudyRecord, Trial, last_value

PERMUTATIONS = 400
LEVEL = 0.05
"""Probability that pure noise shows any parameter at all. It is divided equally among the parameters."""
FEWEST_TRIALS = 8
_CELLS = 50
"""Number of cells in the grid of a range."""
_Counts = NDArray[np.float64]
"""[samples, cells]: number of a sample's trials in each cell."""


@dataclass(frozen=True, slots=True)
class Importance:
    """One parameter."""

    path: str
    share: float
    """The parameter's share of the sum of all parameters' divergences, from 0 to 1."""
    above_chance: bool
    """Whether the parameter's divergence is above those of permuted values."""


def importances(record: StudyRecord) -> list[Importance]:
    """Returns the importance of each parameter, the largest first; empty with too few trials.

    Only trials that were trained to their end count, and for a conditional parameter only those that have it.
    """
    divergences: dict[str, float] = {}
    chance: dict[str, float] = {}
    for path, searched in record.parameters.items():
        trials = [trial for trial in record.finished if path in trial.params]
        if len(trials) < FEWEST_TRIALS or len({trial.value for trial in trials}) < 2:
            continue
        observed, permuted = _divergences(record, trials, path, searched)
        divergences[path] = observed
        chance[path] = float(np.quantile(permuted, 1 - LEVEL / len(record.parameters)))
    total = sum(divergences.values())
    if not total > 0:
        return []
    ranked = sorted(divergences, key=lambda path: -divergences[path])
    return [Importance(path, divergences[path] / total, divergences[path] > chance[path]) for path in ranked]


def num_best(num_trials: int) -> int:
    """Returns the number of trials that count as the best: one in ten, but at least five if there are fifteen or
    more."""
    return max(math.ceil(num_trials / 10), min(5, num_trials // 3))


def _divergences(
    record: StudyRecord, trials: Sequence[Trial], path: str, searched: Mapping[str, Any]
) -> tuple[float, NDArray[np.float64]]:
    """Returns a parameter's divergence, and its divergences for values permuted among the trials."""
    cells, count = _cells_of([trial.params[path] for trial in trials], searched)
    merit = np.array([record.first.better(trial.value) for trial in trials])
    best = num_best(len(trials))
    rng = np.random.default_rng(0)
    at_random = rng.permuted(np.tile(np.arange(len(trials)), (PERMUTATIONS, 1)), axis=1)[:, :best]
    samples = np.vstack([np.argsort(-merit, kind="stable")[:best], at_random])
    offsets = count * np.arange(len(samples))[:, None]
    counts = np.bincount((offsets + cells[samples]).ravel(), minlength=count * len(samples)).reshape(-1, count)
    density = _over_choices if "choice" in searched or "cases" in searched else _over_range
    among_best = density(counts.astype(float)) + 1e-12
    among_all = density(np.bincount(cells, minlength=count)[None].astype(float)) + 1e-12
    divergences = (among_all * (among_best / among_all - 1) ** 2).sum(axis=1)
    return float(divergences[0]), divergences[1:]


def _cells_of(values: Sequence[Any], searched: Mapping[str, Any]) -> tuple[NDArray[np.int64], int]:
    """Returns the grid's cell of each value, and the number of cells."""
    if "choice" in searched or "cases" in searched:
        names = list(searched.get("choice") or searched["cases"])
        return np.array([names.index(value) for value in values]), len(names)
    values = [last_value(value) for value in values]
    ends = searched.get("float") or searched["int"]
    # A range may have been narrowed since a trial was sampled from it.
    low, high = min(ends[0], *values), max(ends[1], *values)
    step, cells = searched.get("step") or 0, _CELLS
    if "int" in searched and searched.get("log"):
        cells = min(cells, math.ceil(math.log2(high - low + 1)) + 1)
    elif step:
        cells = min(cells, round((high - low) / step) + 1)
    places = np.log(values) if searched.get("log") else np.asarray(values, dtype=float)
    start, end = (math.log(low), math.log(high)) if searched.get("log") else (low, high)
    return np.clip(np.ceil((places - start) / (end - start) * (cells - 1) - 0.5).astype(int), 0, cells - 1), cells


def _over_choices(counts: _Counts) -> _Counts:
    """Returns the probability of each choice in each sample, with a prior that weighs as much as one trial."""
    size, choices = counts.sum(axis=1, keepdims=True), counts.shape[1]
    prior = 1 / ((counts > 0).sum(axis=1, keepdims=True) + 1)
    density: _Counts = ((size * prior + counts) / (choices * prior + 1) + 1 / choices) / (size + 1)
    return density


def _over_range(counts: _Counts) -> _Counts:
    """Returns the probability of each cell in each sample, from a kernel at each trial, whose width follows Scott's
    rule, and a flat prior."""
    from scipy.special import ndtr

    size, num_cells = counts.sum(axis=1), counts.shape[1]
    cells = np.arange(num_cells, dtype=float)
    mean = counts @ cells / size
    deviation = np.sqrt((counts * (cells - mean[:, None]) ** 2).sum(axis=1) / np.maximum(1, size - 1))
    below = np.cumsum(counts, axis=1)
    lower = (below >= np.maximum(size // 4, 1)[:, None]).argmax(axis=1)
    upper = (below > (size * 3 // 4)[:, None]).argmax(axis=1)
    width = np.maximum(1.059 * np.minimum((upper - lower) / 1.34, deviation) * size**-0.2, 0.5 / 1.64)

    def kernels(centres: NDArray[np.float64], widths: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns [..., centre, cell]: the probability of each cell under a normal distribution around each centre,
        truncated at the ends."""
        edges = np.arange(num_cells + 1) - 0.5
        below_edge = ndtr((edges - centres[:, None]) / widths[..., None, None])
        inside = np.diff(below_edge, axis=-1)
        whole: NDArray[np.float64] = inside / (below_edge[..., -1:] - below_edge[..., :1])
        return whole

    smoothed = np.einsum("sc,scg->sg", counts, kernels(cells, width))
    prior = kernels(np.array([(num_cells - 1) / 2]), np.array([float(num_cells)]))[0, 0]
    density: _Counts = (smoothed + prior) / (size[:, None] + 1)
    return density
