"""Measures the mismatch between sampling engine and learner, and computes the weights that correct for it.

The same model weights give different logprobs in another engine: `rollout_logprobs` are the engine's, `old_logprobs`
the learner's. All expectations in this package are over the learner's policy. A weight of old/rollout on each token's
loss restores the expectation over that token, in the states that the engine visited. This is exact only for responses
of one token: the distribution of states, and ratios of whole responses, need the product over the response
(`over: sequence`), with its variance.
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


def correction_weight(
    correction: Correction, old_logprobs: Tensor, rollout_logprobs: Tensor, response_mask: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the factor on each token's loss, as the spec says, and whether the bounds act on the token. [batch, time]

    truncate: min(max(ratio, low), high). mask: the ratio, or 0 if the measured value is outside the bounds. `over` says
    whether the ratio is the token's or the response's; with a mask over the geometric mean it is the token's. A bound
    limits the variance and biases the entries on which it acts.

    Args: as in `rollout_ratio`.
    Source: truncated importance sampling, Yao 2025, https://fengyao.notion.site/off-policy-rl; masks of tokens, Ling
    2025 (IcePop), arXiv:2510.18855; of responses by their ratio, Liu 2025,
    https://yingru.notion.site/When-Speed-Kills-Stability; as in TRL (token_ and sequence_truncate, token_ and
    sequence_mask) and NeMo-RL (tis, icepop, seq-mask-tis).
    """
    token = rollout_ratio(old_logprobs, rollout_logprobs, response_mask)
    if correction.type == "none":
        return torch.ones_like(token), torch.zeros_like(token, dtype=torch.bool)
    old, rollout = (_of_unit(each, response_mask, correction) for each in (old_logprobs, rollout_logprobs))
    ratio = bounded_exp(old - rollout).expand_as(token)
    low, high = correction.bounds
    match correction.type:
        case "truncate":
            weight = ratio.clamp(low, high)
            return weight, weight != ratio
        case "mask":
            measured = ratio if correction.measure == "ratio" else (old.exp() - rollout.exp()).expand_as(token)
            outside = (measured < low) | (measured > high)
            return (token if correction.over == "geometric_mean" else ratio).masked_fill(outside, 0.0), outside
        case never:
            assert_never(never)


def _of_unit(logprobs: Tensor, response_mask: Tensor, correction: Correction) -> Tensor:
    """Returns the log-probability of each token, of its response, or the mean over the response's tokens [batch, 1].
    Constant."""
    mask = response_mask != 0
    logprobs = torch.where(mask, logprobs.detach().to(torch.promote_types(logprobs.dtype, torch.float32)), 0.0)
    match correction.over:
        case "token":
            return logprobs
        case "sequence":
            return logprobs.sum(-1, keepdim=True)
        case "geometric_mean":
            return logprobs.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
        case never:
            assert_never(never)


def mismatch_diagnostics(ratio: Tensor, acted: Tensor) -> dict[str, Tensor]:
    """Returns the mismatch between engine and learner for the metrics, by name and for each token.

    rollout_ratio: learner over engine. kl_rollout: nats, ≥ 0; its mean estimates KL(engine ‖ learner) without bias.
    corrected: bool, whether the correction's bounds acted.
    """
    return {"rollout_ratio": ratio, "kl_rollout": ratio - 1 - torch.log(ratio), "corrected": acted}
