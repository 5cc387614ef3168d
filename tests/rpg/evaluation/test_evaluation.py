"""mean@k, pass@k and maj@k against hand-worked figures and enumeration, and their intervals."""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpg.evaluation.kept import KeptAnswers
from rpg.evaluation.measures import majority_at_k, mean_at_k, measures, pass_at_k, sizes
from rpg.evaluation.records import Answered
from rpg.rewards import Score
from rpg.types import Problem, RecordedTurn


def table(*rows: str) -> np.ndarray:
    """`table("110", "000")`: two problems, three responses each."""
    return np.array([[mark == "1" for mark in row] for row in rows])


def test_mean_at_k_is_the_share_of_right_responses() -> None:
    assert mean_at_k(table("1100", "0000", "1111")).tolist() == [0.5, 0.0, 1.0]


def test_pass_at_k_by_hand() -> None:
    # Four responses, one right. k = 1: 1/4. k = 2: 1 - C(3, 2)/C(4, 2) = 1 - 3/6. k = 4: it is always among them.
    assert [pass_at_k(table("1000"), k).item() for k in (1, 2, 4)] == [0.25, 0.5, 1.0]
    assert [pass_at_k(table("0000"), k).item() for k in (1, 4)] == [0.0, 0.0]
    assert pass_at_k(table("1110"), 2).item() == 1.0  # two responses cannot both be the wrong one


@settings(deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=7), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_right_response(marks: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(marks)))
    subsets = list(itertools.combinations(marks, k))
    expected = sum(any(subset) for subset in subsets) / len(subsets)
    assert pass_at_k(np.array([marks]), k).item() == pytest.approx(expected)


def test_pass_at_k_is_unbiased() -> None:
    # Of all 2^5 outcomes of five responses that are right with p = 0.3, its mean is 1 - 0.7^k.
    outcomes = np.array(list(itertools.product([False, True], repeat=5)))
    weights = np.prod(np.where(outcomes, 0.3, 0.7), axis=1)
    for k in range(1, 6):
        assert weights @ pass_at_k(outcomes, k) == pytest.approx(1 - 0.7**k)


def test_majority_by_hand() -> None:
    right = table("1100")
    assert majority_at_k(right, [["7", "7", "3", "4"]], 4, seed=0).item() == 1.0
    assert majority_at_k(right, [["7", "7", "3", "3"]], 4, seed=0).item() == 0.5  # a tie
    assert majority_at_k(table("0100"), [["3", "7", "3", "3"]], 4, seed=0).item() == 0.0
    # Pairs of 7, 7, 3, 4: {7,7} is right, the four of 7 with another are ties, {3,4} is wrong: (1 + 4/2 + 0)/6.
    assert majority_at_k(right, [["7", "7", "3", "4"]], 2, seed=0).item() == pytest.approx(0.5)


def test_abstentions_have_no_vote() -> None:
    assert majority_at_k(table("1000"), [["7", None, None, None]], 4, seed=0).item() == 1.0
    assert majority_at_k(table("0000"), [[None] * 4], 4, seed=0).item() == 0.0
    # Of the pairs of {7, nothing, nothing}, two hold the 7; the third has no vote and is wrong.
    assert majority_at_k(table("100"), [["7", None, None]], 2, seed=0).item() == pytest.approx(2 / 3)


def test_an_answer_that_the_scorer_judged_both_ways_counts_by_its_share() -> None:
    assert majority_at_k(table("1100"), [["7", "7", "7", "7"]], 4, seed=0).item() == 0.5


def test_majority_of_one_is_the_mean() -> None:
    right = table("1100", "1000")
    votes = [["7", "7", "3", "4"], ["1", "2", "2", "2"]]
    assert majority_at_k(right, votes, 1, seed=0).tolist() == mean_at_k(right).tolist()


def test_many_subsets_are_sampled_from_the_seed() -> None:
    rng = np.random.default_rng(0)
    votes = rng.integers(0, 3, size=(4, 32))
    right = votes == 0
    rows = [[str(vote) for vote in row] for row in votes]
    first = majority_at_k(right, rows, 8, seed=1)
    assert math.comb(32, 8) > 1000
    assert first.tolist() == majority_at_k(right, rows, 8, seed=1).tolist()
    assert np.allclose(first, majority_at_k(right, rows, 8, seed=2), atol=0.08)


@pytest.mark.parametrize("k", [0, 4])
def test_more_than_there_are_samples_is_refused(k: int) -> None:
    with pytest.raises(ValueError, match=f"pass@{k} needs at least {k} samples, there are 3"):
        pass_at_k(table("100"), k)
    with pytest.raises(ValueError, match=f"maj@{k} needs at least {k} samples, there are 3"):
        majority_at_k(table("100"), [["1", "2", "3"]], k, seed=0)


def test_a_measures_interval_covers_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(60):
        right = rng.random((40, 8)) < 0.3
        mean = measures(right, [[None] * 8] * 40, confidence=0.8, seed=0)[0]
        covered += mean.ci_low <= 0.3 <= mean.ci_high
    assert 38 <= covered <= 58  # 48 expected, standard deviation 3.1


def test_the_measures_of_a_set() -> None:
    right = table("1100", "0000", "1111")
    votes = [["7", "7", "3", "4"], ["1"] * 4, ["2"] * 4]
    found = measures(right, votes, confidence=0.95, seed=0)
    assert [measure.metric for measure in found] == [
        "mean@4", "pass@1", "pass@2", "pass@4", "maj@1", "maj@2", "maj@4",
    ]  # fmt: skip
    values = {measure.metric: measure.value for measure in found}
    assert values["mean@4"] == values["pass@1"] == values["maj@1"] == pytest.approx(0.5)
    assert values["pass@4"] == pytest.approx(2 / 3)
    assert values["maj@4"] == pytest.approx(2 / 3)
    assert all(measure.ci_low <= measure.value <= measure.ci_high for measure in found)


@pytest.mark.parametrize(("n", "expected"), [(1, [1]), (2, [1, 2]), (8, [1, 2, 4, 8]), (12, [1, 2, 4, 8, 12])])
def test_sizes_are_powers_of_two_and_the_number_of_samples(n: int, expected: list[int]) -> None:
    assert sizes(n) == expected


def test_what_an_interrupted_evaluation_keeps_comes_back_with_its_turns(tmp_path: Path) -> None:
    problems = [Problem("p", "q", "a", "set"), Problem("r", "q", "b", "set")]
    turns = (RecordedTurn(sampled=True, num_tokens=2, text="é<eos>", reward=0.5), RecordedTurn(False, 1, "7", tool="t"))
    answered = [
        Answered(problem, sample, "text", 3, "stop", Score(1.0, True), turns if sample else ())
        for problem in problems
        for sample in range(2)
    ]
    kept = KeptAnswers(tmp_path)
    assert kept.read(problems) is None
    kept.write(problems, answered)
    assert kept.read(problems) == answered
