"""The four divergences between policy and reference, from samples of a third policy, pi_old.

With w = pi/pi_old, q = pi_ref/pi_old and r = pi/pi_ref = w/q. Each divergence D has a weight, the contribution of -D
to the m of `grad J = E_old[m grad log pi]`, and a loss whose gradient is grad D in expectation. pi_old and pi_ref are
constants. All are exact for one token, and for a whole response when the ratios are of the whole response.

Source: Zhang 2025, arXiv:2505.17508, Props 3.2, 3.6, E.1, E.3. Differs: the sampler and the reference may be two
policies; where they are one, q = 1 and these are the paper's.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from rpg.objectives.terms import Terms, bounded_exp

Weight = Callable[[Tensor, Tensor], Tensor]
Loss = Callable[[Terms], Tensor]


def forward_weight(log_ratio: Tensor, log_reference: Tensor) -> Tensor:
    """KL(pi_ref || pi): q."""
    return bounded_exp(log_reference).expand_as(log_ratio)


def reverse_weight(log_ratio: Tensor, log_reference: Tensor) -> Tensor:
    """KL(pi || pi_ref): -w (log r + 1)."""
    return -bounded_exp(log_ratio) * (log_ratio - log_reference + 1)


def unnormalized_forward_weight(log_ratio: Tensor, log_reference: Tensor) -> Tensor:
    """KL(pi_ref || pi) + mass of pi - mass of pi_ref: -(w - q)."""
    return bounded_exp(log_reference) - bounded_exp(log_ratio)


def unnormalized_reverse_weight(log_ratio: Tensor, log_reference: Tensor) -> Tensor:
    """KL(pi || pi_ref) + mass of pi_ref - mass of pi: -w log r."""
    return -bounded_exp(log_ratio) * (log_ratio - log_reference)


def no_weight(log_ratio: Tensor, log_reference: Tensor) -> Tensor:
    """No divergence: 0."""
    return torch.zeros_like(log_ratio + log_reference)


def forward_loss(terms: Terms) -> Tensor:
    """-q log pi; its value is KL(pi_ref || pi) up to a constant."""
    return -terms.reference_weight * terms.log_policy


def reverse_loss(terms: Terms) -> Tensor:
    """w log r; its value is KL(pi || pi_ref)."""
    return terms.ratio * terms.log_ref_ratio


def unnormalized_forward_loss(terms: Terms) -> Tensor:
    """w - q log pi."""
    return terms.ratio - terms.reference_weight * terms.log_policy


def unnormalized_reverse_loss(terms: Terms) -> Tensor:
    """w log r - w."""
    return terms.ratio * terms.log_ref_ratio - terms.ratio


def no_loss(terms: Terms) -> Tensor:
    """0."""
    return torch.zeros_like(terms.log_ratio)


WEIGHTS: Mapping[str, Weight] = MappingProxyType(
    {
        "forward": forward_weight,
        "reverse": reverse_weight,
        "unnormalized_forward": unnormalized_forward_weight,
        "unnormalized_reverse": unnormalized_reverse_weight,
        "none": no_weight,
    }
)
LOSSES: Mapping[str, Loss] = MappingProxyType(
    {
        "forward": forward_loss,
        "reverse": reverse_loss,
        "unnormalized_forward": unnormalized_forward_loss,
        "unnormalized_reverse": unnormalized_reverse_loss,
        "none": no_loss,
    }
)
