"""The objectives that regularized policy gradient is compared with. Defaults are as published."""

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from specs.schema.base import Spec
from specs.schema.clip import EqualMargins, HigherMargins, ResponseMargins

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum", "fixed_length"]
Level = Literal["token", "sequence"]
KlEstimator = Literal["k1", "k2", "k3"]
Claim = Literal["always", "on_policy", "never"]
"""When the expected gradient is exactly that of the objective named: always; where the policy is the sampler; never."""


class Rival(Spec):
    """What they share: a penalty on the divergence KL(policy || reference), estimated from the sampled token."""

    published: ClassVar[dict[str, dict[str, Any]]] = {
        "advantage": {"baseline": "group_mean", "scale": "group_std"},
        "reference": {"source": "behaviour"},
    }
    ratio_level: ClassVar[Level] = "token"
    kl_credit: ClassVar[Literal["response", "to_go"]] = "response"
    """With kl_in reward: what a token answers for, its whole response's penalty or that of itself and what follows."""

    kl_coef: float = Field(0.0, ge=0)
    """Weight of the divergence; 0: none, and no reference policy is held."""
    kl_estimator: KlEstimator = "k3"
    """k1: log r; k2: half of log r squared; k3: 1/r - 1 + log r; r = policy / reference. Exact gradients in the loss:
    k2 on policy, k1 and k3 with kl_weighted; in the reward: k1."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the penalty enters: the loss of each token, or its reward when it was sampled."""
    kl_weighted: bool = False
    """Whether the penalty in the loss is multiplied by the importance ratio of its token."""
    aggregation: Aggregation = "token_mean"
    """How token losses become the loss of an update."""

    @model_validator(mode="after")
    def _acts(self) -> "Rival":
        if self.kl_weighted and self.kl_in == "reward":
            raise ValueError("kl_weighted cannot act with kl_in reward: a reward is a number, not part of the loss")
        return self

    @property
    def needs_reference(self) -> bool:
        """Whether the reference policy's logprobs enter the loss or the reward."""
        return self.kl_coef > 0

    @property
    def penalizes_reward(self) -> bool:
        """Whether the divergence is taken off the reward, so that advantages depend on logprobs."""
        return self.kl_in == "reward" and self.kl_coef > 0

    @property
    def claim(self) -> Claim:
        """When the expected gradient is exactly the objective's."""
        if self.kl_coef == 0:
            return "on_policy"
        if self.kl_in == "reward":
            return "on_policy" if self.kl_estimator == "k1" else "never"
        return "on_policy" if self.kl_weighted == (self.kl_estimator != "k2") else "never"

    @property
    def claim_level(self) -> Level:
        """Whose divergence the claim is about."""
        return "sequence" if self.kl_in == "reward" else "token"


class ClippedRival(Rival):
    """A rival with PPO's clip."""

    clip: EqualMargins = EqualMargins()


class Ppo(ClippedRival):
    """PPO's clipped surrogate without a critic, arXiv:1707.06347."""

    published: ClassVar[dict[str, dict[str, Any]]] = {
        "advantage": {"baseline": "batch_mean", "scale": "batch_std"},
        "reference": {"source": "behaviour"},
    }

    type: Literal["ppo"] = "ppo"


class Grpo(ClippedRival):
    """Group relative policy optimization, arXiv:2402.03300: k3 in the loss without importance weight, token means
    averaged.

    With kl_weighted the penalty's gradient is that of the divergence it names.
    """

    published: ClassVar[dict[str, dict[str, Any]]] = {
        "advantage": {"baseline": "group_mean", "scale": "group_std"},
        "reference": {"source": "initial"},
    }

    type: Literal["grpo"] = "grpo"
    kl_coef: float = Field(0.04, ge=0)
    """Weight of the divergence; 0: none, and no reference policy is held."""
    aggregation: Aggregation = "sequence_mean"
    """How token losses become the loss of an update."""


class Dapo(ClippedRival):
    """DAPO's loss, arXiv:2503.14476: clip-higher, token mean, no divergence."""

    type: Literal["dapo"] = "dapo"
    clip: HigherMargins = HigherMargins()


