"""Agreement with TRL's own losses on random batches with responses of unequal length."""

import warnings
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rpg.certificate.catalogue import objective
from rpg.objectives import token_losses
from rpg.objectives.aggregate import aggregate

RESPONSES, TIME, LONGEST = 6, 7, 9
ACCELERATOR = SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, **_: x)
SETTINGS: dict[str, Any] = {
    "top_entropy_quantile": 1.0,
    "off_policy_mask_threshold": None,
    "importance_sampling_level": "token",
    "use_vllm": False,
    "aux_loss_enabled": False,
    "_entropy_bonus_enabled": False,
    "current_gradient_accumulation_steps": 1,
    "max_completion_length": LONGEST,
    "model": SimpleNamespace(training=True),
    "accelerator": ACCELERATOR,
}


def batch(seed: int) -> dict[str, Tensor]:
    """Ratios on both sides of every margin; float64."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    old = -normal(RESPONSES, TIME).abs() - 0.05
    lengths = torch.randint(1, TIME + 1, (RESPONSES, 1), generator=generator)
    return {
        "logprobs": old + 0.5 * normal(RESPONSES, TIME),
        "old_logprobs": old,
        "ref_logprobs": old + 0.5 * normal(RESPONSES, TIME),
        "advantages": normal(RESPONSES, 1).expand(RESPONSES, TIME).clone(),
        "response_mask": (torch.arange(TIME) < lengths).double(),
    }


def trl_loss(trainer: str, leaf: Tensor, inputs: dict[str, Tensor], **settings: Any) -> Tensor:
    """What TRL's trainer, `GRPO` or `RLOO`, computes from these logprobs."""
    with warnings.catch_warnings():  # imported here: the collection of all tests would pay for it
        warnings.simplefilter("ignore")
        module = pytest.importorskip(f"trl.trainer.{trainer.lower()}_trainer")
    this = SimpleNamespace(**SETTINGS, _metrics=defaultdict(lambda: defaultdict(list)))
    this.args = SimpleNamespace(
        delta=settings.pop("delta", None),
        use_bias_correction_kl=settings.pop("weighted", False),
        steps_per_generation=1,
    )
    vars(this).update({"beta": 0.0, **settings})
    this._get_per_token_logps_and_entropies = lambda *_, **__: (leaf, torch.zeros_like(leaf), None)
    nothing = torch.zeros((RESPONSES, 1), dtype=torch.long)
    mask = inputs["response_mask"]
    given = {
        "prompt_ids": nothing,
        "prompt_mask": nothing,
        "completion_ids": torch.zeros((RESPONSES, TIME), dtype=torch.long),
        "completion_mask": mask,
        "advantages": inputs["advantages"][:, 0],
        "old_per_token_logps": inputs["old_logprobs"],
        "ref_per_token_logps": inputs["ref_logprobs"],
        "old_logps": (inputs["old_logprobs"] * mask).sum(-1),
        "num_items_in_batch": mask.sum(),
    }
    loss: Tensor = getattr(module, f"{trainer}Trainer")._compute_loss(this, None, given)
    return loss


GRPO = {"loss_type": "grpo", "epsilon_low": 0.2, "epsilon_high": 0.2}
PAIRS = [
    ({"type": "grpo", "kl_coef": 0.04}, "GRPO", {**GRPO, "beta": 0.04}),
    ({"type": "grpo", "kl_coef": 0.3, "kl_weighted": True}, "GRPO", {**GRPO, "beta": 0.3, "weighted": True}),
    ({"type": "grpo", "kl_coef": 0.0}, "GRPO", GRPO),
    ({"type": "ppo", "aggregation": "token_mean"}, "GRPO", {**GRPO, "loss_type": "bnpo"}),
    ({"type": "dapo"}, "GRPO", {"loss_type": "dapo", "epsilon_low": 0.2, "epsilon_high": 0.28}),
    ({"type": "dr_grpo"}, "GRPO", {**GRPO, "loss_type": "dr_grpo"}),
    (
        {"type": "gspo"},
        "GRPO",
        {**GRPO, "epsilon_low": 3e-4, "epsilon_high": 4e-4, "importance_sampling_level": "sequence"},
    ),
    (
        {"type": "gspo", "clip": {"low": 0.2, "high": 0.2}},
        "GRPO",
        {**GRPO, "importance_sampling_level": "sequence"},
    ),
    ({"type": "cispo"}, "GRPO", {"loss_type": "cispo", "epsilon_high": 5.0}),
    ({"type": "cispo", "max_ratio": 1.3}, "GRPO", {"loss_type": "cispo", "epsilon_high": 1.3}),
    ({"type": "rloo"}, "RLOO", {"epsilon_low": 0.2, "epsilon_high": 0.2}),
]


@pytest.mark.more
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("values", "trainer", "settings"), PAIRS, ids=[str(pair[0]) for pair in PAIRS])
def test_loss_and_gradient_agree_with_trl(
    values: dict[str, Any], trainer: str, settings: dict[str, Any], seed: int
) -> None:
    inputs = batch(seed)
    theirs = inputs["logprobs"].clone().requires_grad_()
    their_loss = trl_loss(trainer, theirs, inputs, **settings)
    their_loss.backward()

    item = objective(values)
    mine = inputs["logprobs"].clone().requires_grad_()
    losses = token_losses(item, **{**inputs, "logprobs": mine})
    my_loss = aggregate(
        losses,
        inputs["response_mask"],
        aggregation=item.aggregation,
        num_tokens=inputs["response_mask"].sum().item(),
        num_sequences=RESPONSES,
        max_response_length=LONGEST,
    )
    my_loss.backward()
    assert my_loss.item() == pytest.approx(their_loss.item(), rel=1e-6, abs=1e-9)
    assert theirs.grad is not None
    assert torch.allclose(mine.grad, theirs.grad, rtol=1e-6, atol=1e-9)
    assert mine.grad.abs().max() > 1e-3
