"""Routing of a mixture of experts: how many tokens its routers send to each expert, the loss that evens that out, and
the sampler's choice replayed by the learner.

The loss is that of Fedus 2021, arXiv:2101.03961, eq. 4 to 6, for several experts a token and over all layers at once,
as transformers has it (`load_balancing_loss_func`). The replay is that of Ma 2025, arXiv:2510.11370: what an engine and
the learner differ by in their arithmetic sends some tokens to other experts, and their logprobs far apart.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

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


def routing_of(
    router_logits: tuple[Tensor, ...], sources: Tensor, chosen: int, given: Sequence[Tensor] | None = None
) -> Routing:
    """Sums over the tokens at `sources`.

    Args:
        router_logits: of each layer with experts, [tokens, experts].
        sources: positions among the tokens; one may be there several times. [n]
        chosen: experts that a token is sent to.
        given: which they are, of each layer, [tokens, chosen]; None: those of the highest logits.
    """
    counts, probabilities = [], []
    for layer, logits in enumerate(router_logits):
        of_token = torch.softmax(logits.flatten(0, -2).index_select(0, sources).float(), dim=-1)
        best = given[layer][sources] if given else of_token.detach().topk(chosen, dim=-1).indices
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


def routers_of(model: nn.Module) -> list[nn.Module]:
    """The modules that choose the experts of a token, in the order of the layers."""
    return [module for module in model.modules() if type(module).__name__.endswith("Router")]


@contextmanager
def choices_taken(model: nn.Module) -> Iterator[list[Tensor]]:
    """Within the block the experts that each router chooses are appended. [tokens, experts a token] each"""
    taken: list[Tensor] = []

    def take(_: nn.Module, __: Any, output: tuple[Tensor, ...]) -> None:
        taken.append(_told(output))

    hooks = [router.register_forward_hook(take) for router in routers_of(model)]
    try:
        yield taken
    finally:
        for hook in hooks:
            hook.remove()


def _told(output: tuple[Tensor, ...]) -> Tensor:
    """The experts in what a router returns; raises StopIteration where there are none."""
    return next(each for each in output if each.dtype == torch.int64)


def pop_choices(taken: list[Tensor]) -> "np.ndarray[Any, np.dtype[np.int16]]":
    """What one forward pass has appended, emptied. [tokens, layers, experts a token]"""
    choices = torch.stack(taken, dim=1).to(torch.int16).cpu().numpy()
    taken.clear()
    return choices


class ReplayedRouters:
    """The routers of a model, which can be given the experts of each token. Weights of the given experts are taken from
    the router's own probabilities, so that it is trained as ever."""

    def __init__(self, model: nn.Module) -> None:
        self.given: list[Tensor] | None = None
        """Experts of each token of this pass, and of its recomputation, for each router. None: the routers choose.
        [tokens, experts a token] each"""
        self._routers = routers_of(model)
        names = [name for name, module in model.named_modules() if module in self._routers]
        self._numbers = [int(next(filter(str.isdigit, name.split(".")), "0")) for name in names]
        """Layer of each router, counted over those without one too."""
        self._layers = int(getattr(getattr(model, "config", None), "num_hidden_layers", 0))
        for number, router in enumerate(self._routers):
            router.forward = partial(self._routed, number, router.forward)

    def give(self, experts: Tensor | None) -> None:
        """Has the next pass, and its recomputation, send tokens to these experts.

        Args:
            experts: for each router, or for each layer, as vLLM tells them; any integer type. None: the routers choose.
                [tokens, routers or layers, experts a token]
        Raises:
            RuntimeError: they are of other layers than the model has.
        """
        if experts is None:
            self.given = None
            return
        told = experts.shape[1]
        if told not in (len(self._routers), self._layers):
            raise RuntimeError(f"the sampler told the experts of {told} layers; {len(self._routers)} have routers")
        columns = range(told) if told == len(self._routers) else self._numbers
        self.given = [experts[:, column].long() for column in columns]

    def _routed(self, router: int, forward: Any, *arguments: Any, **keywords: Any) -> Any:
        if self.given is None:
            return forward(*arguments, **keywords)
        with _GivenChoice(self.given[router]) as choice:
            output = forward(*arguments, **keywords)
        if choice.times != 1:
            raise RuntimeError(f"a router makes {choice.times} choices that could be of the experts of a token")
        return output

    def replay(self, config: "PretrainedConfig") -> bool:
        """Whether all routers of the model, which may be on meta tensors, take what they are given and tell it."""
        text = config.get_text_config()
        chosen = experts_per_token(text)
        if not chosen or not self._routers:
            return False
        weight = next(self._routers[0].parameters())
        self.give(torch.arange(chosen, device=weight.device).expand(3, len(self._routers), chosen))
        hidden = weight.new_zeros(3, text.hidden_size)
        try:
            told = [_told(router(hidden)) for router in self._routers]
        except Exception:  # it needs more than hidden states, tells no choice, or makes several
            return False
        finally:
            self.give(None)
        return all(each.shape == (3, chosen) for each in told)


class _GivenChoice(TorchFunctionMode):
    """Has a `topk` of as many experts choose what is given."""

    def __init__(self, chosen: Tensor) -> None:
        super().__init__()
        self.times = 0
        self._chosen = chosen

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        result = function(*arguments, **(keywords or {}))
        if function not in (torch.topk, Tensor.topk) or result.indices.shape != self._chosen.shape:
            return result
        self.times += 1
        return torch.return_types.topk((arguments[0].gather(-1, self._chosen), self._chosen))


def check_replay(config: "PretrainedConfig") -> None:
    """Checks that a model's routers can be given the sampler's choice.

    Raises:
        SpecError: it has no experts, or chooses them in another way.
    """
    from rpg.pretrained import model_without_weights

    if not ReplayedRouters(model_without_weights(config)).replay(config):
        message = "this model has no experts whose choice can be replayed"
        path = ("rollout", "replay_routing")
        raise SpecError(Issue(message, path, f"true for {config.model_type}", hint="leave replay_routing out"))
