"""Dynamic sampling: the groups of a step, and the discarded ones."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpg.batches.batch import StepRollouts, collate, join, select
from rpg.metrics import rollout_metrics
from rpg.rewards import Score
from rpg.rollouts.dynamic_sampling import refill
from rpg.types import Rollout, RolloutGroup, Turn

GROUP_SIZE = 3


def turn_of(token: int, length: int) -> Turn:
    return Turn((token,) * length, (-0.5,) * length)


def batch_of(problems: list[int], scores: list[list[float]]) -> StepRollouts:
    """One group a problem; response r of problem p is p + 1 tokens of value r."""
    groups = [
        RolloutGroup(
            prompt_ids=(problem,) * 2,
            rollouts=tuple(
                Rollout((turn_of(number, problem + 1),), "length" if number == 2 else "stop")
                for number in range(GROUP_SIZE)
            ),
            policy_version=4,
        )
        for problem in problems
    ]
    flat = [Score.of(value, None) for group in scores for value in group]
    texts = [f"{problem}.{number}" for problem in problems for number in range(GROUP_SIZE)]
    return collate(groups, problems=problems, responses=texts, scores=flat)


VARYING, EQUAL = [1.0, 0.0, 1.0], [0.0, 0.0, 0.0]


def sampling_from(stream: list[bool], calls: list[tuple[int, int]]):
    """A sampler of a step whose c-th prompt is problem c, with scores that vary where the stream says so."""

    def sample(taken: int, count: int) -> StepRollouts:
        calls.append((taken, count))
        problems = list(range(taken, taken + count))
        return batch_of(problems, [VARYING if stream[problem] else EQUAL for problem in problems])

    return sample


def test_groups_without_variance_are_replaced_by_later_prompts() -> None:
    calls: list[tuple[int, int]] = []
    step = refill(sampling_from([True, False, False, True, False, True, True], calls), groups=4, max_batches=9)
    assert step.problems == (0, 3, 5, 6)
    assert calls == [(0, 4), (4, 2), (6, 1)]
    assert step.figures["dynamic_sampling/batches"] == 3
    assert step.figures["dynamic_sampling/dropped_groups"] == 3
    assert step.figures["dynamic_sampling/dropped_tokens"] == GROUP_SIZE * (2 + 3 + 5)
    assert step.figures["dynamic_sampling/filled_groups"] == 0
    assert step.figures["dynamic_sampling/reward_mean"] == pytest.approx(4 * 2 / (7 * 3))


def test_at_the_cap_the_empty_places_are_filled_with_what_was_thrown_away_first() -> None:
    calls: list[tuple[int, int]] = []
    step = refill(sampling_from([False, True, False, False, False, False], calls), groups=3, max_batches=2)
    assert step.problems == (1, 0, 2)
    assert step.figures["dynamic_sampling/filled_groups"] == 2
    assert step.figures["dynamic_sampling/dropped_groups"] == 2
    assert calls == [(0, 3), (3, 2)]


@settings(max_examples=50, deadline=None)
@given(stream=st.lists(st.booleans(), min_size=40, max_size=40), groups=st.integers(1, 5), rounds=st.integers(2, 5))
def test_a_step_always_has_its_number_of_groups_and_varying_ones_come_first(
    stream: list[bool], groups: int, rounds: int
) -> None:
    step = refill(sampling_from(stream, []), groups=groups, max_batches=rounds)
    assert len(step.prompts) == groups
    varying = [stream[problem] for problem in step.problems]
    assert varying == sorted(varying, reverse=True)
    assert step.figures["dynamic_sampling/filled_groups"] == varying.count(False)
    assert len(step.rewards) == groups * GROUP_SIZE


@given(order=st.permutations(range(4)))
def test_selecting_groups_takes_all_that_is_theirs(order: list[int]) -> None:
    scores = [VARYING, EQUAL, VARYING, EQUAL]
    whole = batch_of([0, 1, 2, 3], scores)
    chosen, expected = select(whole, order), batch_of(list(order), [scores[problem] for problem in order])
    for name in ("group_ids", "token_ids", "sampled", "rollout_logprobs", "lengths", "rewards"):
        np.testing.assert_array_equal(getattr(chosen, name), getattr(expected, name), err_msg=name)
    for name in ("problems", "finish_reasons", "responses", "scores", "policy_version"):
        assert getattr(chosen, name) == getattr(expected, name), name
    assert join([select(whole, []), whole]).problems == whole.problems


def test_responses_that_could_not_be_scored_count_though_their_groups_are_thrown_away() -> None:
    def sample(taken: int, count: int) -> StepRollouts:
        problems = list(range(taken, taken + count))
        batch = batch_of(problems, [VARYING if problem > 1 else EQUAL for problem in problems])
        whole = zip(batch.group_ids, batch.scores, strict=True)
        return replace(
            batch, scores=tuple(Score.failed("no") if problems[group] < 2 else score for group, score in whole)
        )

    step = refill(sample, groups=2, max_batches=3)
    assert step.problems == (2, 3)
    assert rollout_metrics(step)["reward/error_fraction"] == 0.5
