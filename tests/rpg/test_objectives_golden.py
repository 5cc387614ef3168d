"""RPG-Style Clip against values worked out for beta 0.1, margins (0.2, 0.28), bound 10."""

import pytest
import torch

from rpg.objectives import token_losses
from specs.schema.objective import DualClip, RegularizedObjective

DIVERGENCES = ("forward", "reverse", "unnormalized_forward", "unnormalized_reverse", "none")
# A, w -> d loss / d logprob in the order of DIVERGENCES, off the boundaries.
GOLDEN = [
    (1, 0.5, (-0.6000, -0.4379, -0.5200, -0.5179, -0.5)),
    (1, 0.9, (-1.0000, -0.8195, -0.9100, -0.9095, -0.9)),
    (1, 1.0, (-1.1000, -0.9000, -1.0000, -1.0000, -1.0)),
    (1, 1.2, (-1.3000, -1.0581, -1.1800, -1.1781, -1.2)),
    (1, 1.2801, (0, 0, 0, 0, 0)),
    (1, 3.0, (0, 0, 0, 0, 0)),
    (-1, 0.5, (0, 0, 0, 0, 0)),
    (-1, 0.9, (0.8000, 0.9805, 0.8900, 0.8905, 0.9)),
    (-1, 1.0, (0.9000, 1.1000, 1.0000, 1.0000, 1.0)),
    (-1, 1.5, (1.4000, 1.6596, 1.5280, 1.5316, 1.5)),
    (-1, 9.9, (9.8000, 10.0596, 9.9280, 9.9316, 9.9)),
    (-1, 10.001, (0, 0, 0, 0, 0)),
    (0, 0.9, (-0.1000, 0.0805, -0.0100, -0.0095, 0)),
    (0, 1.5, (-0.1000, 0.1596, 0.0280, 0.0316, 0)),
]


def slope(objective: RegularizedObjective, ratio: float, advantage: float) -> float:
    """d loss / d logprob of one token whose reference is the sampler."""
    old = torch.full((1, 1), -1.3, dtype=torch.float64)
    logprobs = (old + torch.tensor(ratio, dtype=torch.float64).log()).requires_grad_()
    losses = token_losses(
        objective,
        logprobs=logprobs,
        old_logprobs=old,
        ref_logprobs=old,
        advantages=torch.full_like(old, advantage),
        response_mask=torch.ones_like(old),
    )
    losses.sum().backward()
    assert logprobs.grad is not None
    return logprobs.grad.item()


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(("advantage", "ratio", "expected"), GOLDEN)
def test_dual_clip_gives_the_golden_gradients(
    advantage: float, ratio: float, expected: tuple[float, ...], level: str
) -> None:
    for divergence, value in zip(DIVERGENCES, expected, strict=True):
        objective = RegularizedObjective(
            divergence=divergence, level=level, kl_coef=0.1, clip=DualClip(low=0.2, high=0.28, dual=10.0)
        )
        assert slope(objective, ratio, advantage) == pytest.approx(value, abs=5.1e-5)
