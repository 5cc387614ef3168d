"""The divergences between policy and reference, estimated from samples of a third policy, π_old.

Each has a weight K and a loss D. K is the contribution of minus the divergence to the m of `∇J = E_old[m ∇log π]`; D's
expected gradient is that of the divergence. Both are exact for one token, and for a whole response if the ratios are
those of the whole response. π_old and π_ref are constants; the symbols are those of `terms`. docs/objectives.md shows
the first two lines of each weight and the first of each loss.

If the divergence at a state is summed over tokens (`StateDivergence`), the sampled token's weight covers only the rest:
itself if it is outside of the sum, and at level to_go the divergence of later states.

Source: Zhang 2025, arXiv:2505.17508, Props 3.2, 3.6, E.1, E.3. Differs: the sampler and the reference may be two
policies; if they are one, q = 1 and these are the paper's.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import assert_never

import torch
from torch import Tensor

from rpg.objectives.distribution import log_share
from rpg.objectives.terms import Terms, bounded_exp
from specs.schema.base_objective import Divergence

_FORWARD = ("forward", "unnormalized_forward")


def forward_weight(log_ratio: Tensor, log_reference: Tensor) -> Tensor:
    """q

    K of KL(π_ref ‖ π).

    Args:
        log_ratio: log w, nats, one entry per token or response. Constant, here and below.
        log_reference: log q, nats, of the same entries. Constant.
    Returns:
        One number per entry.
    """
    return bounded_exp(log_reference).expand_as(log_ratio)


def reverse_weight(log_ratio: Tensor, log_reference: Tensor) -> Tensor:
    """−w (log r + 1)

    K of KL(π ‖ π_ref). Args and Returns: as `forward_weight`.
    """
    return -bounded_exp(log_ratio) * (log_ratio - log_reference + 1)


def unnormalized_forward_weight(log_ratio: Tensor, log_reference: Tensor) -> Tensor:
    """−(w − q)

    K of KL(π_ref ‖ π) + mass of π − mass of π_ref. Args and Returns: as `forward_weight`.
    """
    return bounded_exp(log_reference) - bounded_exp(log_ratio)


def unnormalized_reverse_weight(log_ratio: Tensor, log_reference: Tensor) -> Tensor:
    """−w log r

    K of KL(π ‖ π_ref) + mass of π_ref − mass of π. Args and Returns: as `forward_weight`.
    """
    return -bounded_exp(log_ratio) * (log_ratio - log_reference)


def jensen_shannon_weight(log_ratio: Tensor, log_reference: Tensor) -> Tensor:
    """−½ w log(2 r / (1 + r))

    K of ½ KL(π ‖ m) + ½ KL(π_ref ‖ m), m = ½ (π + π_ref). Args and Returns: as `forward_weight`.
    """
    return -bounded_exp(log_ratio) * log_share(log_ratio - log_reference) / 2


def no_weight(log_ratio: Tensor, log_reference: Tensor) -> Tensor:
    """0

    K of no divergence. Args and Returns: as `forward_weight`.
    """
    return torch.zeros_like(log_ratio + log_reference)


def forward_loss(terms: Terms) -> Tensor:
    """−q log π

    Its expectation is KL(π_ref ‖ π) up to a constant.

    Args:
        terms: terms of tokens or of whole responses; `log_policy` and `log_ratio` are differentiable.
    Returns:
        D, nats, one number per entry.
    """
    return -bounded_exp(terms.log_reference) * terms.log_policy


def reverse_loss(terms: Terms) -> Tensor:
    """w log r

    Its expectation is KL(π ‖ π_ref). Args and Returns: as `forward_loss`.
    """
    return bounded_exp(terms.log_ratio) * terms.log_ref_ratio


def unnormalized_forward_loss(terms: Terms) -> Tensor:
    """w − q log π

    Its expectation is the divergence up to a constant. Args and Returns: as `forward_loss`.
    """
    return bounded_exp(terms.log_ratio) - bounded_exp(terms.log_reference) * terms.log_policy


def unnormalized_reverse_loss(terms: Terms) -> Tensor:
    """w log r − w

    Its expectation is the divergence up to a constant. Args and Returns: as `forward_loss`.
    """
    return bounded_exp(terms.log_ratio) * terms.log_ref_ratio - bounded_exp(terms.log_ratio)


def jensen_shannon_loss(terms: Terms) -> Tensor:
    """½ w log(2 r / (1 + r)) + ½ q log(2 / (1 + r))

    Its expectation is the divergence. Args and Returns: as `forward_loss`.
    """
    of_policy, of_reference = log_share(terms.log_ref_ratio), log_share(-terms.log_ref_ratio)
    return (bounded_exp(terms.log_ratio) * of_policy + bounded_exp(terms.log_reference) * of_reference) / 2


def no_loss(terms: Terms) -> Tensor:
    """0

    Args and Returns: as `forward_loss`.
    """
    return torch.zeros_like(terms.log_ratio)


def to_go_weight(divergence: Divergence, log_ratio: Tensor, terms: Terms, *, per_ratio: bool = False) -> Tensor:
    """Returns K of the whole response's divergence, with each token credited with the part from itself on.

    forward: Q; reverse: −w (S + 1); unnormalized_forward: −(w − Q); unnormalized_reverse: −w S. S is the sum of log r
    from the token on, Q the product of q up to it. On policy the expected gradient is exactly that of the divergence of
    whole responses, with less variance than the response's own weight: a token is not charged for the tokens before it.

    Args:
        log_ratio: log w of each token, perhaps clamped.
        per_ratio: whether to return K/w, for an unclamped ratio.
    Returns:
        One number per token. Constant.
    Source: FRPO, arXiv:2601.10201.
    """
    so_far = terms.log_reference_so_far
    ratio = torch.ones_like(log_ratio) if per_ratio else bounded_exp(log_ratio.detach())
    reference = bounded_exp(so_far - log_ratio.detach()) if per_ratio else bounded_exp(so_far)
    match divergence:
        case "forward":
            return reference
        case "reverse":
            return -ratio * (terms.log_ref_ratio_to_go + 1)
        case "unnormalized_forward":
            return reference - ratio
        case "unnormalized_reverse":
            return -ratio * terms.log_ref_ratio_to_go
        case "none" | "jensen_shannon":  # the latter is summed over tokens, unless its weight is 0
            return torch.zeros_like(log_ratio)
        case never:
            assert_never(never)


def to_go_loss(divergence: Divergence, terms: Terms) -> Tensor:
    """Returns a loss for the weight K of `to_go_weight`, token by token: −SG(K) log π. Its value is not that of a
    divergence."""
    return -to_go_weight(divergence, terms.log_ratio, terms) * terms.log_policy


def state_loss(divergence: Divergence, terms: Terms) -> Tensor:
    """Returns the divergence at each token's state, summed over the vocabulary. For a forward divergence at level to_go
    it is multiplied by the product of q before the token, which turns the sampler's distribution of states into the
    reference's.

    Returns: nats, one number per token. Differentiable by the state's value.
    """
    assert terms.state is not None
    return terms.state.value * _reached(terms, divergence)


def rest_weight(divergence: Divergence, log_ratio: Tensor, terms: Terms, *, per_ratio: bool = False) -> Tensor:
    """Returns the sampled token's K in addition to a sum over the vocabulary.

    Its own K if it is outside of the sum; and at level to_go, unless the divergence is forward, −w times the divergence
    of the later states of its response.

    Args:
        log_ratio: log w of each token, perhaps clamped.
        per_ratio: whether to return K/w, for an unclamped ratio.
    Returns:
        One number per token. Constant.
    """
    assert terms.state is not None
    log_ratio = log_ratio.detach()
    # K is homogeneous in w and q, so that K/w is K at ratio 1 and at q/w.
    at, reference = log_ratio, terms.log_reference
    if per_ratio:
        at, reference = torch.zeros_like(log_ratio), terms.log_reference - log_ratio
    own = WEIGHTS[divergence](at, reference) * _reached(terms, divergence)
    weight = torch.where(terms.state.outside, own, 0.0)
    if not terms.to_go or divergence in _FORWARD:
        return weight
    return weight - bounded_exp(at) * _later(divergence, terms)


def rest_loss(divergence: Divergence, terms: Terms) -> Tensor:
    """Returns the sampled token's D in addition to a sum over the vocabulary. At level to_go it is −SG(K) log π, as in
    `to_go_loss`."""
    assert terms.state is not None
    if terms.to_go:
        return -rest_weight(divergence, terms.log_ratio, terms) * terms.log_policy
    return torch.where(terms.state.outside, LOSSES[divergence](terms), 0.0)


def _reached(terms: Terms, divergence: Divergence) -> Tensor:
    """Returns the factor that turns the sampler's distribution of states into the divergence's. For a forward
    divergence at level to_go it is the product of q before each token, else 1. Constant."""
    if terms.to_go and divergence in _FORWARD:
        return bounded_exp(terms.log_reference_so_far - terms.log_reference)
    return torch.ones_like(terms.log_reference)


def _later(divergence: Divergence, terms: Terms) -> Tensor:
    """Returns the divergence summed over the later states of each token's response. Constant."""
    assert terms.state is not None
    sampled = LOSSES[divergence](terms).detach()
    if divergence == "unnormalized_reverse":
        sampled = sampled + bounded_exp(terms.log_reference)  # the mass of the reference, which has no gradient
    each = terms.state.value.detach() + torch.where(terms.state.outside, sampled, 0.0)
    return each.flip(-1).cumsum(-1).flip(-1) - each


WEIGHTS: Mapping[Divergence, Callable[[Tensor, Tensor], Tensor]] = MappingProxyType(
    {
        "forward": forward_weight,
        "reverse": reverse_weight,
        "unnormalized_forward": unnormalized_forward_weight,
        "unnormalized_reverse": unnormalized_reverse_weight,
        "jensen_shannon": jensen_shannon_weight,
        "none": no_weight,
    }
)
LOSSES: Mapping[Divergence, Callable[[Terms], Tensor]] = MappingProxyType(
    {
        "forward": forward_loss,
        "reverse": reverse_loss,
        "unnormalized_forward": unnormalized_forward_loss,
        "unnormalized_reverse": unnormalized_reverse_loss,
        "jensen_shannon": jensen_shannon_loss,
        "none": no_loss,
    }
)
