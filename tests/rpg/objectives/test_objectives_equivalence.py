"""Where two objectives must be one: RPG and REINFORCE on policy, RPG-Style Clip and PPO dual clip at kl_coef 0."""

import pytest
import torch
from torch import Tensor

from rpg.certificate.catalogue import objective
from rpg.objectives import TokenBatch, evaluate_objective, token_losses
from rpg.objectives.clipping import ppo_surrogate
from rpg.objectives.divergence import WEIGHTS
from specs.schema.objective import Objective

DIVERGENCES = ("forward", "reverse", "unnormalized_forward", "unnormalized_reverse", "none")
UNNORMALIZED = ("unnormalized_forward", "unnormalized_reverse")
LEVELS = ("token", "sequence")
CLIPS = ("none", "dual", "truncate", "value")


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def batch(seed: int, *, spread: float, responses: int = 200, time: int = 5) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    old = -normal(generator, responses, time).abs() - 0.05
    lengths = torch.randint(1, time + 1, (responses, 1), generator=generator)
    return {
        "logprobs": old + spread * normal(generator, responses, time),
        "old_logprobs": old,
        "ref_logprobs": old + spread * normal(generator, responses, time),
        "advantages": normal(generator, responses, 1).expand(responses, time).clone(),
        "response_mask": (torch.arange(time) < lengths).double(),
    }


def diagnostics(item: Objective, **inputs: Tensor) -> dict[str, Tensor]:
    return evaluate_objective(item, TokenBatch(**inputs)).diagnostics()


