"""The common estimates of KL(pi || pi_ref) from one sampled token, with log r = log pi/pi_ref.

Each has a value and, as part of a loss, a gradient; the two estimate different quantities. "On policy" means pi
is the sampler; all claims are about one token given its prefix. A penalty on single tokens never credits a token with
the divergence of later tokens, so none of these in the loss has the gradient of the divergence of whole responses.

Source: Schulman 2020, http://joschu.net/blog/kl-approx.html.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from rpg.objectives.terms import Terms, bounded_exp


def k1(log_ref_ratio: Tensor) -> Tensor:
    """Returns log r. Value: unbiased on policy, of either sign.

    Args:
        log_ref_ratio: log r, nats, one entry per token. Differentiable, here and in k2 and k3.
    Returns:
        Nats, one number per entry.

    Gradient in the loss: on policy 0 in expectation. Times the differentiable ratio w: exactly grad KL(pi || pi_ref),
    on and off policy. As a constant in the reward of the whole response: exactly the gradient of the whole response's
    KL, on policy.
    """
    return log_ref_ratio


def k2(log_ref_ratio: Tensor) -> Tensor:
    """Returns (log r)^2 / 2. Value: biased, never negative.

    Gradient in the loss: on policy exactly grad KL(pi || pi_ref). Times the differentiable ratio: the gradient of no
    named divergence.
    """
    return log_ref_ratio.square() / 2


def k3(log_ref_ratio: Tensor) -> Tensor:
    """Returns 1/r - 1 + log r. Value: unbiased on policy, never negative.

    Gradient in the loss: on policy exactly grad KL(pi_ref || pi), the forward one. Times the differentiable ratio w:
    exactly grad KL(pi || pi_ref), on and off policy.
    """
    return bounded_exp(-log_ref_ratio) - 1 + log_ref_ratio


ESTIMATORS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType({"k1": k1, "k2": k2, "k3": k3})


def reward_penalties(log_ref_ratio: Tensor, lengths: Tensor, *, estimator: str, credit: str) -> Tensor:
    """Returns the amount that a penalty subtracts from the reward of each token, per unit of the penalty's coefficient.

    It is the sum of the estimates at the policy that sampled, over the whole response or from the token on. With k1, on
    policy, both have exactly the expected gradient of the whole response's KL(pi || pi_ref); off policy they do not,
    since the divergence is the sampler's.

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
    """Returns the penalty in the loss: k(r), or w k(r) if `weighted`.

    Args:
        terms: terms of single tokens.
        estimator: k, which is k1, k2 or k3.
        weighted: whether to multiply by the token's ratio, which is differentiated too.
    Returns:
        [B, T], nats, per unit of its coefficient.
    """
    estimate = ESTIMATORS[estimator](terms.log_ref_ratio)
    return bounded_exp(terms.log_ratio) * estimate if weighted else estimate


def token_divergences(terms: Terms) -> dict[str, Tensor]:
    """Returns the unnormalized divergences of each token, for metrics.

    kl_reverse: w log r − w + q, of KL(π ‖ π_ref); kl_forward: w − q − q log r, of KL(π_ref ‖ π); kl_behaviour:
    w − 1 − log w, of KL(π_old ‖ π). If the divergence at a state is summed over tokens, the first two are sums over
    these, plus the estimate if the sampled token is outside of them: with a whole vocabulary exact at each state.

    Args:
        terms: terms of single tokens.
    Returns:
        Name -> [B, T], nats, each ≥ 0. Their means over tokens that π_old sampled are unbiased, in the
        states that it visited. Constant.
    """
    log_ratio, log_reference = terms.log_ratio.detach(), terms.log_reference
    ratio, reference, log_ref_ratio = terms.ratio, bounded_exp(log_reference), log_ratio - log_reference
    reverse = ratio * log_ref_ratio - ratio + reference
    forward = ratio - reference - reference * log_ref_ratio
    if terms.state is not None:
        reverse = terms.state.reverse + torch.where(terms.state.outside, reverse, 0.0)
        forward = terms.state.forward + torch.where(terms.state.outside, forward, 0.0)
    return {"kl_reverse": reverse, "kl_forward": forward, "kl_behaviour": ratio - 1 - log_ratio}
