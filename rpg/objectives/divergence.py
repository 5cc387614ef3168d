"""The four divergences D between policy and reference, from samples of a third policy, π_old.

Each has a weight K, which is what −D adds to the m of `∇J = E_old[m ∇log π]`, and a loss whose expected gradient is ∇D.
π_old and π_ref are constants. Both are exact for one token, and for a whole response where the ratios are of the whole
response. The symbols are those of `terms`. The first line of each docstring is a cell of docs/objectives.md.

Source: Zhang 2025, arXiv:2505.17508, Props 3.2, 3.6, E.1, E.3. Differs: the sampler and the reference may be two
policies; where they are one, q = 1 and these are the paper's.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from rpg.objectives.terms import Terms, bounded_exp
from specs.schema.objective import Divergence


def forward_weight(log_ratio: Tensor, log_reference: Tensor) -> Tensor:
    """q

    Args:
        log_ratio: log w, nats, of each entry. Constant, as it is for the other weights.
        log_reference: log q, nats, of each entry. Constant.
    Returns:
        K of KL(π_ref ‖ π), of the shape of `log_ratio`.
    """
    return bounded_exp(log_reference).expand_as(log_ratio)


def reverse_weight(log_ratio: Tensor, log_reference: Tensor) -> Tensor:
    """−w (log r + 1)

    Returns: K of KL(π ‖ π_ref).
    """
    return -bounded_exp(log_ratio) * (log_ratio - log_reference + 1)


def unnormalized_forward_weight(log_ratio: Tensor, log_reference: Tensor) -> Tensor:
    """−(w − q)

    Returns: K of KL(π_ref ‖ π) plus the mass of π less that of π_ref.
    """
    return bounded_exp(log_reference) - bounded_exp(log_ratio)


def unnormalized_reverse_weight(log_ratio: Tensor, log_reference: Tensor) -> Tensor:
    """−w log r

    Returns: K of KL(π ‖ π_ref) plus the mass of π_ref less that of π.
    """
    return -bounded_exp(log_ratio) * (log_ratio - log_reference)


def no_weight(log_ratio: Tensor, log_reference: Tensor) -> Tensor:
    """0

    Returns: K of no divergence.
    """
    return torch.zeros_like(log_ratio + log_reference)


def forward_loss(terms: Terms) -> Tensor:
    """−q log π

    Args:
        terms: the policy's part of them is differentiable.
    Returns:
        Nats, one entry a ratio; its expectation is KL(π_ref ‖ π) up to a constant.
    """
    return -bounded_exp(terms.log_reference) * terms.log_policy


def reverse_loss(terms: Terms) -> Tensor:
    """w log r

    Returns: nats, one entry a ratio; its expectation is KL(π ‖ π_ref).
    """
    return bounded_exp(terms.log_ratio) * terms.log_ref_ratio


def unnormalized_forward_loss(terms: Terms) -> Tensor:
    """w − q log π

    Returns: nats, one entry a ratio; its expectation is the divergence up to a constant.
    """
    return bounded_exp(terms.log_ratio) - bounded_exp(terms.log_reference) * terms.log_policy


def unnormalized_reverse_loss(terms: Terms) -> Tensor:
    """w log r − w

    Returns: nats, one entry a ratio; its expectation is the divergence up to a constant.
    """
    return bounded_exp(terms.log_ratio) * terms.log_ref_ratio - bounded_exp(terms.log_ratio)


def no_loss(terms: Terms) -> Tensor:
    """0

    Returns: zeros, one entry a ratio.
    """
    return torch.zeros_like(terms.log_ratio)


WEIGHTS: Mapping[Divergence, Callable[[Tensor, Tensor], Tensor]] = MappingProxyType(
    {
        "forward": forward_weight,
        "reverse": reverse_weight,
        "unnormalized_forward": unnormalized_forward_weight,
        "unnormalized_reverse": unnormalized_reverse_weight,
        "none": no_weight,
    }
)
LOSSES: Mapping[Divergence, Callable[[Terms], Tensor]] = MappingProxyType(
    {
        "forward": forward_loss,
        "reverse": reverse_loss,
        "unnormalized_forward": unnormalized_forward_loss,
        "unnormalized_reverse": unnormalized_reverse_loss,
        "none": no_loss,
    }
)
