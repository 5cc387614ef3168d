"""Without a clip every divergence, estimator and level has exactly the gradient of the objective it names."""

import itertools

import pytest
import torch

from benchmarks.readings import READINGS, median_bias
from rpg.certificate.enumeration import enumerate_world, response_probabilities, sequence_objective, token_objective
from rpg.objectives import token_losses
from specs.schema.objective import NoClip, RegularizedObjective

DIVERGENCES = ("forward", "reverse", "unnormalized_forward", "unnormalized_reverse", "none")
ESTIMATORS = ("reinforce", "differentiable")
KL_COEF = 0.7


@pytest.mark.parametrize("length", [1, 2, 3, 4])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(("divergence", "estimator"), list(itertools.product(DIVERGENCES, ESTIMATORS)))
def test_the_expected_gradient_is_the_exact_one_with_three_distinct_policies(
    divergence: str, estimator: str, level: str, length: int
) -> None:
    generator = torch.Generator().manual_seed(7 * length)
    world = enumerate_world(3, length, generator)
    policy, sampler, reference = (world.policy(generator) for _ in range(3))
    policy.requires_grad_()
    objective = RegularizedObjective(
        divergence=divergence, estimator=estimator, level=level, kl_coef=KL_COEF, clip=NoClip()
    )
    losses = token_losses(
        objective,
        logprobs=world.logprobs(policy),
        old_logprobs=world.logprobs(sampler),
        ref_logprobs=world.logprobs(reference),
        advantages=world.rewards[:, None].expand_as(world.prefixes).double(),
        response_mask=world.response_mask.double(),
    )
    responses = torch.where(world.response_mask, losses, 0).sum(-1)
    (estimate,) = torch.autograd.grad((response_probabilities(world, sampler) * responses).sum(), policy)

    kl_coef = 0.0 if divergence == "none" else KL_COEF
    forward = divergence.endswith("forward")
    if level == "sequence":
        truth = sequence_objective(world, policy, reference, forward=forward, kl_coef=kl_coef)
    else:
        truth = token_objective(world, policy, sampler, reference, forward=forward, kl_coef=kl_coef)
    (exact,) = torch.autograd.grad(-truth, policy)
    assert (estimate - exact).norm() <= 1e-10 * exact.norm()


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_of_the_papers_clips_the_clipped_value_is_nearest_to_the_exact_gradient_off_policy(level: str) -> None:
    bias = {name: median_bias(clip, level=level, kl_coef=0.1, distance=0.5, toys=15) for name, clip in READINGS.items()}
    assert bias.pop("no clip") < 1e-10
    value, truncation, *marked = sorted(bias.values())
    assert (value, truncation) == (bias["eq. 4.1, value"], bias["Remark F.2, truncation"])
    assert value < 0.8 * truncation < 0.8 * min(marked)
