"""How often the intervals hold that the product prints: simulated experiments whose truth is known.

    python benchmarks/coverage.py [--trials 2000] [--arms 6]

Every problem has a difficulty, an arm moves each problem's difficulty a little of its own, a seed moves all of its own
problems by its luck, and each problem is answered eight times. All arms are truly equal. Of the columns the first three
are shares of intervals that hold the truth (nominal 0.95), for accuracy, gain and the difference of the first two arms
alone; the last is the share of experiments in which any arm is said to differ from the first (nominal 0.05).

With one seed the intervals are about these weights on new problems, and are held against just that.
"""

import argparse
import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rpg.statistics import Table, arms_against_first, gain_interval, mean_interval

SAMPLES = 8
DIFFICULTY = 2.0
"""Standard deviation of the problems' difficulty, logits."""
GAIN = 0.5
"""Of training, logits."""
_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(80)


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table."""

    seeds: tuple[int, ...]
    """Of each arm."""
    problems: int
    luck: float
    """Standard deviation of a seed's accuracy, as a share."""
    accuracy: float
    """After training, over all problems there could be."""
    arm_effect: float = 0.5
    """Standard deviation of an arm's own effect on one problem, logits."""


def expected(middle: float, deviation: float) -> float:
    """Mean chance of problems whose logits are normal."""
    return float(_WEIGHTS @ chance(middle + deviation * _NODES) / _WEIGHTS.sum())


def chance(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    """The logistic function."""
    return 1 / (1 + np.exp(-logits))


def middle_of(accuracy: float, deviation: float) -> float:
    """The mean logit at which the mean chance is `accuracy`."""
    low, high = -20.0, 20.0
    for _ in range(60):
        at = (low + high) / 2
        low, high = (at, high) if expected(at, deviation) < accuracy else (low, at)
    return low


def experiment(setting: Setting, rng: np.random.Generator) -> tuple[Table, list[Table], list[float], float]:
    """Scores [problems] of the base model, [seeds, problems] of each arm, and the truths that intervals should hold.

    Returns:
        before, after of each arm, accuracy of each arm, accuracy before.
    """
    own = float(np.hypot(DIFFICULTY, setting.arm_effect))
    middle = middle_of(setting.accuracy, own)
    slope = (expected(middle + 0.01, own) - expected(middle - 0.01, own)) / 0.02
    luck_logits = setting.luck / slope
    difficulty = DIFFICULTY * rng.standard_normal(setting.problems)
    start = middle - GAIN
    before = rng.binomial(SAMPLES, chance(start + difficulty)) / SAMPLES
    after, truths = [], []
    for seeds in setting.seeds:
        effect = setting.arm_effect * rng.standard_normal(setting.problems)
        luck = luck_logits * rng.standard_normal((seeds, 1))
        after.append(rng.binomial(SAMPLES, chance(middle + difficulty + effect + luck)) / SAMPLES)
        of_these_weights = expected(middle + float(luck[0, 0]), own)
        truths.append(of_these_weights if seeds == 1 else expected(middle, float(np.hypot(own, luck_logits))))
    return before, after, truths, expected(start, DIFFICULTY)


def row(setting: Setting, trials: int) -> tuple[float, float, float, float]:
    """Coverage of accuracy, gain and difference, and false claims over all arms."""
    rng = np.random.default_rng(0)
    held = np.zeros(4)
    for _ in range(trials):
        before, after, truths, start = experiment(setting, rng)
        pair = arms_against_first(after[:2])[0]
        every = arms_against_first(after)
        gap = [truth - truths[0] for truth in truths[1:]]
        held += (
            not mean_interval(after[0]).excludes(truths[0]),
            not gain_interval(before, after[0]).excludes(truths[0] - start),
            not pair.excludes(gap[0]),
            any(interval.excludes(truth) for interval, truth in zip(every, gap, strict=True)),
        )
    accuracy, gain, difference, claims = held / trials
    return float(accuracy), float(gain), float(difference), float(claims)


def settings(arms: int) -> list[Setting]:
    """Numbers of seeds and problems, luck and accuracy; then unequal numbers of seeds."""
    grid = itertools.product((1, 2, 3, 5, 10), (30, 300), (0.01, 0.03), (0.5,))
    rare = itertools.product((1, 3), (30, 300), (0.01,), (0.016, 0.05, 0.95))
    rows = [Setting((seeds,) * arms, *rest) for seeds, *rest in (*grid, *rare)]
    return [*rows, Setting((2, *(5,) * (arms - 1)), 300, 0.02, 0.5)]


def main() -> None:
    """Prints a line a setting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=2000)
    parser.add_argument("--arms", type=int, default=6)
    chosen = parser.parse_args()
    print(f"{'seeds':>9} {'problems':>8} {'luck':>5} {'accuracy':>8} | mean   gain   pair   | false claims")
    for setting in settings(chosen.arms):
        seeds = str(setting.seeds[0]) if len(set(setting.seeds)) == 1 else "unequal"
        mean, gain, pair, claims = row(setting, chosen.trials)
        print(
            f"{seeds:>9} {setting.problems:>8} {setting.luck:>5.2f} {setting.accuracy:>8.3f} |"
            f" {mean:.3f}  {gain:.3f}  {pair:.3f}  | {claims:.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
