"""How far the engine that sampled is from the learner that trains, and the weights that make up for it.

The same weights give other logprobs in another engine: `rollout_logprobs` are the engine's, `old_logprobs` the
learner's. All expectations of this package are over the learner's; a weight of old/rollout on each token's loss
restores that of the token in the states which the engine came to. Exact for responses of one token only: how a state
came about, and ratios of whole responses, would need the product over the response, and bear its variance.
"""

from typing import assert_never

import torch
from torch import Tensor

from rpg.objectives.terms import bounded_exp
from specs.schema.rollout import Correction


def rollout_ratio(old_logprobs: Tensor, rollout_logprobs: Tensor, response_mask: Tensor) -> Tensor:
    """π_old of the learner over what the engine sampled with, of each token.

    Args:
        old_logprobs: of the learner, nats [batch, time].
        rollout_logprobs: of the engine, nats [batch, time].
        response_mask: 1 where a token counts [batch, time].
    Returns:
        [batch, time], float32 or wider, 1 where the mask is 0. Constant.
    """
    dtype = torch.promote_types(old_logprobs.dtype, torch.float32)
    log_ratio = old_logprobs.detach().to(dtype) - rollout_logprobs.detach().to(dtype)
    return bounded_exp(torch.where(response_mask != 0, log_ratio, 0.0))


def truncated_weight(ratio: Tensor, *, bound: float) -> Tensor:
    """min(ratio, bound)

    Args:
        ratio: π_old over what the engine sampled with.
        bound: above 1.
    Returns:
        What a token's loss is multiplied by: biased where the bound acts, its variance bounded.
    Source: Yao 2025, truncated importance sampling between engine and learner,
    https://fengyao.notion.site/off-policy-rl.
    """
    return ratio.clamp(max=bound)


def masked_weight(ratio: Tensor, *, bound: float) -> Tensor:
    """The ratio where it is in [1/bound, bound], else 0.

    Args: as `truncated_weight`.
    Returns: what a token's loss is multiplied by; where it is 0 the token is left out.
    """
    return torch.where((ratio <= bound) & (ratio >= 1 / bound), ratio, 0.0)


def correction_weight(correction: Correction, ratio: Tensor) -> Tensor:
    """Factor of each token's loss, as the spec says; 1 without a correction."""
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
    """Gap between engine and learner for the metrics, of each token and by name.

    rollout_ratio: learner over engine. kl_rollout: nats, ≥ 0, whose mean estimates KL(engine ‖ learner) without bias.
    corrected: bool, where the correction's bound acted.
    """
    acted = weight != ratio if correction.type != "none" else torch.zeros_like(ratio, dtype=torch.bool)
    return {"rollout_ratio": ratio, "kl_rollout": ratio - 1 - torch.log(ratio), "corrected": acted}
