"""Without a clip every divergence, estimator and level has exactly the gradient of the objective it names."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rpg.certificate.catalogue import objective
from rpg.certificate.enumeration import (
    World,
    enumerate_world,
    response_probabilities,
    sequence_objective,
    token_objective,
)
from rpg.objectives import token_losses
from specs.schema.base_objective import direction_of
from specs.schema.objective import NoClip, Objective, RegularizedObjective

DIVERGENCES = ("forward", "reverse", "unnormalized_forward", "unnormalized_reverse", "none")
ESTIMATORS = ("reinforce", "differentiable")
KL_COEF = 0.7


def gradient_error(item: Objective, world: World, policy: Tensor, sampler: Tensor, reference: Tensor) -> float:
    """Returns the norm of the expected gradient less the exact one, over that of the exact one."""
    policy = policy.clone().requires_grad_()
    distributions = {"logits": policy[world.prefixes], "ref_logits": reference[world.prefixes]}
    losses = token_losses(
        item,
        logprobs=world.logprobs(policy),
        old_logprobs=world.logprobs(sampler),
        ref_logprobs=world.logprobs(reference),
        advantages=world.rewards[:, None].expand_as(world.prefixes).double(),
        response_mask=world.response_mask.double(),
        token_ids=world.tokens,
        **distributions,
    )
    responses = torch.where(world.response_mask, losses, 0).sum(-1)
    (estimate,) = torch.autograd.grad((response_probabilities(world, sampler) * responses).sum(), policy)
    divergence = getattr(item, "divergence", "none")
    kl_coef = 0.0 if divergence == "none" else float(item.kl_coef)
    direction = direction_of(divergence)
    if item.level == "token":
        truth = token_objective(world, policy, sampler, reference, direction=direction, kl_coef=kl_coef)
    else:
        truth = sequence_objective(world, policy, reference, direction=direction, kl_coef=kl_coef)
    (exact,) = torch.autograd.grad(-truth, policy)
    return float((estimate - exact).norm() / exact.norm())


@pytest.mark.parametrize("length", [1, 2, 3, 4])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(("divergence", "estimator"), list(itertools.product(DIVERGENCES, ESTIMATORS)))
def test_the_expected_gradient_is_the_exact_one_with_three_distinct_policies(
    divergence: str, estimator: str, level: str, length: int
) -> None:
    generator = torch.Generator().manual_seed(7 * length)
    world = enumerate_world(3, length, generator)
    policy, sampler, reference = (world.policy(generator) for _ in range(3))
    item = RegularizedObjective(divergence=divergence, estimator=estimator, level=level, kl_coef=KL_COEF, clip=NoClip())
    assert gradient_error(item, world, policy, sampler, reference) <= 1e-10


@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize(
    "kl", [{"kl": "full"}, {"kl": "top_k", "kl_top_k": 1}, {"kl": "top_k", "kl_top_k": 2}], ids=str
)
@pytest.mark.parametrize(
    ("divergence", "estimator"), list(itertools.product([*DIVERGENCES, "jensen_shannon"], ESTIMATORS))
)
def test_a_divergence_summed_over_tokens_has_the_exact_gradient_off_policy_and_to_go_on_policy(
    divergence: str, estimator: str, kl: dict[str, object], length: int
) -> None:
    generator = torch.Generator().manual_seed(7 * length)
    world = enumerate_world(4, length, generator)
    policy, sampler, reference = (world.policy(generator) for _ in range(3))
    settings = {"divergence": divergence, "estimator": estimator, "kl_coef": KL_COEF, "clip": NoClip(), **kl}
    of_tokens, to_go = (RegularizedObjective(level=level, **settings) for level in ("token", "to_go"))
    assert gradient_error(of_tokens, world, policy, sampler, reference) <= 1e-10
    assert gradient_error(to_go, world, policy, policy, reference) <= 1e-10


READINGS = {
    "no clip": {"type": "none"},
    "the code's": {"type": "dual"},
    "the code's, divergence kept": {"type": "dual", "keep_divergence": True},
    "Algorithm 2": {"type": "dual", "branch": "regularized"},
    "Remark F.2, truncation": {"type": "truncate"},
    "eq. 4.1, value": {"type": "value"},
}


def median_error(clip: dict[str, object], level: str) -> float:
    """Returns the median over 15 small policies at a distance of 0.5; they are the same for every clip."""
    item = objective({"type": "rpg", "level": level, "kl_coef": 0.1, "clip": clip})
    found = []
    for seed in range(15):
        generator = torch.Generator().manual_seed(seed)
        world = enumerate_world(4, 3, generator)
        sampler = world.policy(generator)
        policy, reference = (sampler + world.policy(generator, spread=0.5) for _ in range(2))
        mean = response_probabilities(world, sampler) @ world.rewards
        found.append(gradient_error(item, replace(world, rewards=world.rewards - mean), policy, sampler, reference))
    return float(torch.tensor(found).median())


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_of_the_papers_clips_the_clipped_value_is_nearest_to_the_exact_gradient_off_policy(level: str) -> None:
    bias = {name: median_error(clip, level) for name, clip in READINGS.items()}
    assert bias.pop("no clip") < 1e-10
    value, truncation, *marked = sorted(bias.values())
    assert (value, truncation) == (bias["eq. 4.1, value"], bias["Remark F.2, truncation"])
    assert value < 0.8 * truncation < 0.8 * min(marked)
