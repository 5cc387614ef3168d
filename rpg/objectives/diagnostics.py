"""What may be seen of an objective on a batch, from the tensors at hand: per-token tensors, for metrics."""

import torch
from torch import Tensor

from rpg.objectives.losses import clipped_where, terms_of, token_losses
from rpg.objectives.terms import Terms, bounded_exp, token_terms
from specs.schema.objective import Objective


def diagnostics(
    objective: Objective,
    *,
    logprobs: Tensor,
    old_logprobs: Tensor,
    ref_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
) -> dict[str, Tensor]:
    """Per-token tensors, all [batch, time] and constant, meaningful where `response_mask` is 1 and 0 or False
    elsewhere.

    Returns:
        ratio: pi/pi_old as the objective takes it: of the token, or of the whole response (for ratio/mean, ratio/max,
            ratio/ess).
        weight: the factor of grad log pi in minus the loss's gradient (for weight/variance).
        clipped_low, clipped_high, clipped_dual: bool, where that side of the clip acts (for clip_fraction/*).
        kl_reverse, kl_forward: of the token, nats; means over tokens estimate KL(pi || pi_ref) and KL(pi_ref || pi)
            without bias, states drawn by the sampler; never negative (for kl/reverse, kl/forward).
        kl_behaviour: the same for KL(pi_old || pi) (for kl/behaviour).
    """
    inputs = {
        "old_logprobs": old_logprobs,
        "ref_logprobs": ref_logprobs,
        "advantages": advantages,
        "response_mask": response_mask,
    }
    with torch.enable_grad():
        leaf = logprobs.detach().clone().requires_grad_()
        masked = torch.where(response_mask != 0, token_losses(objective, logprobs=leaf, **inputs), 0.0)
        (gradient,) = torch.autograd.grad(masked.sum(), leaf)
    with torch.no_grad():
        terms = terms_of(objective, logprobs=logprobs, **inputs)
        clipped = clipped_where(objective, terms)
        seen = {
            "ratio": terms.ratio.expand_as(terms.logprobs),
            "weight": -gradient,
            "clipped_low": clipped.low.expand_as(terms.logprobs),
            "clipped_high": clipped.high.expand_as(terms.logprobs),
            "clipped_dual": clipped.dual.expand_as(terms.logprobs),
            **divergences(token_terms(logprobs=logprobs, **inputs)),
        }
        mask = terms.response_mask
        return {name: torch.where(mask, values, torch.zeros_like(values)) for name, values in seen.items()}


def divergences(terms: Terms) -> dict[str, Tensor]:
    """The unnormalised divergences of each token, weighted for samples from pi_old; each is >= 0 and unbiased."""
    log_ratio, log_ref = terms.log_ratio.detach(), terms.log_reference
    ratio, reference, log_r = bounded_exp(log_ratio), bounded_exp(log_ref), log_ratio - log_ref
    return {
        "kl_reverse": ratio * log_r - ratio + reference,
        "kl_forward": ratio - reference - reference * log_r,
        "kl_behaviour": ratio - 1 - log_ratio,
    }
