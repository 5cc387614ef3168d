"""RPG-Style Clip and the clip of the value against values worked out for beta 0.1, margins (0.2, 0.28), bound 10."""

from dataclasses import fields

import pytest
import torch

from rpg.objectives import TokenBatch, evaluate_objective, token_losses
from specs.schema.objective import DualClip, RegularizedObjective, ValueClip

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


def one_token(ratio: float, advantage: float) -> TokenBatch:
    """A response of one token whose reference is the sampler."""
    old = torch.full((1, 1), -1.3, dtype=torch.float64)
    return TokenBatch(
        logprobs=(old + torch.tensor(ratio, dtype=torch.float64).log()).requires_grad_(),
        old_logprobs=old,
        ref_logprobs=old,
        advantages=torch.full_like(old, advantage),
        response_mask=torch.ones_like(old),
    )


def slope(objective: RegularizedObjective, ratio: float, advantage: float) -> float:
    """d loss / d logprob of one token."""
    batch = one_token(ratio, advantage)
    token_losses(objective, **{field.name: getattr(batch, field.name) for field in fields(batch)}).sum().backward()
    return batch.logprobs.grad.item()


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


# The clip of the value, Â = A + 0.1 K(w)/w with r = w: unnormalized_reverse takes 0.1 log w off A, forward adds 0.1/w.
# A = 1, w = 2: Â = 1 - .1 * .693147 = .930685, at most 1.28 of it: 1.191277; forward Â = 1.05, 1.28 of it: 1.344
# A = 1, w = .5: Â = 1.069315, under the margin as it is: .534657; forward Â = 1.2: .6
# A = -1, w = .5: Â = -.930685, at least .8 of it: -.744548; forward Â = -.8: -.64
# A = -1, w = 5: Â = -1.160944, within [.8, 10]: -5.804719; forward Â = -.98: -4.9
# A = -1, w = 20: Â = -1.299573, at most 10 of it: -12.995732; forward Â = -.995: -9.95
# A = -.01, w = .5: Â = -.01 + .069315 = .059315, the positive side though A < 0: .029657; forward Â = .19: .095
# A = .01, w = 3: Â = .01 - .109861 = -.099861, the negative side: -.299584; forward Â = .043333, 1.28 of it: .055467
VALUE_CLIP = [
    (1, 2.0, 1.191277, 1.344, "high", "high"),
    (1, 0.5, 0.534657, 0.6, "", ""),
    (-1, 0.5, -0.744548, -0.64, "low", "low"),
    (-1, 5.0, -5.804719, -4.9, "", ""),
    (-1, 20.0, -12.995732, -9.95, "dual", "dual"),
    (-0.01, 0.5, 0.029657, 0.095, "", ""),
    (0.01, 3.0, -0.299584, 0.055467, "", "high"),
]


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(("advantage", "ratio", "reverse", "forward", "reverse_side", "forward_side"), VALUE_CLIP)
def test_the_clip_of_the_value_weighs_every_token_by_the_clipped_value(
    advantage: float, ratio: float, reverse: float, forward: float, reverse_side: str, forward_side: str, level: str
) -> None:
    expected = {"unnormalized_reverse": (reverse, reverse_side), "forward": (forward, forward_side)}
    for divergence, (weight, side) in expected.items():
        objective = RegularizedObjective(
            divergence=divergence, level=level, kl_coef=0.1, clip=ValueClip(low=0.2, high=0.28, dual=10.0)
        )
        assert slope(objective, ratio, advantage) == pytest.approx(-weight, abs=2e-6)
        marks = evaluate_objective(objective, one_token(ratio, advantage)).diagnostics()
        assert [name for name in ("low", "high", "dual") if marks[f"clipped_{name}"].item()] == [side] * bool(side)
