"""Intervals of graded scores, any real numbers: simulated problems and seeds whose truth is known."""

from collections.abc import Callable

import numpy as np
import pytest

from rpg.evaluation.measures import score_measure
from rpg.statistics import mean_interval, verdict

Draw = Callable[[np.random.Generator, int], np.ndarray]
KINDS: dict[str, tuple[Draw, float]] = {
    "unbounded": (lambda rng, count: rng.normal(3, 2, count), 3.0),
    "skewed": (lambda rng, count: rng.lognormal(0, 1, count), float(np.exp(0.5))),
    "punishing": (lambda rng, count: -rng.exponential(1, count), -1.0),
    "bounded": (lambda rng, count: rng.beta(2, 2, count), 0.5),
    "alike": (lambda rng, count: rng.normal(0.5, 0.01, count), 0.5),
    "mostly nothing": (lambda rng, count: np.where(rng.random(count) < 0.1, rng.random(count), 0.0), 0.05),
}


@pytest.mark.more
@pytest.mark.parametrize("problems", [30, 100])
@pytest.mark.parametrize("seeds", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_the_interval_of_a_mean_score_holds_as_often_as_it_says(kind: str, seeds: int, problems: int) -> None:
    draw, truth = KINDS[kind]
    rng = np.random.default_rng(0)
    scale = float(draw(rng, 10_000).std())
    hits = []
    for _ in range(400):
        luck = rng.normal(0, 0.1 * scale, (seeds, 1)) if seeds > 1 else 0.0
        interval = mean_interval(
            draw(rng, problems) + luck + rng.normal(0, 0.2 * scale, (seeds, problems)), shares=False
        )
        hits.append(interval.low <= truth <= interval.high)
    assert 0.90 <= np.mean(hits) <= 0.995


def test_scores_within_a_narrow_band_are_not_taken_for_shares() -> None:
    scores = np.random.default_rng(0).normal(0.5, 0.01, (100, 4))
    measure = score_measure(scores, confidence=0.95)
    assert measure.metric == "score@4"
    assert measure.value == pytest.approx(scores.mean())
    # Student's: 2 x 1.98 standard errors of a mean whose problems deviate by 0.01 / 2.
    assert measure.ci_high - measure.ci_low == pytest.approx(2 * 1.98 * 0.005 / 10, rel=0.15)


def test_a_verdict_on_scores_speaks_in_their_own_units() -> None:
    rng = np.random.default_rng(0)
    problems = rng.normal(0.4, 0.05, 60)
    arms = {label: problems + gap + rng.normal(0, 0.003, (3, 1)) for label, gap in (("a", 0.0), ("b", 0.2))}
    as_shares, as_scores = verdict(arms), verdict(arms, shares=False)
    assert "points" in as_shares.text
    assert as_scores.text.startswith("b is best: 0.6")
    assert "points" not in as_scores.text
    assert "%" not in as_scores.text
    assert as_scores.best == "b"
