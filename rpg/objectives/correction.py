"""Measures the mismatch between sampling engine and learner, and computes the weights that correct for it.

The same model weights give different logprobs in another engine: `rollout_logprobs` are the engine's, `old_logprobs`
the learner's. All expectations in this package are over the learner's policy. A weight of old/rollout on each token's
loss restores the expectation over that token, in the states that the engine visited. This is exact only for responses
of one token: the distribution of states, and ratios of whole responses, would need the product over the response, with
its variance.
"""

from typing import assert_never

import torch
from torch import Tensor

from rpg.objectives.terms import bounded_exp
from specs.schema.rollout import Correction


def rollout_ratio(old_logprobs: Tensor, rollout_logprobs: Tensor, response_mask: Tensor) -> Tensor:
    """Returns each token's π_old under the learner over its probability under the sampling engine.

    Args:
        old_logprobs: the learner's, nats [batch, time].
        rollout_logprobs: the engine's, nats [batch, time].
        response_mask: 1 on tokens that count [batch, time].
    Returns:
        [batch, time], float32 or wider, 1 at positions with mask 0. Constant.
    """
    dtype = torch.promote_types(old_logprobs.dtype, torch.float32)
    log_ratio = old_logprobs.detach().to(dtype) - rollout_logprobs.detach().to(dtype)
    return bounded_exp(torch.where(response_mask != 0, log_ratio, 0.0))


def truncated_weight(ratio: Tensor, *, bound: float) -> Tensor:
    """Returns min(ratio, bound).

    Args:
        ratio: π_old over the engine's probability, see `rollout_ratio`.
        bound: above 1.
    Returns:
        Factor on a token's loss. The bound limits its variance and biases the entries on which it acts.
    Source: Yao 2025, truncated importance sampling between engine and learner,
    https://fengyao.notion.site/off-policy-rl.
    """
    return ratio.clamp(max=bound)


def masked_weight(ratio: Tensor, *, bound: float) -> Tensor:
    """Returns the ratio if it is in [1/bound, bound], else 0.

    Args: as in `truncated_weight`.
    Returns: factor on a token's loss; 0 leaves the token out.
    """
    return torch.where((ratio <= bound) & (ratio >= 1 / bound), ratio, 0.0)


def correction_weight(correction: Correction, ratio: Tensor) -> Tensor:
    """Returns the factor on each token's loss, as the spec says; 1 without a correction."""
    match correction.type:
        case "none":
            return torch.ones_like(ratio)
        case "truncate":
            return truncated_weight(ratio, bound=correction.bound)
        case "mask":
            return masked_weight(ratio, bound=correction.bound)
        case never:
            assert_never(never)


def mismatch_diagnostics(ratio: Tensor, weight: Tensor, correction: Correction) -> dict[str, Tensor]:
    """Returns the mismatch between engine and learner for the metrics, by name and for each token.

    rollout_ratio: learner over engine. kl_rollout: nats, ≥ 0; its mean estimates KL(engine ‖ learner) without bias.
    corrected: bool, whether the correction's bound acted.
    """
    acted = weight != ratio if correction.type != "none" else torch.zeros_like(ratio, dtype=torch.bool)
    return {"rollout_ratio": ratio, "kl_rollout": ratio - 1 - torch.log(ratio), "corrected": acted}
