"""How far each reading of RPG-Style Clip turns the expected gradient once the policy has left the sampler.

`python benchmarks/readings.py` lists every response of 50 small policies (vocabulary 4, length 3, centred standard
normal rewards, unnormalized reverse divergence) at each distance from the sampler, and prints the median relative error
of the expected gradient against the exact one. Nothing is sampled: what is left is bias. Distance: standard deviation
of the logits' differences, sampler to policy and sampler to reference.
"""

from dataclasses import replace
from itertools import product

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
from specs.schema.objective import Objective

READINGS = {
    "no clip": {"type": "none"},
    "the code's": {"type": "dual"},
    "the code's, divergence kept": {"type": "dual", "keep_divergence": True},
    "Algorithm 2": {"type": "dual", "branch": "regularized"},
    "Remark F.2, truncation": {"type": "truncate"},
    "eq. 4.1, value": {"type": "value"},
}
LEVELS, TOYS = ("token", "sequence"), 50
SETTINGS = ((0.1, 0.25), (0.1, 0.5), (0.1, 1.0), (1.0, 0.5))
"""kl_coef and distance."""


def bias(item: Objective, world: World, policy: Tensor, sampler: Tensor, reference: Tensor) -> float:
    """Norm of the expected gradient less the exact one, over that of the exact one."""
    table = policy.clone().requires_grad_()
    losses = token_losses(
        item,
        logprobs=world.logprobs(table),
        old_logprobs=world.logprobs(sampler),
        ref_logprobs=world.logprobs(reference),
        advantages=world.rewards[:, None].expand_as(world.prefixes),
        response_mask=world.response_mask,
    )
    responses = torch.where(world.response_mask, losses, 0).sum(-1)
    (expected,) = torch.autograd.grad(-(response_probabilities(world, sampler) * responses).sum(), table)
    kl_coef = item.kl_coef
    if item.level == "sequence":
        truth = sequence_objective(world, table, reference, forward=False, kl_coef=kl_coef)
    else:
        truth = token_objective(world, table, sampler, reference, forward=False, kl_coef=kl_coef)
    (exact,) = torch.autograd.grad(truth, table)
    return float((expected - exact).norm() / exact.norm())


def median_bias(clip: dict[str, object], *, level: str, distance: float, kl_coef: float, toys: int = TOYS) -> float:
    """Median over the toys; the same worlds and policies for every clip."""
    item = objective({"type": "rpg", "level": level, "kl_coef": kl_coef, "clip": clip})
    found = []
    for seed in range(toys):
        generator = torch.Generator().manual_seed(seed)
        world = enumerate_world(4, 3, generator)
        sampler = world.policy(generator)
        policy, reference = (sampler + world.policy(generator, spread=distance) for _ in range(2))
        mean = response_probabilities(world, sampler) @ world.rewards
        found.append(bias(item, replace(world, rewards=world.rewards - mean), policy, sampler, reference))
    return float(torch.tensor(found).median())


def main() -> None:
    columns = list(product(LEVELS, SETTINGS))
    print(f"{'level':30}" + "".join(f"{level:>10}" for level, _ in columns))
    print(f"{'kl_coef, distance':30}" + "".join(f"{f'{kl_coef:g}, {d:g}':>10}" for _, (kl_coef, d) in columns))
    for name, clip in READINGS.items():
        biases = (median_bias(clip, level=level, kl_coef=kl_coef, distance=d) for level, (kl_coef, d) in columns)
        print(f"{name:30}" + "".join(f"{value:10.2f}" for value in biases))


if __name__ == "__main__":
    main()
