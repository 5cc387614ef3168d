"""Routing in a mixture of experts: tokens per expert, the loss that balances the load, and replay of the sampler's
choice.

The loss is that of Fedus 2021, arXiv:2101.03961, eq. 4 to 6, for several experts per token and over all layers at once,
as in transformers (`load_balancing_loss_func`). The replay is that of Ma 2025, arXiv:2510.11370: differences in
arithmetic between engine and learner route some tokens to other experts, and the logprobs of these tokens then differ
widely.
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
    """Sums over the sampled tokens of a pass. Each token is counted at the position that predicts it, so that the sums
    do not depend on how a step is divided into passes."""

    counts: Tensor
    """Number of tokens routed to each expert. [layers, experts], float32"""
    probabilities: Tensor
    """Sum of each expert's probabilities over the tokens. Differentiable. [layers, experts], float32"""


def routing_of(
    router_logits: tuple[Tensor, ...], sources: Tensor, chosen: int, given: Sequence[Tensor] | None = None
) -> Routing:
    """Returns the routing sums over the tokens at `sources`.

    Args:
        router_logits: one tensor for each layer with experts, [tokens, experts].
        sources: positions among the tokens; a position may occur several times. [n]
        chosen: number of experts that a token is routed to.
        given: the chosen experts of each layer, [tokens, chosen]; None means those with the highest logits.
    """
    counts, probabilities = [], []
    for layer, logits in enumerate(router_logits):
        of_token = torch.softmax(logits.flatten(0, -2).index_select(0, sources).float(), dim=-1)
        best = given[layer][sources] if given else of_token.detach().topk(chosen, dim=-1).indices
        counts.append(torch.zeros_like(of_token).scatter_(1, best, 1.0).sum(0))
        probabilities.append(of_token.sum(0))
    return Routing(torch.stack(counts), torch.stack(probabilities))


def balancing_loss(counts: Tensor, probabilities: Tensor, tokens: float) -> Tensor:
    """Returns experts x sum over experts of f_e P_e.

    f_e is the share of the tokens that are routed to expert e and P_e its mean probability, both over all tokens and
    layers. Under an even load the loss equals the number of experts per token.

    The loss is linear in the probabilities: if every pass uses the counts of the whole update, the losses of the passes
    add up.

    Args:
        counts: tokens routed to each expert. Constant. [layers, experts]
        probabilities: summed over the tokens. Differentiable. [layers, experts]
        tokens: number of tokens.
    Example: two experts, one per token; three of four tokens go to the first, whose mean probability is 0.6.
        >>> round(float(balancing_loss(torch.tensor([[3.0, 1.0]]), torch.tensor([[2.4, 1.6]]), 4)), 4)
        1.1
    """
    layers, experts = counts.shape
    rows = layers * tokens
    return experts * (counts.sum(0) / rows * (probabilities.sum(0) / rows)).sum()


def routed_experts(model: "PreTrainedModel") -> int:
    """Returns how many experts a token is routed to, if transformers exposes and balances the model's routers, else
    0."""
    return experts_per_token(model.config.get_text_config()) if _own_loss(model) else 0


def balancing_weight(training: Training, config: "PretrainedConfig") -> float:
    """Returns the weight of the balancing loss, from the spec or else from the model's config."""
    if training.router_aux_loss_coef is not None:
        return training.router_aux_loss_coef
    text = config.get_text_config()
    asks_for_it = getattr(text, "output_router_logits", False)
    return float(getattr(text, "router_aux_loss_coef", None) or 0.0) if asks_for_it else 0.0


def check_balancing(training: Training, model: "PreTrainedModel") -> None:
    """Checks that a model can be trained with this weight of the balancing loss.

    Raises:
        SpecError: transformers balances its experts by no loss or by another loss (tested on a few tokens), or ranks
            share sequences.
    """
    weight = balancing_weight(training, model.config)
    path, given = ("training", "router_aux_loss_coef"), f"{weight:g} for {model.config.model_type}"
    if weight and not _is_balanced_so(model):
        message = "this model has no experts that transformers balances by this loss"
        raise SpecError(Issue(message, path, given, allowed="0", hint="leave router_aux_loss_coef out"))
    if weight and training.sequence_parallel_size > 1:
        message = "the load of experts cannot be balanced if ranks share sequences"
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
    """Returns the modules that choose the experts of a token, in the order of the layers."""
    return [module for module in model.modules() if type(module).__name__.endswith("Router")]


