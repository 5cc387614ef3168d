"""Rivals that TRL lacks, and every rival's published advantages, against plain arithmetic on single numbers."""

import math
from statistics import mean, stdev
from typing import Any

import pytest
import torch

from rpg.advantages import token_advantages
from rpg.certificate.catalogue import catalogue, objective
from rpg.objectives import token_losses
from rpg.objectives.aggregate import aggregate
from specs.schema.objective import Advantage

LENGTHS = (3, 1, 5, 2, 4, 5)
GROUPS = (0, 0, 0, 1, 1, 1)
MASK = torch.arange(5) < torch.tensor(LENGTHS)[:, None]
ESTIMATES = {
    "k1": lambda log_r: log_r,
    "k2": lambda log_r: log_r * log_r / 2,
    "k3": lambda log_r: math.exp(-log_r) - 1 + log_r,
}


def draw(seed: int, spread: float = 0.5) -> torch.Tensor:
    return spread * torch.randn(6, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def numbers(tensor: torch.Tensor) -> list[list[float]]:
    """Values of each response's tokens."""
    return [row[:length] for row, length in zip(tensor.tolist(), LENGTHS, strict=True)]


PENALIZED: list[dict[str, Any]] = [
    {"type": "reinforce_plus_plus"},
    {"type": "reinforce_plus_plus", "kl_in": "loss", "kl_coef": 0.3},
    {"type": "reinforce_plus_plus_baseline"},
    {"type": "reinforce_plus_plus_baseline", "kl_coef": 0.3},
    {"type": "ppo", "kl_coef": 0.3, "kl_estimator": "k1", "kl_weighted": True},
    {"type": "ppo", "kl_coef": 0.3, "kl_estimator": "k2", "kl_weighted": True, "clip": {"dual": 1.5}},
]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("values", PENALIZED, ids=str)
def test_the_clipped_loss_with_its_penalty_is_what_its_equation_gives_token_by_token(
    values: dict[str, Any], seed: int
) -> None:
    old = -draw(seed, 1.0).abs()
    policy, ref, advantages = old + draw(seed + 100), old + draw(seed + 200), draw(seed + 300, 1.0)
    item = objective(values)
    total = 0.0
    for row in zip(*map(numbers, (policy, old, ref, advantages)), strict=True):
        for lp, lo, lr, a in zip(*row, strict=True):
            w = math.exp(lp - lo)
            loss = -min(w * a, min(max(w, 0.8), 1.2) * a)
            if a < 0 and "clip" in values:
                loss = min(loss, -1.5 * a)
            if item.kl_in == "loss":
                loss += item.kl_coef * ESTIMATES[item.kl_estimator](lp - lr) * (w if item.kl_weighted else 1)
            total += loss
    mask = MASK.double()
    losses = token_losses(
        item, logprobs=policy, old_logprobs=old, ref_logprobs=ref, advantages=advantages, response_mask=mask
    )
    found = aggregate(
        losses, mask, aggregation=item.aggregation, num_tokens=sum(LENGTHS), num_sequences=6, max_response_length=5
    )
    assert found.item() == pytest.approx(total / sum(LENGTHS), rel=1e-6)


def published(kind: str, rewards: list[float], penalties: list[list[float]]) -> list[float]:
    """Every token's advantage in the rival's published setting, in loops."""
    whole = rewards if kind != "rloo" else [r - sum(p) for r, p in zip(rewards, penalties, strict=True)]
    found: list[float] = []
    for i, reward in enumerate(whole):
        group = [whole[j] for j in range(6) if GROUPS[j] == GROUPS[i]]
        others = [whole[j] for j in range(6) if GROUPS[j] == GROUPS[i] and j != i]
        each = [reward - mean(group)] * LENGTHS[i]
        if kind in ("grpo", "dapo", "gspo", "cispo"):
            each = [a / (stdev(group) + 1e-4) for a in each]
        elif kind == "ppo":
            each = [(reward - mean(whole)) / (stdev(whole) + 1e-4)] * LENGTHS[i]
        elif kind == "rloo":
            each = [reward - mean(others)] * LENGTHS[i]
        elif kind == "reinforce_plus_plus":
            each = [reward - sum(penalties[i][t:]) for t in range(LENGTHS[i])]
        found += each
    if kind.startswith("reinforce_plus_plus"):
        found = [(a - mean(found)) / math.sqrt(stdev(found) ** 2 + 1e-8) for a in found]
    return found


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", sorted({item.type for item in catalogue()["Rivals as published"]}))
def test_published_advantages_are_what_their_equations_give(kind: str, seed: int) -> None:
    item = objective({"type": kind})
    rewards, old, ref = draw(seed)[:, 0].tolist(), draw(seed + 100), draw(seed + 200)
    penalties = [[item.kl_coef * log_r for log_r in row] for row in numbers(old - ref)]
    found = token_advantages(
        item,
        Advantage(**type(item).published["advantage"]),
        rewards=torch.tensor(rewards, dtype=torch.float64),
        group_ids=torch.tensor(GROUPS),
        lengths=torch.tensor(LENGTHS),
        old_logprobs=old[MASK],
        ref_logprobs=ref[MASK],
    )
    assert found.tolist() == pytest.approx(published(kind, rewards, penalties), rel=1e-6, abs=1e-7)
