"""Weights that make up for an engine that samples from other logprobs than the learner's."""

import doctest

import pytest
import torch

from rpg.objectives import clipping, correction
from specs.schema.rollout import Correction


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


RATIOS = [[0.3, 0.9], [1.5, 4.0]]
"""Ratios of the tokens of two responses, whose products are 0.27 and 6, and whose geometric means 0.52 and 2.45."""
PRODUCTS, MEANS = [0.27, 6.0], [0.27**0.5, 6**0.5]


@pytest.mark.parametrize(
    ("settings", "weights"),
    [
        ({"type": "none"}, [[1, 1], [1, 1]]),
        ({"type": "truncate"}, [[0.3, 0.9], [1.5, 2]]),
        ({"type": "truncate", "low": 0.5, "high": 1.2}, [[0.5, 0.9], [1.2, 1.2]]),
        ({"type": "truncate", "over": "sequence", "high": 5}, [[0.27, 0.27], [5, 5]]),
        ({"type": "truncate", "over": "geometric_mean"}, [[MEANS[0]] * 2, [2, 2]]),
        ({"type": "mask"}, [[0, 0.9], [1.5, 0]]),
        ({"type": "mask", "bound": 3.5}, [[0.3, 0.9], [1.5, 0]]),
        ({"type": "mask", "low": 0.95, "high": 5}, [[0, 0], [1.5, 4]]),
        ({"type": "mask", "over": "sequence"}, [[0, 0], [0, 0]]),
        ({"type": "mask", "over": "sequence", "low": 0.2}, [[PRODUCTS[0]] * 2, [0, 0]]),
        ({"type": "mask", "over": "geometric_mean"}, [[0.3, 0.9], [0, 0]]),
    ],
)
def test_bounds_hold_a_weight_or_drop_the_token_or_the_response(
    settings: dict[str, object], weights: list[list[float]]
) -> None:
    old = torch.tensor([[0.03, 0.09, 9.0], [0.15, 0.4, 9.0]]).log()
    engine = torch.tensor([[0.1, 0.1, torch.nan], [0.1, 0.1, torch.nan]]).log()
    mask, given = torch.tensor([[1, 1, 0], [1, 1, 0]]), Correction.model_validate(settings)
    weight, acted = correction.correction_weight(given, old, engine, mask)
    assert weight[:, :2].tolist() == [pytest.approx(row, abs=1e-6) for row in weights]
    assert weight.isfinite().all()
    unit = torch.tensor(
        {"token": RATIOS, "sequence": [[p, p] for p in PRODUCTS]}.get(given.over, [[m, m] for m in MEANS])
    )
    low, high = given.bounds
    expected = ((unit < low) | (unit > high)) & (given.type != "none")
    assert acted[:, :2].tolist() == expected.tolist()


def test_a_mask_by_probabilities_drops_tokens_that_differ_by_more_and_no_unlikely_ones() -> None:
    # differences 0.3, -0.3 and 0.009, whose ratio is 10
    old, engine = torch.tensor([[0.8, 0.5, 0.01]]).log(), torch.tensor([[0.5, 0.8, 0.001]]).log()
    mask = torch.ones_like(old)

    def kept(**bounds: float) -> list[bool]:
        given = Correction(type="mask", measure="probability", **bounds)
        return (correction.correction_weight(given, old, engine, mask)[0][0] > 0).tolist()

    assert kept(low=-0.2, high=0.2) == [False, False, True]
    assert kept(high=0.2) == [False, True, True]
    assert kept(low=-0.2, high=0.4) == [True, False, True]


def test_a_correction_over_the_response_restores_the_expectation_over_responses() -> None:
    # all responses of two tokens, whose second token depends on the first
    learner, engine = (
        torch.tensor(chances).double()
        for chances in ([[0.7, 0.2], [0.3, 0.9], [0.8, 0.1]], [[0.5, 0.4], [0.5, 0.6], [0.6, 0.3]])
    )
    responses = [(a, b) for a in (0, 1) for b in (0, 1)]

    def logprobs(policy: torch.Tensor) -> torch.Tensor:
        first = policy[0] / policy[0].sum()
        return torch.tensor([[first[a], (policy[1 + a] / policy[1 + a].sum())[b]] for a, b in responses]).log()

    values, old, rollout = torch.tensor([1.0, -2.0, 5.0, 0.5]).double(), logprobs(learner), logprobs(engine)
    given = Correction(type="truncate", over="sequence", high=100)
    weight, _ = correction.correction_weight(given, old, rollout, torch.ones_like(old))
    chances_of_engine, chances_of_learner = rollout.sum(-1).exp(), old.sum(-1).exp()
    assert (chances_of_engine * weight[:, 0] * values).sum().item() == pytest.approx(
        (chances_of_learner * values).sum().item()
    )


def test_the_examples_in_the_docstrings_are_true() -> None:
    assert doctest.testmod(clipping).failed == 0
