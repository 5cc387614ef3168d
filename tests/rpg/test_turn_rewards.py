"""Rewards of turns: their part in a response's reward, and advantages by turn."""

import math
from typing import Any

import pytest
import torch

from rpg.advantages import token_advantages, turn_returns
from rpg.base.tokenization import make_tokenizer
from rpg.batches.batch import StepRollouts, collate
from rpg.batches.step_loss import step_advantages
from rpg.metrics import rollout_metrics
from rpg.rewards import Problem, Score, open_scorer
from rpg.rollouters.scoring import Scoring
from rpg.rollouts.dynamic_sampling import refill
from rpg.types import RecordedTurn, Rollout, RolloutGroup, Turn
from specs.schema.experiment import Experiment
from specs.schema.model import ByteTokenizer
from specs.schema.objective import Advantage
from specs.schema.reward import Reward
from tests.rpg.tiny_run import SPEC

GIVEN = Turn((3,))
"""A turn that a tool gave."""


def rollout(*rewards: float | None) -> Rollout:
    """Turns of two tokens with these rewards, a given turn between each two."""
    sampled = [Turn((2, 2), (-1.0, -1.0), reward=reward) for reward in rewards]
    turns = [turn for each in sampled for turn in (each, GIVEN)][:-1]
    return Rollout(tuple(turns), "stop")


def step_of(*responses: tuple[float, Rollout], group_size: int = 2) -> StepRollouts:
    """Returns responses with their scores, in groups."""
    rollouts = [each for _, each in responses]
    groups = [
        RolloutGroup((4,), tuple(rollouts[first : first + group_size]), 0)
        for first in range(0, len(rollouts), group_size)
    ]
    return collate(
        groups,
        problems=range(len(groups)),
        responses=[""] * len(rollouts),
        scores=[Score(value, correct=None, turns=each.turn_rewards) for value, each in responses],
        turns=[
            tuple(RecordedTurn(turn.sampled, len(turn.token_ids), "", reward=turn.reward) for turn in each.turns)
            for each in rollouts
        ],
    )


def experiment(objective: dict[str, Any] | None = None, **advantage: str) -> Experiment:
    rewarded = {"type": "tools", "tools": ["calculator"], "answer_tokens": 4, "rewards": {"call": 0.5}}
    changed = {"rollout": {"max_response_length": 30, "rollouter": rewarded}, "advantage": advantage}
    return Experiment.model_validate({**SPEC, **changed, "objective": objective or SPEC["objective"]})


STEP = step_of((1.0, rollout(0.5, 0.0)), (0.0, rollout(0.25)))


def test_a_turn_answers_for_what_follows_it() -> None:
    # Returns: of the first 1 + .5 = 1.5 and 1; of the second .25, which stands for its second turn too.
    # First turns: mean (1.5 + .25) / 2 = .875. Second: (1 + .25) / 2 = .625.
    found = step_advantages(experiment(credit="turn", baseline="group_mean"), STEP)
    assert found.tolist() == pytest.approx([0.625, 0.625, 0.375, 0.375, -0.625, -0.625])


def test_an_outcome_is_the_reward_of_the_response_with_those_of_its_turns() -> None:
    found = step_advantages(experiment(baseline="group_mean"), STEP)  # 1.5 and .25
    assert found.tolist() == pytest.approx([0.625] * 4 + [-0.625] * 2)


def test_returns_from_a_turn_on_are_scaled_in_their_group() -> None:
    found = step_advantages(experiment(credit="turn", baseline="group_mean", scale="group_std"), STEP)
    # Deviations with ddof 1 of 1.5 and .25: 1.25 / sqrt(2) = .88388; of 1 and .25: .75 / sqrt(2) = .53033
    first, second = 0.625 / (0.8838835 + 1e-4), 0.375 / (0.5303301 + 1e-4)
    assert found.tolist() == pytest.approx([first] * 2 + [second] * 2 + [-first] * 2, rel=1e-6)


def test_without_rewards_of_turns_both_credits_are_one() -> None:
    step = step_of((1.0, rollout(None, None)), (0.0, rollout(None)), (1.0, rollout(None)), (0.0, rollout(None, None)))
    for scale in ("none", "group_std", "batch_std"):
        by_turn, by_outcome = (
            step_advantages(experiment(credit=each, scale=scale), step) for each in ("turn", "outcome")
        )
        assert by_turn.tolist() == pytest.approx(by_outcome.tolist(), rel=1e-6)