@contextmanager
def choices_taken(model: nn.Module) -> Iterator[list[Tensor]]:
    """Records the experts that each router chooses within the block, by appending [tokens, experts per token] per call
    of a router."""
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
    """Returns the experts in a router's output. Raises StopIteration if the output has none."""
    return next(each for each in output if each.dtype == torch.int64)


def pop_choices(taken: list[Tensor]) -> "np.ndarray[Any, np.dtype[np.int16]]":
    """Returns the experts that one forward pass appended, and empties the list. [tokens, layers, experts per token]"""
    choices = torch.stack(taken, dim=1).to(torch.int16).cpu().numpy()
    taken.clear()
    return choices


class ReplayedRouters:
    """The routers of a model. The experts of each token can be prescribed. The weights of the prescribed experts come
    from the router's own probabilities, so the router is trained as usual."""

    def __init__(self, model: nn.Module) -> None:
        self.given: list[Tensor] | None = None
        """Experts of each token of this pass, and of its recomputation, for each router. None means that the routers
        choose. [tokens, experts per token] each"""
        self._routers = routers_of(model)
        names = [name for name, module in model.named_modules() if module in self._routers]
        self._numbers = [int(next(filter(str.isdigit, name.split(".")), "0")) for name in names]
        """Layer index of each router. Layers without a router are counted too."""
        self._layers = int(getattr(getattr(model, "config", None), "num_hidden_layers", 0))
        for number, router in enumerate(self._routers):
            router.forward = partial(self._routed, number, router.forward)

    def give(self, experts: Tensor | None) -> None:
        """Makes the next pass, and its recomputation, route tokens to these experts.

        Args:
            experts: for each router, or for each layer as vLLM reports them; any integer type. None lets the routers
                choose. [tokens, routers or layers, experts per token]
        Raises:
            RuntimeError: the experts are those of other layers than the model's.
        """
        if experts is None:
            self.given = None
            return
        told = experts.shape[1]
        if told not in (len(self._routers), self._layers):
            raise RuntimeError(f"the sampler returned the experts of {told} layers; {len(self._routers)} have routers")
        columns = range(told) if told == len(self._routers) else self._numbers
        self.given = [experts[:, column].long() for column in columns]

    def _routed(self, router: int, forward: Any, *arguments: Any, **keywords: Any) -> Any:
        if self.given is None:
            return forward(*arguments, **keywords)
        with _GivenChoice(self.given[router]) as choice:
            output = forward(*arguments, **keywords)
        if choice.times != 1:
            raise RuntimeError(f"a router makes {choice.times} choices that could be the experts of a token")
        return output

    def replay(self, config: "PretrainedConfig") -> bool:
        """Returns whether all routers of the model accept prescribed experts and report them. Works on meta tensors
        too."""
        text = config.get_text_config()
        chosen = experts_per_token(text)
        if not chosen or not self._routers:
            return False
        weight = next(self._routers[0].parameters())
        self.give(torch.arange(chosen, device=weight.device).expand(3, len(self._routers), chosen))
        hidden = weight.new_zeros(3, text.hidden_size)
        try:
            told = [_told(router(hidden)) for router in self._routers]
        except Exception:  # it needs more than hidden states, reports no choice, or makes several
            return False
        finally:
            self.give(None)
        return all(each.shape == (3, chosen) for each in told)


class _GivenChoice(TorchFunctionMode):
    """Dispatch mode in which a `topk` over this many experts returns the prescribed ones."""

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
    """Checks that a model's routers can replay the sampler's choice.

    Raises:
        SpecError: the model has no experts, or chooses them in a way that cannot be replayed.
    """
    from rpg.pretrained import model_without_weights

    if not ReplayedRouters(model_without_weights(config)).replay(config):
        message = "this model has no experts whose choice can be replayed"
        path = ("rollout", "replay_routing")
        raise SpecError(Issue(message, path, f"true for {config.model_type}", hint="leave replay_routing out"))
