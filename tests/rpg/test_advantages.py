"""Baselines, scales, whitening and penalties in the reward, against numbers worked out by hand."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rpg.advantages import (
    advantages,
    normalized_sum,
    overlong_penalties,
    token_advantages,
    whitened,
)
from rpg.batches.batch import StepRollouts, collate
from rpg.certificate.catalogue import objective
from rpg.rewards.score import Score
from rpg.types import Rollout, RolloutGroup, Turn
from specs.schema.objective import Advantage

REWARDS = torch.tensor([1.0, 0.0, 0.0, 3.0, 5.0])
GROUPS = torch.tensor([7, 7, 7, 2, 2])
BASELINES = ("group_mean", "leave_one_out", "batch_mean", "none")
SCALES = ("none", "group_std", "batch_std", "group_mean")


@pytest.mark.parametrize(
    ("baseline", "expected"),
    [
        ("group_mean", [2 / 3, -1 / 3, -1 / 3, -1, 1]),
        ("leave_one_out", [1, -1 / 2, -1 / 2, -2, 2]),
        ("batch_mean", [-0.8, -1.8, -1.8, 1.2, 3.2]),  # mean 9/5
        ("none", [1, 0, 0, 3, 5]),
    ],
)
def test_baselines(baseline: str, expected: list[float]) -> None:
    found = advantages(REWARDS, GROUPS, baseline=baseline, scale="none")
    assert found.tolist() == pytest.approx(expected)


def test_group_std_divides_by_the_unbiased_deviation_of_the_group() -> None:
    # group 7: mean 1/3, squares 4/9 + 1/9 + 1/9 = 2/3, over 2: 1/3; group 2: mean 4, squares 1 + 1 over 1: 2
    found = advantages(REWARDS, GROUPS, baseline="group_mean", scale="group_std")
    first, second = math.sqrt(1 / 3) + 1e-4, math.sqrt(2) + 1e-4
    assert found.tolist() == pytest.approx([2 / 3 / first, -1 / 3 / first, -1 / 3 / first, -1 / second, 1 / second])


def test_batch_std_divides_by_the_unbiased_deviation_of_the_rewards() -> None:
    # mean 9/5; squares .64 + 3.24 + 3.24 + 1.44 + 10.24 = 18.8, over 4: 4.7
    found = advantages(REWARDS, GROUPS, baseline="none", scale="batch_std")
    assert found.tolist() == pytest.approx([reward / (math.sqrt(4.7) + 1e-4) for reward in REWARDS.tolist()])


def test_leave_one_out_is_the_group_mean_times_n_over_n_minus_one() -> None:
    mean = advantages(REWARDS, GROUPS, baseline="group_mean", scale="none")
    sizes = torch.tensor([3, 3, 3, 2, 2])
    assert torch.allclose(
        advantages(REWARDS, GROUPS, baseline="leave_one_out", scale="none"), mean * sizes / (sizes - 1)
    )


@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out"])
@pytest.mark.parametrize("scale", SCALES)
def test_a_group_without_signal_has_exactly_no_advantage(baseline: str, scale: str) -> None:
    rewards, groups = torch.tensor([0.1, 0.1, 0.1, 0.7, 0.2]), torch.tensor([0, 0, 0, 1, 1])
    assert advantages(rewards, groups, baseline=baseline, scale=scale)[:3].tolist() == [0, 0, 0]


def test_dividing_by_the_mean_of_the_group_weighs_rare_successes_more_and_leaves_groups_without_one_alone() -> None:
    rewards = torch.tensor([1.0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0])
    found = advantages(rewards, torch.arange(12) // 4, baseline="group_mean", scale="group_mean")
    # means 1/4, 3/4 and 0: (1 - 1/4) / (1/4) = 3; (1 - 3/4) / (3/4) = 1/3
    expected = [3, -1, -1, -1, 1 / 3, 1 / 3, 1 / 3, -1, 0, 0, 0, 0]
    assert torch.allclose(found, torch.tensor(expected))
    others = advantages(rewards, torch.arange(12) // 4, baseline="leave_one_out", scale="group_mean")
    assert torch.allclose(others[:4], torch.tensor([4.0, -4 / 3, -4 / 3, -4 / 3]))
    assert advantages(-rewards, torch.zeros(12), baseline="none", scale="group_mean").tolist() == [0] * 12


def test_a_single_response_is_not_scaled_by_a_deviation_it_does_not_have() -> None:
    found = advantages(torch.tensor([2.0]), torch.tensor([0]), baseline="none", scale="group_std")
    assert found.tolist() == [2.0]


def test_leaving_the_only_one_out_is_refused() -> None:
    with pytest.raises(ValueError, match="at least two responses"):
        advantages(REWARDS, torch.tensor([0, 0, 0, 1, 2]), baseline="leave_one_out", scale="none")


def test_shapes_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\[5\].*\[3\]"):
        advantages(REWARDS, GROUPS[:3], baseline="none", scale="none")


@settings(deadline=None, max_examples=40)
@given(st.data(), st.sampled_from(BASELINES), st.sampled_from(SCALES))
def test_the_order_of_groups_and_of_responses_changes_nothing(data: st.DataObject, baseline: str, scale: str) -> None:
    sizes = data.draw(st.lists(st.integers(2, 5), min_size=1, max_size=4))
    groups = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    rewards = torch.tensor(data.draw(st.lists(st.floats(-3, 3), min_size=len(groups), max_size=len(groups)))).double()
    order = torch.tensor(data.draw(st.permutations(range(len(groups)))))
    names = torch.tensor(data.draw(st.permutations(range(100, 100 + len(sizes)))))
    straight = advantages(rewards, groups, baseline=baseline, scale=scale)
    shuffled = advantages(rewards[order], names[groups][order], baseline=baseline, scale=scale)
    assert torch.allclose(straight[order], shuffled, rtol=1e-9, atol=1e-9)


def test_whitening_leaves_mean_zero_and_variance_one() -> None:
    # values 1, 2, 6: mean 3, squares 4 + 1 + 9 = 14, over 2: 7
    found = whitened(torch.tensor([1.0, 2.0, 6.0], dtype=torch.float64))
    assert found.tolist() == pytest.approx([-2 / math.sqrt(7), -1 / math.sqrt(7), 3 / math.sqrt(7)], rel=1e-8)
    assert whitened(torch.tensor([2.0])).tolist() == [0]


def test_whitening_leaves_values_that_are_equal_on_paper_without_advantage() -> None:
    assert whitened(torch.full((3,), 0.7, dtype=torch.float64)).tolist() == [0, 0, 0]
    assert not whitened(torch.tensor([0.1 + 0.2, 0.3, 0.3, 0.1 + 0.2], dtype=torch.float64)).any()
    assert whitened(torch.tensor([20_000_000.0, 20_000_001.0], dtype=torch.float64)).all()


def test_whitening_counts_a_long_response_more() -> None:
    found = token_advantages(
        objective({"type": "ppo"}),
        Advantage(baseline="none", whiten="tokens"),
        rewards=torch.tensor([0.0, 1.0]),
        group_ids=torch.tensor([0, 0]),
        lengths=torch.tensor([3, 1]),
    )
    # tokens 0 0 0 1: mean 1/4, squares 3/16 + 9/16 = 3/4, over 3: 1/4
    assert found.tolist() == pytest.approx([-0.5, -0.5, -0.5, 1.5], rel=1e-6)


LENGTHS = torch.tensor([2, 1])
OLD = torch.tensor([-1.0, -2.0, -0.5])
REF = torch.tensor([-1.5, -1.0, -0.75])  # log pi_old/pi_ref = .5, -1, .25


def test_rloo_takes_the_whole_responses_divergence_off_its_reward_before_the_baseline() -> None:
    found = token_advantages(
        objective({"type": "rloo", "kl_coef": 0.1}),
        Advantage(baseline="leave_one_out"),
        rewards=torch.tensor([1.0, 0.0]),
        group_ids=torch.tensor([0, 0]),
        lengths=LENGTHS,
        old_logprobs=OLD,
        ref_logprobs=REF,
    )
    # rewards 1 - .1(-.5) = 1.05 and 0 - .1(.25) = -.025; each less the other: 1.075
    assert found.tolist() == pytest.approx([1.075, 1.075, -1.075])


def test_reinforce_plus_plus_charges_a_token_for_itself_and_what_follows() -> None:
    found = token_advantages(
        objective({"type": "reinforce_plus_plus", "kl_coef": 0.1}),
        Advantage(baseline="none"),
        rewards=torch.tensor([1.0, 0.0]),
        group_ids=torch.tensor([0, 0]),
        lengths=LENGTHS,
        old_logprobs=OLD,
        ref_logprobs=REF,
    )
    # 1 - .1(.5 - 1), 1 - .1(-1), 0 - .1(.25)
    assert found.tolist() == pytest.approx([1.05, 1.1, -0.025])


def test_a_penalty_in_the_reward_without_logprobs_is_refused() -> None:
    rloo = objective({"type": "rloo"})
    assert rloo.penalizes_reward
    assert not objective({"type": "grpo"}).penalizes_reward
    assert not objective({"type": "rpg"}).penalizes_reward
    with pytest.raises(ValueError, match="needs `old_logprobs`"):
        token_advantages(rloo, Advantage(), rewards=REWARDS[:2], group_ids=GROUPS[:2], lengths=LENGTHS)


def test_the_overlong_punishment_falls_linearly_over_the_buffer() -> None:
    found = overlong_penalties(torch.tensor([1000, 1536, 1792, 2048]), max_response_length=2048, buffer=512)
    assert found.tolist() == [0, 0, -0.5, -1]


@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out", "batch_mean"])
@pytest.mark.parametrize("rewards", [[0.1, 0.2, 0.3], [0.7, 0.1, 0.4], [1e6 + 0.1, 1e6 + 0.2, 1e6 + 0.3]])
def test_an_advantage_that_is_zero_on_paper_is_zero(baseline: str, rewards: list[float]) -> None:
    found = advantages(torch.tensor(rewards, dtype=torch.float64), torch.zeros(3), baseline=baseline, scale="none")
    middle = sorted(range(3), key=rewards.__getitem__)[1]
    assert found[middle] == 0
    assert (found != 0).sum() == 2


def test_rewards_that_differ_beyond_float32_have_advantages() -> None:
    step = scored_step([20_000_000.0, 20_000_001.0])
    found = advantages(torch.from_numpy(step.rewards), torch.zeros(2), baseline="group_mean", scale="none")
    assert found.tolist() == [-0.5, 0.5]


def test_terms_that_cancel_on_paper_have_no_advantage() -> None:
    # Each term's advantages are +-1 / (sqrt(2) + 1e-4) times its spread; the weights turn the second one round.
    terms = torch.tensor([[0.1, 0.3], [0.1, 0.3], [0.1, 0.3]], dtype=torch.float64)
    weights = torch.tensor([[0.1, 0.1], [0.2, 0.2], [-0.3, -0.3]], dtype=torch.float64)
    assert normalized_sum(terms, weights, torch.zeros(2)).tolist() == [0, 0]


def scored_step(rewards: list[float]) -> StepRollouts:
    """A step of one group whose responses have these rewards, of one token each."""
    turn = Turn((5,), (-0.5,))
    group = RolloutGroup((5, 6), tuple(Rollout((turn,), "stop") for _ in rewards), policy_version=0)
    scores = [Score.of(reward, None) for reward in rewards]
    return collate([group], problems=[0], responses=[""] * len(rewards), scores=scores)