def test_terms_that_are_normalised_each_have_rewards_of_turns_beside_them() -> None:
    # Values 1 and 0: mean .5, deviation 1 / sqrt(2), so +-.70700 with its 1e-4.
    # Returns of the turns alone: .5 and .25, then 0 and .25: the same size, by turn of other signs.
    settings = {"rewards": "normalized_each", "baseline": "none", "scale": "none"}
    value = 0.5 / (0.5**0.5 + 1e-4)
    turn = 0.125 / (0.25 / 2**0.5 + 1e-4)
    found = step_advantages(experiment(credit="turn", **settings), STEP)
    assert found.tolist() == pytest.approx([value + turn] * 2 + [value - turn] * 2 + [-value - turn] * 2, rel=1e-6)
    found = step_advantages(experiment(**settings), STEP)
    assert found.tolist() == pytest.approx([value + turn] * 4 + [-value - turn] * 2, rel=1e-6)


def test_a_penalty_in_the_reward_comes_off_every_return() -> None:
    rloo = experiment({"type": "rloo", "kl_coef": 0.1}, baseline="leave_one_out")
    found = token_advantages(
        rloo.objective,
        Advantage(baseline="leave_one_out", credit="turn"),
        rewards=turn_returns([[1.0, 2.0], [0.0]]),
        group_ids=torch.tensor([0, 0]),
        lengths=torch.tensor([2, 1]),
        turns=torch.tensor([0, 1, 0]),
        old_logprobs=torch.tensor([-1.0, -2.0, -0.5]),
        ref_logprobs=torch.tensor([-1.5, -1.0, -0.75]),
    )
    # log ratios .5, -1, .25: penalties -.05 and .025. Returns 3.05 and 2.05, -.025: each less the other.
    assert found.tolist() == pytest.approx([3.075, 2.075, -3.075])


def test_rewards_of_turns_are_in_the_metrics_and_make_a_group_vary() -> None:
    metrics = rollout_metrics(STEP)
    assert metrics["reward/mean"] == pytest.approx((1.5 + 0.25) / 2)
    assert metrics["turn_reward/mean"] == pytest.approx(0.375)
    assert "turn_reward/mean" not in rollout_metrics(step_of((1.0, rollout(None)), (0.0, rollout(None))))
    varies = step_of((1.0, rollout(0.5)), (1.0, rollout(0.0)))
    equal = step_of((1.0, rollout(0.5)), (0.5, rollout(1.0)))
    kept = [refill(lambda *_, step=step: step, groups=1, max_batches=2).figures for step in (varies, equal)]
    assert [each["dynamic_sampling/filled_groups"] for each in kept] == [0.0, 1.0]


@pytest.mark.parametrize(
    ("rewards", "why"),
    [
        ([math.nan], "the reward of a turn is nan; allowed: a number from -1e+06 to 1e+06"),
        ([0.5, -math.inf], "the reward of a turn is -inf; allowed: a number from -1e+06 to 1e+06"),
        ([1e300, None], "the reward of a turn is 1e+300; allowed: a number from -1e+06 to 1e+06"),
        (["1"], "the reward of a turn is '1'; allowed: a number from -1e+06 to 1e+06"),
        ([9e5, 9e5], "the sum of the turns' rewards is 1800000.0; allowed: a number from -1e+06 to 1e+06"),
    ],
)
def test_an_invalid_reward_of_a_turn_makes_its_response_fail_and_no_other(rewards: list[Any], why: str) -> None:
    tokenizer = make_tokenizer(ByteTokenizer(), ())
    reward = Reward.model_validate({"type": "exact_match"})
    rollouts = [rollout(*rewards), rollout(0.25)]
    problem = Problem("p", "?", "none", "d")
    with open_scorer(reward) as scorer:
        scoring = Scoring(tokenizer, scorer, [problem] * 2, group_size=2, reward_at=lambda _: reward, with_turns=True)
        for index, each in enumerate(rollouts):
            scoring.begin(index, each)
        failed, other = scoring.scores()
    assert failed == Score.failed(f"the environment gave an invalid reward: {why}")
    assert (other.error, other.turns) == (None, 0.25)
    step = collate(
        [RolloutGroup((4,), tuple(rollouts), 0)],
        problems=[0],
        responses=scoring.texts(),
        scores=[failed, other],
        turns=scoring.turns(2),
    )
    metrics = rollout_metrics(step)
    assert metrics["reward/error_fraction"] == 0.5
    assert metrics["reward/mean"] == metrics["turn_reward/mean"] == 0.125
    for credit in ("turn", "outcome"):
        assert torch.isfinite(torch.as_tensor(step_advantages(experiment(credit=credit), step))).all()
