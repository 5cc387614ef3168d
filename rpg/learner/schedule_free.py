"""Schedule-Free AdamW: an average of the iterates replaces the decay of the learning rate.

The package `schedulefree` cannot be used, although its arithmetic is the same (a test compares the two). It counts
updates in the parameter groups and finds its parameters there. DeepSpeed's ZeRO 3 lends a group one shard at a time and
leaves it empty between updates, so the count runs ahead and switching the weights silently does nothing.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class ScheduleFreeAdamW(torch.optim.Optimizer):
    """Defazio 2024, arXiv:2405.15682, Algorithm 1. For a gradient g taken at y, with v Adam's second moment of g:

        d = g / (sqrt(v / (1 - b2^t)) + epsilon) + weight_decay * y
        z <- z - lr d          x <- (1 - c) x + c z          y <- (1 - b1) z + b1 x

    where c = m^2 / sum m^2 over the updates so far and m is the highest rate so far, so that updates of a warm-up have
    less weight. x is the policy: it samples and is evaluated, exported and saved. The gradient is computed at y. The
    parameters hold either x or y and the state holds z; together they determine the other. Switching costs one
    rounding.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        """
        Args:
            lr: learning rate. The caller raises it in `param_groups` during a warm-up and never lowers it.
            betas: share of x in y, in (0, 1); decay of the second moment.
            eps: added to the root of the second moment.
            weight_decay: decoupled, at y.
        """
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._averaged = True
        """Whether the parameters hold x."""

    def use_average(self) -> None:
        """Sets the parameters to x."""
        self._switch(averaged=True)

    def use_gradient_point(self) -> None:
        """Sets the parameters to y."""
        self._switch(averaged=False)

    @torch.no_grad()
    def _switch(self, *, averaged: bool) -> None:
        if averaged == self._averaged:
            return
        beta = self.defaults["betas"][0]
        for parameter, state in self.state.items():
            parameter.lerp_(state["z"].to(parameter.device), 1 - 1 / beta if averaged else 1 - beta)
        self._averaged = averaged

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Updates the parameters that have a gradient, and overwrites the gradient.

        Raises:
            RuntimeError: the parameters are x, at which no gradient may be computed.
        """
        if closure is not None or self._averaged:
            raise RuntimeError("a step needs gradients that were taken before it, after use_gradient_point()")
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    _update(parameter, parameter.grad, self.state[parameter], group)


def _update(y: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    if not state:
        # Each parameter has its own counts and sums. They are plain numbers, which a checkpoint stores exactly.
        state.update(step=0, weight_sum=0.0, highest_rate=0.0, z=y.clone(), exp_avg_sq=torch.zeros_like(y))
    beta_average, beta_square = group["betas"]
    rate, z, square = group["lr"], state["z"], state["exp_avg_sq"]
    state["step"] += 1
    state["highest_rate"] = max(state["highest_rate"], rate)
    weight = state["highest_rate"] ** 2
    state["weight_sum"] += weight
    share = weight / state["weight_sum"]
    square.mul_(beta_square).addcmul_(gradient, gradient, value=1 - beta_square)
    root = (square / (1 - beta_square ** state["step"])).sqrt_().add_(group["eps"])
    direction = gradient.div_(root).add_(y, alpha=group["weight_decay"])
    # computes y's new value from its old one and the old z, without forming x.
    y.lerp_(z, share).add_(direction, alpha=rate * (beta_average * (1 - share) - 1))
    z.sub_(direction, alpha=rate)
