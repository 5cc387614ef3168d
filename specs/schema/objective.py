"""What is optimised: one frozen class per objective, joined by `type`. Class defaults are the vetted setting."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from specs.schema.base import Spec
from specs.schema.clip import Clip, DualClip, NoClip, TruncateClip
from specs.schema.rivals import (
    Aggregation,
    Cispo,
    Claim,
    Dapo,
    DrGrpo,
    Grpo,
    Gspo,
    Level,
    Ppo,
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
    Rival,
    Rloo,
)


class Advantage(Spec):
    """Reward minus a baseline, divided by a scale, perhaps whitened."""

    baseline: Literal["group_mean", "leave_one_out", "batch_mean", "none"] = "group_mean"
    """group: the responses to one prompt; leave_one_out: the group's other responses; batch: a step's rollouts."""
    scale: Literal["none", "group_std", "batch_std"] = "none"
    """Divide by the standard deviation (ddof 1) plus 1e-4."""
    whiten: Literal["none", "tokens"] = "none"
    """tokens: afterwards to mean 0 and variance 1 over all response tokens of the step, as REINFORCE++ does."""


__all__ = [
    "Aggregation",
    "Claim",
    "Clip",
    "Divergence",
    "DualClip",
    "Level",
    "NoClip",
    "Objective",
    "RegularizedObjective",
    "Rival",
    "TruncateClip",
]

Divergence = Literal["forward", "reverse", "unnormalized_forward", "unnormalized_reverse", "none"]


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
    level: Level = "token"
    """What the importance ratio and the divergence are taken over."""
    kl_coef: float = Field(1e-4, ge=0)
    """Weight of the divergence."""
    clip: Clip = DualClip()
    aggregation: Aggregation = "token_mean"
    """How token losses become the loss of an update."""

    @model_validator(mode="after")
    def _acts(self) -> "RegularizedObjective":
        if self.estimator == "reinforce":
            return self
        if isinstance(self.clip, TruncateClip):
            raise ValueError("clip type truncate needs estimator reinforce: a clamped ratio has no gradient to follow")
        if isinstance(self.clip, DualClip) and self.clip.branch == "regularized":
            if self.divergence in ("forward", "unnormalized_forward"):
                raise ValueError(
                    "clip branch regularized with estimator differentiable needs a reverse divergence: "
                    "a forward one is no part of the ratio times an advantage"
                )
            if self.clip.keep_divergence:
                raise ValueError(
                    "clip keep_divergence cannot act with branch regularized and estimator differentiable: "
                    "the divergence is inside the clipped advantage"
                )
        return self

    @property
    def needs_reference(self) -> bool:
        """Whether the reference policy's logprobs enter the loss."""
        return self.divergence != "none" and self.kl_coef > 0

    @property
    def claim(self) -> Claim:
        """When the expected gradient is exactly the objective's."""
        return "always" if isinstance(self.clip, NoClip) else "on_policy"

    @property
    def claim_level(self) -> Level:
        """Whose divergence the claim is about."""
        return self.level


Objective = Annotated[
    RegularizedObjective
    | Ppo
    | Grpo
    | Dapo
    | DrGrpo
    | Gspo
    | Cispo
    | Rloo
    | ReinforcePlusPlus
    | ReinforcePlusPlusBaseline,
    Field(discriminator="type"),
]
