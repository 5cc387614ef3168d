"""Routing of a mixture of experts: how many tokens its routers send to each expert, and the loss that evens that out.

The loss is that of Fedus 2021, arXiv:2101.03961, eq. 4 to 6, for several experts a token and over all layers at once,
as transformers has it (`load_balancing_loss_func`).
"""

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rpg.pretrained import experts_per_token
from specs.errors import Issue, SpecError
from specs.schema.training import Training

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


@dataclass(frozen=True, slots=True)
class Routing:
    """Sums over the sampled tokens of a pass, each taken where it is predicted, so that they do not depend on how a
    step is cut into passes."""

    counts: Tensor
    """Tokens that each expert is among the chosen ones of. [layers, experts], float32"""
    probabilities: Tensor
    """Probabilities of each expert, added up. Differentiable. [layers, experts], float32"""


def routing_of(router_logits: tuple[Tensor, ...], sources: Tensor, chosen: int) -> Routing:
    """Sums over the tokens at `sources`.

    Args:
        router_logits: of each layer with experts, [tokens, experts].
        sources: positions among the tokens; one may be there several times. [n]
        chosen: experts that a token is sent to.
    """
    counts, probabilities = [], []
    for logits in router_logits:
        of_token = torch.softmax(logits.flatten(0, -2).index_select(0, sources).float(), dim=-1)
        best = of_token.detach().topk(chosen, dim=-1).indices
        counts.append(torch.zeros_like(of_token).scatter_(1, best, 1.0).sum(0))
        probabilities.append(of_token.sum(0))
    return Routing(torch.stack(counts), torch.stack(probabilities))


def balancing_loss(counts: Tensor, probabilities: Tensor, tokens: float) -> Tensor:
    """experts x sum over experts of f_e P_e: f_e is the share of the tokens that expert e is chosen for, P_e its mean
    probability, both over all tokens and layers. Where the load is even, it is the number of experts a token.

    It is linear in the probabilities: with the counts of all passes of an update, the losses of the passes add up.

    Args:
        counts: tokens of each expert. Constant. [layers, experts]
        probabilities: added up over the tokens. Differentiable. [layers, experts]
        tokens: their number.
    Example: two experts, one a token; three of four tokens go to the first, whose mean probability is 0.6.
        >>> round(float(balancing_loss(torch.tensor([[3.0, 1.0]]), torch.tensor([[2.4, 1.6]]), 4)), 4)
        1.1
    """
    layers, experts = counts.shape
    rows = layers * tokens
    return experts * (counts.sum(0) / rows * (probabilities.sum(0) / rows)).sum()


def routed_experts(model: "PreTrainedModel") -> int:
    """Experts that a token is sent to, of a model that transformers shows the routers of and balances; else 0."""
    return experts_per_token(model.config.get_text_config()) if _own_loss(model) else 0


def balancing_weight(training: Training, config: "PretrainedConfig") -> float:
    """Weight of the balancing loss: the spec's, or what the model's configuration says."""
    if training.router_aux_loss_coef is not None:
        return training.router_aux_loss_coef
    text = config.get_text_config()
    asks_for_it = getattr(text, "output_router_logits", False)
    return float(getattr(text, "router_aux_loss_coef", None) or 0.0) if asks_for_it else 0.0


def check_balancing(training: Training, model: "PreTrainedModel") -> None:
    """Checks that a model can be trained with the weight it has.

    Raises:
        SpecError: transformers balances its experts by no loss or by another one, which is tried on a few tokens; or
            ranks share sequences.
    """
    weight = balancing_weight(training, model.config)
    path, given = ("training", "router_aux_loss_coef"), f"{weight:g} for {model.config.model_type}"
    if weight and not _is_balanced_so(model):
        message = "this model has no experts that transformers balances by this loss"
        raise SpecError(Issue(message, path, given, allowed="0", hint="leave router_aux_loss_coef out"))
    if weight and training.sequence_parallel_size > 1:
        message = "the load of experts is not balanced where ranks share sequences"
        raise SpecError(Issue(message, path, given, hint="write 0, or sequence_parallel_size: 1"))


def _own_loss(model: "PreTrainedModel") -> Any:
    return getattr(sys.modules[type(model).__module__], "load_balancing_loss_func", None)


def _is_balanced_so(model: "PreTrainedModel") -> bool:
    chosen = routed_experts(model)
    if not chosen:
        return False
    experts = chosen + 2
    logits = tuple((torch.arange(5.0 * experts) * layer).sin().view(5, experts) for layer in (1, 2))
    sums = routing_of(logits, torch.arange(5), chosen)
    own: Tensor = _own_loss(model)(logits, experts, chosen)
    return torch.allclose(own, balancing_loss(sums.counts, sums.probabilities, 5))