class DrGrpo(ClippedRival):
    """GRPO done right, arXiv:2503.20783: no division by the group's deviation nor by the response's length."""

    published: ClassVar[dict[str, dict[str, Any]]] = {
        "advantage": {"baseline": "group_mean", "scale": "none"},
        "reference": {"source": "behaviour"},
    }

    type: Literal["dr_grpo"] = "dr_grpo"
    aggregation: Aggregation = "fixed_length"
    """How token losses become the loss of an update."""


class Gspo(ClippedRival):
    """Group sequence policy optimization, arXiv:2507.18071: the ratio is the geometric mean over the response."""

    ratio_level: ClassVar[Level] = "sequence"

    type: Literal["gspo"] = "gspo"
    clip: ResponseMargins = ResponseMargins()
    aggregation: Aggregation = "sequence_mean"
    """How token losses become the loss of an update."""


class Cispo(Rival):
    """CISPO, arXiv:2506.13585: REINFORCE with the ratio held at a bound, no token drops out. Bound of
    arXiv:2510.13786."""

    type: Literal["cispo"] = "cispo"
    max_ratio: float = Field(5.0, gt=1)
    """Bound on the ratio: a value, not a margin (TRL's epsilon_high with its loss type cispo)."""


class Rloo(ClippedRival):
    """REINFORCE leave-one-out, arXiv:2402.14740, with TRL's clip of the whole response's ratio; k1 in the reward."""

    published: ClassVar[dict[str, dict[str, Any]]] = {
        "advantage": {"baseline": "leave_one_out", "scale": "none"},
        "reference": {"source": "initial"},
    }
    ratio_level: ClassVar[Level] = "sequence"

    type: Literal["rloo"] = "rloo"
    kl_coef: float = Field(0.05, ge=0)
    """Weight of the divergence; 0: none, and no reference policy is held."""
    kl_estimator: KlEstimator = "k1"
    """k1: log r; k2: half of log r squared; k3: 1/r - 1 + log r; r = policy / reference. Exact gradients: k1."""
    kl_in: Literal["loss", "reward"] = "reward"
    """Where the penalty enters: the loss of each token, or its reward when it was sampled."""
    aggregation: Aggregation = "sequence_sum"
    """How token losses become the loss of an update."""


class ReinforcePlusPlus(ClippedRival):
    """REINFORCE++, arXiv:2501.03262: k1 in the reward of each token, advantages whitened over the batch's tokens."""

    published: ClassVar[dict[str, dict[str, Any]]] = {
        "advantage": {"baseline": "none", "scale": "none", "whiten": "tokens"},
        "reference": {"source": "initial"},
    }
    kl_credit: ClassVar[Literal["response", "to_go"]] = "to_go"

    type: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    kl_coef: float = Field(0.01, ge=0)
    """Weight of the divergence; 0: none, and no reference policy is held."""
    kl_estimator: KlEstimator = "k1"
    """k1: log r; k2: half of log r squared; k3: 1/r - 1 + log r; r = policy / reference. Exact gradients: k1."""
    kl_in: Literal["loss", "reward"] = "reward"
    """Where the penalty enters: the loss of each token, or its reward when it was sampled."""


class ReinforcePlusPlusBaseline(ClippedRival):
    """REINFORCE++ with the group mean as baseline, arXiv:2501.03262: k2 in the loss, advantages whitened over the
    batch's tokens."""

    published: ClassVar[dict[str, dict[str, Any]]] = {
        "advantage": {"baseline": "group_mean", "scale": "none", "whiten": "tokens"},
        "reference": {"source": "initial"},
    }

    type: Literal["reinforce_plus_plus_baseline"] = "reinforce_plus_plus_baseline"
    kl_coef: float = Field(1e-3, ge=0)
    """Weight of the divergence; 0: none, and no reference policy is held."""
    kl_estimator: KlEstimator = "k2"
    """k1: log r; k2: half of log r squared; k3: 1/r - 1 + log r; r = policy / reference. Exact gradients in the loss:
    k2 on policy, k1 and k3 with kl_weighted; in the reward: k1."""
