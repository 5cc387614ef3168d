"""Estimates of KL(pi || pi_ref) from one sampled token, log r = log pi/pi_ref, as the field uses them.

Each has a value and, as part of a loss, a gradient; the two are estimates of different things. "On policy" means pi
is the sampler; all claims are about one token given its prefix. A penalty on single tokens never credits a token with
the divergence of what follows it, so none of these in the loss has the gradient of the divergence of whole responses.

Source: Schulman 2020, http://joschu.net/blog/kl-approx.html.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from rpg.objectives.terms import Terms, bounded_exp


def k1(log_ref_ratio: Tensor) -> Tensor:
    """log r. Value: unbiased on policy, of either sign.

    Args:
        log_ref_ratio: log r, nats, one entry a token. Differentiable, here and in k2 and k3.
    Returns:
        Nats, one number an entry.

    Gradient in the loss: on policy 0 in expectation. Times the differentiable ratio w: exactly grad KL(pi || pi_ref),
    on and off policy. As a constant in the reward of the whole response: exactly the gradient of the whole response's
    KL, on policy.
    """
    return log_ref_ratio


def k2(log_ref_ratio: Tensor) -> Tensor:
    """(log r)^2 / 2. Value: biased, never negative.

    Gradient in the loss: on policy exactly grad KL(pi || pi_ref). Times the differentiable ratio: of nothing that has
    a name.
    """
    return log_ref_ratio.square() / 2


def k3(log_ref_ratio: Tensor) -> Tensor:
    """1/r - 1 + log r. Value: unbiased on policy, never negative.

    Gradient in the loss: on policy exactly grad KL(pi_ref || pi), the forward one. Times the differentiable ratio w:
    exactly grad KL(pi || pi_ref), on and off policy.
    """
    return bounded_exp(-log_ref_ratio) - 1 + log_ref_ratio


ESTIMATORS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType({"k1": k1, "k2": k2, "k3": k3})


def reward_penalties(log_ref_ratio: Tensor, lengths: Tensor, *, estimator: str, credit: str) -> Tensor:
    """Amount that a penalty takes off the reward that each token answers for, per unit of its coefficient.

    The sum of the estimates at the policy that sampled, over the whole response or from the token on. With k1 and on
    policy its expected gradient is exactly that of the whole response's KL(pi || pi_ref), either way; off policy it
    is not, since the divergence is the sampler's.

    Args:
        log_ref_ratio: [tokens], log pi_old/pi_ref, nats, the responses laid end to end. Constant.
        lengths: [responses], tokens of each, at least 1.
        estimator: k1, k2 or k3.
        credit: response or to_go.
    Returns:
        [tokens], float64.
    Source: Ahmadian 2024, arXiv:2402.14740 (whole response); Hu 2025, arXiv:2501.03262, eq. 4 (from the token on).
    """
    estimates = ESTIMATORS[estimator](log_ref_ratio.detach().double())
    owner = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
    totals = estimates.new_zeros(len(lengths)).index_add(0, owner, estimates)
    if credit == "response":
        return totals[owner]
    earlier = estimates.cumsum(0) - estimates
    starts = lengths.cumsum(0) - lengths
    return totals[owner] - (earlier - earlier[starts][owner])


def penalty(terms: Terms, *, estimator: str, weighted: bool) -> Tensor:
    """The penalty in the loss: k(r), or w k(r) where it is weighted.

    Args:
        terms: of tokens.
        estimator: k, which is k1, k2 or k3.
        weighted: whether it is multiplied by the token's ratio, which is differentiated too.
    Returns:
        [B, T], nats, per unit of its coefficient.
    """
    estimate = ESTIMATORS[estimator](terms.log_ref_ratio)
    return bounded_exp(terms.log_ratio) * estimate if weighted else estimate


def token_divergences(terms: Terms) -> dict[str, Tensor]:
    """The unnormalized divergences of each token, which metrics show.

    kl_reverse: w log r − w + q, of KL(π ‖ π_ref); kl_forward: w − q − q log r, of KL(π_ref ‖ π); kl_behaviour:
    w − 1 − log w, of KL(π_old ‖ π).

    Args:
        terms: of tokens.
    Returns:
        Name -> [B, T], nats, each ≥ 0. Their means over tokens that π_old sampled are unbiased, in the states that it
        came to. Constant.
    """
    log_ratio, log_reference = terms.log_ratio.detach(), terms.log_reference
    ratio, reference, log_ref_ratio = terms.ratio, bounded_exp(log_reference), log_ratio - log_reference
    return {
        "kl_reverse": ratio * log_ref_ratio - ratio + reference,
        "kl_forward": ratio - reference - reference * log_ref_ratio,
        "kl_behaviour": ratio - 1 - log_ratio,
    }
