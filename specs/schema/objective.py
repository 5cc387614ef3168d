"""What is optimised: one frozen class per objective, joined by `type`. Class defaults are the vetted setting."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from specs.schema.base import Spec

Divergence = Literal["forward", "reverse", "unnormalized_forward", "unnormalized_reverse", "none"]
Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum", "fixed_length"]


class NoClip(Spec):
    """Every token keeps its gradient."""

    type: Literal["none"] = "none"


class DualClip(Spec):
    """RPG-Style Clip with the REINFORCE estimator, PPO's dual clip on the reward part with the differentiable one. Margins, not bounds."""

    type: Literal["dual"] = "dual"
    low: float = Field(0.2, gt=0, lt=1)
    """Margin below ratio 1: with a negative advantage a token stops counting under 1 - low."""
    high: float = Field(0.28, gt=0)
    """Margin above ratio 1: with a positive advantage a token stops counting from 1 + high."""
    dual: float = Field(10.0, gt=1)
    """Bound on the ratio when the advantage is negative."""


Clip = Annotated[NoClip | DualClip, Field(discriminator="type")]


class RegularizedObjective(Spec):
    """Regularized policy gradient, arXiv:2505.17508: expected reward minus a divergence from the reference policy."""

    published: ClassVar[dict[str, dict[str, Any]]] = {
        "advantage": {"baseline": "group_mean", "scale": "none"},
        "reference": {"source": "behaviour"},
    }

    type: Literal["rpg"] = "rpg"
    divergence: Divergence = "unnormalized_reverse"
    """Between the policy and the reference; forward is KL(reference || policy), reverse KL(policy || reference)."""
    estimator: Literal["reinforce", "differentiable"] = "reinforce"
    """reinforce: -SG(weight) log pi; differentiable: the surrogate itself."""
    level: Literal["token", "sequence"] = "token"
    """What the importance ratio and the divergence are taken over."""
    kl_coef: float = Field(1e-4, ge=0)
    """Weight of the divergence."""
    clip: Clip = DualClip()
    aggregation: Aggregation = "token_mean"
    """How token losses become the loss of an update."""


Objective = RegularizedObjective
