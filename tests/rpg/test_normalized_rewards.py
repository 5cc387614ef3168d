"""Several rewards, each normalised by itself before they are added: GDPO, arXiv:2601.05242."""

import json
from typing import Any

import numpy as np
import pytest
import torch

from pipelines.replay.rows import _score
from rpg.advantages import advantages, normalized_sum, token_advantages
from rpg.batches.batch import StepRollouts
from rpg.recording.rows import _terms
from rpg.rewards import Score
from rpg.rewards.score import scores_vary
from specs import parse_objective
from specs.schema.objective import Advantage

CORRECT = np.array([1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0])
SHORT = np.array([10.0, 40.0, 20.0, 30.0, 7.0, 7.0, 7.0, 7.0])
GROUPS = np.array([0, 0, 0, 0, 1, 1, 1, 1])
WEIGHTS = (1.0, -0.5)


def gdpo(rewards: list[np.ndarray], weights: tuple[float, ...]) -> np.ndarray:
    """The paper's formula for groups of four that lie one after another, in numpy alone."""
    total = np.zeros(8)
    for reward, weight in zip(rewards, weights, strict=True):
        grouped = reward.reshape(2, 4)
        deviation = grouped.std(axis=1, ddof=1, keepdims=True)
        total += weight * ((grouped - grouped.mean(axis=1, keepdims=True)) / (deviation + 1e-4)).reshape(8)
    return np.asarray((total - total.mean()) / (total.std(ddof=1) + 1e-4))


def of(*terms: np.ndarray, weights: tuple[float, ...] = WEIGHTS, groups: np.ndarray = GROUPS) -> torch.Tensor:
    values = torch.tensor(np.stack(terms))
    return normalized_sum(values, torch.tensor(weights).double()[:, None].expand_as(values), torch.tensor(groups))


def test_normalised_rewards_with_batch_mean_and_batch_std_are_gdpo() -> None:
    found = advantages(of(CORRECT, SHORT), torch.tensor(GROUPS), baseline="batch_mean", scale="batch_std")
    assert found.numpy() == pytest.approx(gdpo([CORRECT, SHORT], WEIGHTS), rel=1e-12)


def test_whitened_over_tokens_they_are_the_code_of_its_authors() -> None:
    lengths = np.array([1, 5, 2, 2, 3, 1, 4, 2])
    tokens = np.repeat(of(CORRECT, SHORT).numpy(), lengths)
    expected = (tokens - tokens.mean()) / np.sqrt(tokens.var(ddof=1) + 1e-8)
    found = token_advantages(
        parse_objective({"type": "grpo"}),
        Advantage(baseline="none", scale="none", whiten="tokens", rewards="normalized_each"),
        rewards=of(CORRECT, SHORT),
        group_ids=torch.tensor(GROUPS),
        lengths=torch.tensor(lengths),
    )
    assert found.numpy() == pytest.approx(expected, rel=1e-6)


def test_the_unit_of_a_term_does_not_matter() -> None:
    # What remains is the 1e-4 beside a deviation of at least 0.5.
    assert of(CORRECT, SHORT).numpy() == pytest.approx(of(CORRECT, 1000 * SHORT).numpy(), abs=1e-4)


def test_equal_sums_of_different_terms_are_told_apart() -> None:
    one, other = np.array([1.0, 0.0, 0.0, 0.0]), np.array([0.0, 0.5, 0.5, 0.5])
    found = of(one, other, weights=(1.0, 2.0), groups=np.zeros(4, dtype=int))
    assert np.ptp(one + 2.0 * other) == 0
    assert found[0] < found[1]


def test_a_term_that_is_the_same_throughout_a_group_adds_nothing_there() -> None:
    assert of(np.zeros(8), SHORT)[4:].tolist() == [0.0] * 4


@pytest.mark.parametrize(("weight", "worst"), [(1.0, 10.0), (-0.5, 40.0)])
def test_a_response_that_could_not_be_scored_counts_with_the_worst_of_its_group(weight: float, worst: float) -> None:
    failed, known = SHORT.copy(), SHORT.copy()
    failed[2], known[2] = np.nan, worst
    assert of(failed, weights=(weight,)).tolist() == of(known, weights=(weight,)).tolist()


def test_a_group_of_which_no_response_could_be_scored_has_no_advantage() -> None:
    assert of(np.full(8, np.nan), weights=(1.0,)).tolist() == [0.0] * 8


def sum_of(correct: float, length: float) -> Score:
    terms, weights = {"correct": correct, "length": length}, {"correct": 1.0, "length": 0.5}
    return Score(correct + 0.5 * length, correct=correct == 1, terms=terms, weights=weights)


def step_of(*scores: Score) -> StepRollouts:
    """Groups of two."""
    fields: dict[str, Any] = dict.fromkeys(StepRollouts.__dataclass_fields__)
    return StepRollouts(**fields | {"scores": scores, "group_ids": np.arange(len(scores)) // 2})


def test_a_sum_and_a_single_reward_stand_side_by_side_in_a_step() -> None:
    step = step_of(sum_of(1.0, 3.0), Score.failed("hung"), Score.of(0.25, None), Score.of(0.75, None))
    values, weights = step.reward_terms()  # terms: the single reward, correct, length
    assert values == pytest.approx(np.array([[0, 0, 0.25, 0.75], [1, np.nan, 0, 0], [3, np.nan, 0, 0]]), nan_ok=True)
    assert weights.tolist() == [[0, 0, 1, 1], [1, 1, 0, 0], [0.5, 0.5, 0, 0]]


@pytest.mark.parametrize("by_term", [False, True], ids=["summed", "normalized_each"])
def test_a_group_has_a_signal_where_what_is_added_up_differs(by_term: bool) -> None:
    equal_sums = [sum_of(1.0, 0.0), sum_of(0.0, 2.0)]
    assert scores_vary(equal_sums, by_term=by_term) is by_term
    assert not scores_vary([sum_of(1.0, 3.0)] * 2, by_term=by_term)
    assert scores_vary([Score.of(0.25, None), Score.of(0.75, None)], by_term=by_term)
    # One that could not be scored counts with 0, or with the worst of its group.
    assert scores_vary([sum_of(1.0, 3.0), Score.failed("hung")], by_term=by_term) is not by_term
    step = step_of(*equal_sums, *[sum_of(1.0, 3.0)] * 2)
    normalized = normalized_sum(*map(torch.from_numpy, step.reward_terms()), torch.from_numpy(step.group_ids))
    assert bool(normalized[:2].ne(0).any())
    assert normalized[2:].tolist() == [0.0, 0.0]


def test_a_term_without_weight_gives_a_group_no_signal() -> None:
    scores = [Score(1.0, True, terms={"a": 1.0, "b": each}, weights={"a": 1.0, "b": 0.0}) for each in (0.0, 1.0)]
    assert not scores_vary(scores, by_term=True)


def test_recorded_terms_come_back_for_a_replay() -> None:
    score = sum_of(1.0, 3.0)
    assert json.loads(_terms(score) or "") == {"correct": [1.0, 1.0], "length": [3.0, 0.5]}
    row = {"reward": score.reward - 0.25, "reward_terms": _terms(score), "reward_error": None}
    back = _score(row)
    assert (back.terms, back.weights, back.penalty) == (score.terms, score.weights, -0.25)
    assert _terms(Score.of(1.0, None)) is None
