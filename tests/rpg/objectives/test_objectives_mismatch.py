"""Weights that make up for an engine that samples from other logprobs than the learner's."""

import doctest

import pytest
import torch

from rpg.objectives import clipping, correction


def test_the_ratio_is_the_learners_probability_over_the_engines() -> None:
    old, rollout = torch.tensor([[0.2, 0.5, 9.0]]).log(), torch.tensor([[0.1, 0.5, torch.nan]])
    rollout[0, :2] = rollout[0, :2].log()
    ratio = correction.rollout_ratio(old, rollout, torch.tensor([[1, 1, 0]]))
    assert ratio.tolist()[0] == pytest.approx([2, 1, 1])


def test_weights_in_the_engines_samples_restore_the_learners_expectation() -> None:
    learner, engine = torch.tensor([[0.5, 0.3, 0.2]]).double(), torch.tensor([[0.4, 0.4, 0.2]]).double()
    value = torch.tensor([[1.0, -2.0, 5.0]]).double()
    ratio = correction.rollout_ratio(learner.log(), engine.log(), torch.ones_like(learner))
    assert (engine * ratio * value).sum().item() == pytest.approx((learner * value).sum().item())


def test_truncation_holds_a_weight_and_masking_drops_the_token() -> None:
    ratio = torch.tensor([0.3, 0.9, 1.5, 4.0])
    assert correction.truncated_weight(ratio, bound=2.0).tolist() == pytest.approx([0.3, 0.9, 1.5, 2.0])
    assert correction.masked_weight(ratio, bound=2.0).tolist() == pytest.approx([0, 0.9, 1.5, 0])


def test_the_examples_in_the_docstrings_are_true() -> None:
    assert doctest.testmod(clipping).failed == 0