def slopes(item: Objective, inputs: dict[str, Tensor]) -> Tensor:
    """[responses, time]: the derivative of each response's loss by its logprobs."""
    leaf = inputs["logprobs"].clone().requires_grad_()
    losses = token_losses(item, **{**inputs, "logprobs": leaf})
    torch.where(inputs["response_mask"] != 0, losses, 0).sum().backward()
    assert leaf.grad is not None
    return leaf.grad


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("divergence", UNNORMALIZED)
def test_with_all_three_policies_equal_the_unnormalised_forms_are_reinforce_sample_by_sample(
    divergence: str, level: str, clip: str
) -> None:
    inputs = batch(0, spread=0.0)
    estimators = ("reinforce",) if clip in ("truncate", "value") else ("reinforce", "differentiable")
    for estimator in estimators:
        item = objective(
            {
                "type": "rpg",
                "divergence": divergence,
                "level": level,
                "estimator": estimator,
                "kl_coef": 0.7,
                "clip": {"type": clip},
            }
        )
        reinforce = -inputs["advantages"] * inputs["response_mask"]
        assert torch.allclose(slopes(item, inputs), reinforce, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("divergence", ["forward", "reverse"])
def test_with_all_three_policies_equal_the_normalised_forms_differ_by_a_constant_weight(divergence: str) -> None:
    inputs = batch(0, spread=0.0)
    item = objective({"type": "rpg", "divergence": divergence, "kl_coef": 0.7, "clip": {"type": "none"}})
    sign = -0.7 if divergence == "forward" else 0.7
    expected = (-inputs["advantages"] + sign) * inputs["response_mask"]
    assert torch.allclose(slopes(item, inputs), expected, rtol=1e-12)


@pytest.mark.parametrize("spread", [0.1, 1.5])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_without_a_divergence_rpg_style_clip_has_the_gradient_of_ppo_dual_clip_at_every_token(
    divergence: str, level: str, spread: float
) -> None:
    inputs = batch(1, spread=spread)
    mine = {"type": "rpg", "divergence": divergence, "level": level, "kl_coef": 0.0, "clip": {"type": "dual"}}
    reinforce = slopes(objective({**mine, "estimator": "reinforce"}), inputs)
    differentiable = slopes(objective({**mine, "estimator": "differentiable"}), inputs)
    assert torch.allclose(reinforce, differentiable, rtol=1e-12, atol=1e-14)
    if level == "token":
        ppo = objective({"type": "ppo", "clip": {"low": 0.2, "high": 0.28, "dual": 10.0}})
        assert torch.allclose(reinforce, slopes(ppo, inputs), rtol=1e-12, atol=1e-14)
    if spread > 1:
        assert all(diagnostics(objective(mine), **inputs)[f"clipped_{side}"].any() for side in ("low", "high", "dual"))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_both_estimators_have_the_same_gradient_sample_by_sample(divergence: str, level: str) -> None:
    inputs = batch(2, spread=0.6)
    values = {"type": "rpg", "divergence": divergence, "level": level, "kl_coef": 0.7, "clip": {"type": "none"}}
    one, other = (slopes(objective({**values, "estimator": name}), inputs) for name in ("reinforce", "differentiable"))
    assert torch.allclose(one, other, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_within_the_margins_no_clip_changes_anything(divergence: str) -> None:
    inputs = batch(3, spread=0.02)
    clips = ({"type": "dual"}, {"type": "dual", "branch": "regularized"}, {"type": "truncate"}, {"type": "value"})
    values = {"type": "rpg", "divergence": divergence, "kl_coef": 0.7}
    plain = slopes(objective({**values, "clip": {"type": "none"}}), inputs)
    for clip in clips:
        assert torch.allclose(slopes(objective({**values, "clip": clip}), inputs), plain, rtol=1e-12)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_a_clipped_token_may_keep_its_divergence_at_the_clamped_ratio(divergence: str) -> None:
    inputs = batch(4, spread=1.5)
    values = {"type": "rpg", "divergence": divergence, "kl_coef": 0.7}
    dropped = slopes(objective({**values, "clip": {"type": "dual"}}), inputs)
    kept = slopes(objective({**values, "clip": {"type": "dual", "keep_divergence": True}}), inputs)
    seen = diagnostics(objective({**values, "clip": {"type": "dual"}}), **inputs)
    clipped = seen["clipped_low"] | seen["clipped_high"] | seen["clipped_dual"]
    assert torch.equal(dropped[~clipped], kept[~clipped])
    assert (dropped[clipped] == 0).all()
    clamped = seen["ratio"].clamp(0.8, 1.28).log()
    expected = -0.7 * WEIGHTS[divergence](clamped, inputs["ref_logprobs"] - inputs["old_logprobs"])
    assert torch.allclose(kept[clipped], expected[clipped], rtol=1e-12)


# Algorithm 2, beta 0.1, reference = sampler, margins (0.2, 0.28), bound 10; unnormalized_reverse: K(w) = -0.1 w log w.
# A = 0.01, w = 1.5: A w + K = .015 - .1 * 1.5 * .405465 = -.045820 < 0, so the negative side: active, slope .045820
# A = -0.01, w = 0.5: -.005 + .1 * .5 * .693147 = .029657 > 0, so the positive side: active below 1.28, slope -.029657
# A = 1, w = 1.5: positive, over the margin: 0.    A = -1, w = 0.5: -.465 < 0, under the margin: 0.
@pytest.mark.parametrize(
    ("advantage", "ratio", "expected"), [(0.01, 1.5, 0.045820), (-0.01, 0.5, -0.029657), (1, 1.5, 0), (-1, 0.5, 0)]
)
def test_the_regularised_branch_takes_its_side_by_the_advantage_with_the_divergence(
    advantage: float, ratio: float, expected: float
) -> None:
    old = torch.full((1, 1), -1.0, dtype=torch.float64)
    inputs = {
        "logprobs": old + torch.tensor(ratio).double().log(),
        "old_logprobs": old,
        "ref_logprobs": old,
        "advantages": torch.full_like(old, advantage),
        "response_mask": torch.ones_like(old),
    }
    item = objective({"type": "rpg", "kl_coef": 0.1, "clip": {"type": "dual", "branch": "regularized"}})
    assert slopes(item, inputs).item() == pytest.approx(expected, abs=2e-6)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_the_clipped_value_is_the_surrogate_of_the_regularised_advantage_and_no_token_loses_its_gradient(
    divergence: str, level: str
) -> None:
    inputs = batch(5, spread=1.5)
    values = {"type": "rpg", "divergence": divergence, "kl_coef": 0.7, "level": level}
    seen = diagnostics(objective({**values, "clip": {"type": "value"}}), **inputs)
    plain = diagnostics(objective({**values, "clip": {"type": "none"}}), **inputs)
    ratio = plain["ratio"]
    surrogate = -ppo_surrogate(ratio, plain["weight"] / ratio, low=0.2, high=0.28, dual=10.0)
    on_tokens = inputs["response_mask"] != 0
    assert torch.allclose(seen["weight"][on_tokens], surrogate[on_tokens], rtol=1e-9)
    clipped = seen["clipped_low"] | seen["clipped_high"] | seen["clipped_dual"]
    assert clipped.any(), "the batch reaches the bounds"
    assert (seen["weight"][clipped] != 0).all()
    assert torch.equal(clipped & on_tokens, on_tokens & ~torch.isclose(seen["weight"], plain["weight"], rtol=1e-9))


# Algorithm 1, beta 0.1, reference = sampler: loss = -clip(w) (A - 0.1 log w), both factors differentiated.
# A = 1, w = 1.1: -w A + .1 w log w -> slope -w A + .1 w (log w + 1) = -1.1 + .11 * 1.095310 = -.979516
# A = 1, w = 2: over the margin, the advantage alone moves: 1.28 * .1 = .128
@pytest.mark.parametrize(("ratio", "expected"), [(1.1, -0.979516), (2.0, 0.128)])
def test_algorithm_1_differentiates_the_ratio_and_the_advantage(ratio: float, expected: float) -> None:
    old = torch.full((1, 1), -1.0, dtype=torch.float64)
    inputs = {
        "logprobs": old + torch.tensor(ratio).double().log(),
        "old_logprobs": old,
        "ref_logprobs": old,
        "advantages": torch.ones_like(old),
        "response_mask": torch.ones_like(old),
    }
    clip = {"type": "dual", "branch": "regularized"}
    item = objective({"type": "rpg", "estimator": "differentiable", "kl_coef": 0.1, "clip": clip})
    assert slopes(item, inputs).item() == pytest.approx(expected, abs=2e-6)


REFUSED = [
    ({"estimator": "differentiable", "clip": {"type": "truncate"}}, "truncate` needs `estimator: reinforce`"),
    ({"estimator": "differentiable", "clip": {"type": "value"}}, "value` needs `estimator: reinforce`"),
    (
        {"estimator": "differentiable", "divergence": "forward", "clip": {"type": "dual", "branch": "regularized"}},
        "needs a reverse divergence",
    ),
    (
        {"estimator": "differentiable", "clip": {"type": "dual", "branch": "regularized", "keep_divergence": True}},
        "keep_divergence` has no effect",
    ),
    ({"type": "grpo", "kl_in": "reward", "kl_weighted": True}, "`kl_weighted` has no effect"),
    ({"type": "ppo", "clip": {"dual": 0.9}}, "greater than 1"),
]


@pytest.mark.parametrize(("values", "reason"), REFUSED)
def test_what_cannot_act_together_is_refused_with_the_reason(values: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        objective({"type": "rpg", **values})


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("estimator", ["reinforce", "differentiable"])
def test_every_divergence_estimator_and_level_is_accepted_with_all_else_at_its_default(
    divergence: str, level: str, estimator: str
) -> None:
    values = {"type": "rpg", "divergence": divergence, "level": level, "estimator": estimator}
    assert objective(values).model_dump()["divergence"] == divergence
