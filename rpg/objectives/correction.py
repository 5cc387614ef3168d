"""How far the engine that sampled is from the learner that trains, and the weights that make up for it.

The same weights give other logprobs in another engine: `rollout_logprobs` are the engine's, `old_logprobs` the
learner's. All expectations of this package are over the learner's; a weight of old/rollout on each token's loss
restores that of the token in the states which the engine came to. Exact for responses of one token only: how a state
came about, and ratios of whole responses, would need the product over the response, and bear its variance.
"""

import torch
from torch import Tensor

from rpg.objectives.terms import bounded_exp
from specs.schema.rollout import Correction


def rollout_ratio(old_logprobs: Tensor, rollout_logprobs: Tensor, response_mask: Tensor) -> Tensor:
    """[batch, time]: pi_old of the learner over what the engine sampled with; 1 on padding. Constant, float32 or
    wider."""
    dtype = torch.promote_types(old_logprobs.dtype, torch.float32)
    log_ratio = old_logprobs.detach().to(dtype) - rollout_logprobs.detach().to(dtype)
    return bounded_exp(torch.where(response_mask != 0, log_ratio, 0.0))


def truncated_weight(ratio: Tensor, *, bound: float) -> Tensor:
    """min(ratio, bound), to multiply each token's loss: biased where the bound acts, variance held.

    Source: Yao 2025, truncated importance sampling between engine and learner,
    https://fengyao.notion.site/off-policy-rl.
    """
    return ratio.clamp(max=bound)


def masked_weight(ratio: Tensor, *, bound: float) -> Tensor:
    """The ratio where it is at most the bound and at least one over it, else 0: such a token is left out."""
    return torch.where((ratio <= bound) & (ratio >= 1 / bound), ratio, 0.0)


def correction_weight(correction: Correction, ratio: Tensor) -> Tensor:
    """What the spec multiplies each token's loss by, given the ratio old / rollout."""
    if correction.type == "truncate":
        return truncated_weight(ratio, bound=correction.bound)
    if correction.type == "mask":
        return masked_weight(ratio, bound=correction.bound)
    return torch.ones_like(ratio)


def mismatch_diagnostics(ratio: Tensor, weight: Tensor, correction: Correction) -> dict[str, Tensor]:
    """Of each token: the ratio old / rollout, an estimate of KL(rollout || old) that is nowhere negative, and whether
    the correction's bound acted."""
    acted = weight != ratio if correction.type != "none" else torch.zeros_like(ratio, dtype=torch.bool)
    return {"rollout_ratio": ratio, "kl_rollout": ratio - 1 - torch.log(ratio), "corrected": acted}
