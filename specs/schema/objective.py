"""Objectives: a frozen class for each, distinguished by `type`. The defaults are the tested settings.

A new objective is a formula in a spec, or a class here that is in the union at the end, with an equation in
`rpg/objectives`.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import GetCoreSchemaHandler, model_validator
from pydantic_core import CoreSchema, core_schema

from specs.errors import Issue, IssueError
from specs.extensions import find_variant, is_offered
from specs.schema.base import addition
from specs.schema.base_objective import (
    Advantage,
    Aggregation,
    Baseline,
    BaseObjective,
    Claim,
    Direction,
    Divergence,
    KlEstimator,
    Level,
    PackagedObjective,
    RatioOver,
    Scale,
    SummedOver,
    Weight,
    direction_of,
)
from specs.schema.clip import (
    Clip,
    DualBound,
    DualClip,
    EqualMargins,
    HigherMargins,
    NoClip,
    ResponseMargins,
    TruncateClip,
    ValueClip,
)
from specs.schema.fields import literal_of, members
from specs.schema.formula import FormulaObjective, GradientClaim
from specs.schema.schedule import largest

__all__ = [
    "Advantage",
    "Aggregation",
    "BaseObjective",
    "Baseline",
    "Cispo",
    "ClippedPublishedObjective",
    "Direction",
    "Divergence",
    "DualClip",
    "FormulaObjective",
    "GradientClaim",
    "NoClip",
    "Objective",
    "PackagedObjective",
    "PublishedObjective",
    "RatioOver",
    "RegularizedObjective",
    "Scale",
    "SummedOver",
    "TruncateClip",
    "ValueClip",
]


class RegularizedObjective(BaseObjective):
    """Regularized policy gradient, arXiv:2505.17508: the expected reward minus a divergence from the reference
    policy."""

    published: ClassVar[dict[str, dict[str, Any]]] = {
        "advantage": {"baseline": "group_mean", "scale": "none"},
        "reference": {"source": "behaviour"},
    }

    type: Literal["rpg"] = "rpg"
    divergence: Divergence = "unnormalized_reverse"
    """Divergence between policy and reference. forward is KL(reference || policy), reverse KL(policy || reference),
    jensen_shannon the mean of both KLs to the mean of the two policies; it needs `kl: full` or `kl: top_k`."""
    estimator: Literal["reinforce", "differentiable"] = "reinforce"
    """reinforce: -SG(weight) log pi. differentiable: the surrogate itself, which is differentiated."""
    level: Literal["token", "to_go", "sequence"] = "token"
    """Scope of the importance ratio and the divergence. to_go: the ratio of a token, which is credited with the
    response's divergence from that token on."""
    kl: SummedOver = addition("sampled")
    """Tokens over which the divergence's gradient at a state is summed. sampled: the sampled token, weighted by its
    ratio. full: the whole vocabulary. top_k: the reference's `kl_top_k` most likely tokens; if the sampled token is not
    among them, it is added with its ratio as weight. full and top_k need `level: token` or `level: to_go`."""
    kl_top_k: int = addition(64, ge=1)
    """Number of the reference's most likely tokens that `kl: top_k` sums over."""
    kl_coef: Weight = 1e-4
    """Weight of the divergence."""
    clip: Clip = DualClip()
    aggregation: Aggregation = "token_mean"
    """How token losses become the loss of an update."""

    @model_validator(mode="after")
    def _sums(self) -> "RegularizedObjective":
        if self.kl != "sampled" and self.level == "sequence":
            hint = (
                "write `level: to_go`, which also has the gradient of the whole response's divergence, or `kl: sampled`"
            )
            message = f"`kl: {self.kl}` is summed at each state, but a whole response has one ratio"
            raise IssueError(Issue(message, ("kl",), f"{self.kl} with `level: sequence`", "sampled", hint))
        if self.kl == "sampled" and self.divergence == "jensen_shannon":
            hint = "write `kl: full` or `kl: top_k`, or take another divergence"
            allowed = "forward, reverse, unnormalized_forward, unnormalized_reverse or none, with `kl: sampled`"
            raise IssueError(
                Issue(
                    "jensen_shannon is a sum over the vocabulary: it needs `kl: full` or `kl: top_k`",
                    ("divergence",),
                    allowed=allowed,
                    hint=hint,
                )
            )
        return self

    @model_validator(mode="after")
    def _acts(self) -> "RegularizedObjective":
        if self.estimator == "reinforce":
            return self
        if isinstance(self.clip, TruncateClip):
            raise ValueError(
                "`clip.type: truncate` needs `estimator: reinforce`, because a clamped ratio has no gradient"
            )
        if isinstance(self.clip, ValueClip):
            raise ValueError("`clip.type: value` needs `estimator: reinforce`, because a clipped value has no gradient")
        if isinstance(self.clip, DualClip) and self.clip.branch == "regularized":
            if self.kl != "sampled":
                raise ValueError(
                    "`clip.branch: regularized` with `estimator: differentiable` needs `kl: sampled`, "
                    f"not `kl: {self.kl}`: a sum over tokens cannot be written as the ratio times an advantage"
                )
            if self.divergence in ("forward", "unnormalized_forward"):
                raise ValueError(
                    "`clip.branch: regularized` with `estimator: differentiable` needs a reverse divergence: "
                    "a forward one cannot be written as the ratio times an advantage"
                )
            if self.clip.keep_divergence:
                raise ValueError(
                    "`clip.keep_divergence` has no effect with `clip.branch: regularized` and "
                    "`estimator: differentiable`: the divergence is inside the clipped advantage"
                )
        return self

    @property
    def needs_reference(self) -> bool:
        """Whether the objective has a divergence."""
        return self.divergence != "none" and largest(self.kl_coef) > 0

    @property
    def summed_over(self) -> SummedOver:
        """The value of `kl`, if there is a divergence."""
        return self.kl if self.needs_reference else "sampled"

    @property
    def top_k(self) -> int:
        """The value of `kl_top_k`, with kl top_k."""
        return self.kl_top_k if self.kl == "top_k" else 0

    @property
    def ratio_over(self) -> RatioOver:
        """Scope of the ratio, from `level`."""
        return "token" if self.level == "to_go" else self.level

    @property
    def exact(self) -> Claim:
        """When the claim holds. Off policy, a clip biases the gradient, and so do the sampling policy's prefixes if the
        divergence is that of the whole response."""
        return "always" if isinstance(self.clip, NoClip) and self.level != "to_go" else "on_policy"

    @property
    def claim_level(self) -> Level:
        """Level of the claim. to_go claims the divergence of the whole response."""
        return "token" if self.level == "token" else "sequence"

    @property
    def claim_divergence(self) -> Direction:
        """Direction of the claim. An unnormalized divergence has the expected gradient of the normalized one."""
        return direction_of(self.divergence)


class PublishedObjective(BaseObjective):
    """An objective for comparison with RPG, with its published defaults. All share a penalty on the divergence
    KL(policy || reference), estimated from the sampled token."""

    published: ClassVar[dict[str, dict[str, Any]]] = {
        "advantage": {"baseline": "group_mean", "scale": "group_std"},
        "reference": {"source": "behaviour"},
    }
    kl_credit: ClassVar[Literal["response", "to_go"]] = "response"
    """Penalty that a token is credited with under kl_in reward: that of its whole response, or of itself and later
    tokens."""

    kl_coef: Weight = 0.0
    """Weight of the divergence. 0 disables it, and no reference policy is kept."""
    kl_estimator: KlEstimator = "k3"
    """k1: log r; k2: half of log r squared; k3: 1/r - 1 + log r; r = policy / reference. Exact gradients in the loss:
    k2 on policy, k1 and k3 with kl_weighted; in the reward: k1."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Place of the penalty: the loss of each token, or its reward at sampling time."""
    kl_weighted: bool = False
    """Whether the penalty in the loss is multiplied by the importance ratio of its token."""
    aggregation: Aggregation = "token_mean"
    """How token losses become the loss of an update."""

    @model_validator(mode="after")
    def _acts(self) -> "PublishedObjective":
        if self.kl_weighted and self.kl_in == "reward":
            raise ValueError(
                "`kl_weighted` has no effect with `kl_in: reward`: a reward is a number, not part of the loss"
            )
        return self

    @property
    def needs_reference(self) -> bool:
        """Whether the objective has a penalty."""
        return largest(self.kl_coef) > 0

    @property
    def penalizes_reward(self) -> bool:
        """Whether the objective has a penalty in the reward."""
        return self.kl_in == "reward" and largest(self.kl_coef) > 0

    @property
    def penalizes_loss(self) -> bool:
        """Whether the objective has a penalty in the loss."""
        return self.kl_in == "loss" and largest(self.kl_coef) > 0

    @property
    def exact(self) -> Claim:
        """When the claim holds: at most on policy, because the ratio is clipped. With a penalty, only if its estimator
        has the divergence's gradient."""
        if largest(self.kl_coef) == 0:
            return "on_policy"
        if self.kl_in == "reward":
            return "on_policy" if self.kl_estimator == "k1" else "never"
        return "on_policy" if self.kl_weighted == (self.kl_estimator != "k2") else "never"

    @property
    def claim_level(self) -> Level:
        """Level of the claim. A penalty in the reward also charges a token for later tokens; a penalty in the loss does
        not."""
        return "sequence" if self.kl_in == "reward" else "token"


class ClippedPublishedObjective(PublishedObjective):
    """A published objective with PPO's clip."""

    clip: EqualMargins = EqualMargins()


class Ppo(ClippedPublishedObjective):
    """PPO's clipped surrogate without a critic, arXiv:1707.06347."""

    published: ClassVar[dict[str, dict[str, Any]]] = {
        "advantage": {"baseline": "batch_mean", "scale": "batch_std"},
        "reference": {"source": "behaviour"},
    }

    type: Literal["ppo"] = "ppo"


class Grpo(ClippedPublishedObjective):
    """Group relative policy optimization, arXiv:2402.03300: k3 in the loss without importance weight; the loss is the
    mean of the responses' token means.

    With kl_weighted the penalty's gradient is that of the divergence it names.
    """

    published: ClassVar[dict[str, dict[str, Any]]] = {
        "advantage": {"baseline": "group_mean", "scale": "group_std"},
        "reference": {"source": "initial"},
    }
    certified: ClassVar[tuple[dict[str, Any], ...]] = ({}, {"kl_weighted": True})

    type: Literal["grpo"] = "grpo"
    kl_coef: Weight = 0.04
    """Weight of the divergence. 0 disables it, and no reference policy is kept."""
    aggregation: Aggregation = "sequence_mean"
    """How token losses become the loss of an update."""


class Dapo(ClippedPublishedObjective):
    """DAPO's loss, arXiv:2503.14476: clip-higher, token mean, no divergence."""

    type: Literal["dapo"] = "dapo"
    clip: HigherMargins = HigherMargins()


class DrGrpo(ClippedPublishedObjective):
    """GRPO done right, arXiv:2503.20783: no division by the group's deviation nor by the response's length."""

    published: ClassVar[dict[str, dict[str, Any]]] = {
        "advantage": {"baseline": "group_mean", "scale": "none"},
        "reference": {"source": "behaviour"},
    }

    type: Literal["dr_grpo"] = "dr_grpo"
    aggregation: Aggregation = "fixed_length"
    """How token losses become the loss of an update."""


class Gspo(ClippedPublishedObjective):
    """Group sequence policy optimization, arXiv:2507.18071: the ratio is the geometric mean over the response."""

    type: Literal["gspo"] = "gspo"
    clip: ResponseMargins = ResponseMargins()
    aggregation: Aggregation = "sequence_mean"
    """How token losses become the loss of an update."""

    @property
    def ratio_over(self) -> RatioOver:
        """The geometric mean of the response's ratios."""
        return "geometric_mean"


class Cispo(PublishedObjective):
    """CISPO, arXiv:2506.13585: REINFORCE with the ratio clamped at a bound; no token is dropped. Bound of
    arXiv:2510.13786."""

    type: Literal["cispo"] = "cispo"
    max_ratio: DualBound = 5.0
    """Bound on the ratio. It is a value, not a margin (TRL's epsilon_high with its loss type cispo)."""


class Rloo(ClippedPublishedObjective):
    """REINFORCE leave-one-out, arXiv:2402.14740, with TRL's clip of the whole response's ratio; k1 in the reward."""

    published: ClassVar[dict[str, dict[str, Any]]] = {
        "advantage": {"baseline": "leave_one_out", "scale": "none"},
        "reference": {"source": "initial"},
    }

    type: Literal["rloo"] = "rloo"
    kl_coef: Weight = 0.05
    """Weight of the divergence. 0 disables it, and no reference policy is kept."""
    kl_estimator: KlEstimator = "k1"
    """k1: log r; k2: half of log r squared; k3: 1/r - 1 + log r; r = policy / reference. Exact gradients: k1."""
    kl_in: Literal["loss", "reward"] = "reward"
    """Place of the penalty: the loss of each token, or its reward at sampling time."""
    aggregation: Aggregation = "sequence_sum"
    """How token losses become the loss of an update."""

    @property
    def ratio_over(self) -> RatioOver:
        """The whole response's ratio."""
        return "sequence"


class ReinforcePlusPlus(ClippedPublishedObjective):
    """REINFORCE++, arXiv:2501.03262: k1 in the reward of each token, advantages whitened over the batch's tokens."""

    published: ClassVar[dict[str, dict[str, Any]]] = {
        "advantage": {"baseline": "none", "scale": "none", "whiten": "tokens"},
        "reference": {"source": "initial"},
    }
    kl_credit: ClassVar[Literal["response", "to_go"]] = "to_go"

    type: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    kl_coef: Weight = 0.01
    """Weight of the divergence. 0 disables it, and no reference policy is kept."""
    kl_estimator: KlEstimator = "k1"
    """k1: log r; k2: half of log r squared; k3: 1/r - 1 + log r; r = policy / reference. Exact gradients: k1."""
    kl_in: Literal["loss", "reward"] = "reward"
    """Place of the penalty: the loss of each token, or its reward at sampling time."""


class ReinforcePlusPlusBaseline(ClippedPublishedObjective):
    """REINFORCE++ with the group mean as baseline, arXiv:2501.03262: k2 in the loss, advantages whitened over the
    batch's tokens."""

    published: ClassVar[dict[str, dict[str, Any]]] = {
        "advantage": {"baseline": "group_mean", "scale": "none", "whiten": "tokens"},
        "reference": {"source": "initial"},
    }

    type: Literal["reinforce_plus_plus_baseline"] = "reinforce_plus_plus_baseline"
    kl_coef: Weight = 1e-3
    """Weight of the divergence. 0 disables it, and no reference policy is kept."""
    kl_estimator: KlEstimator = "k2"
    """k1: log r; k2: half of log r squared; k3: 1/r - 1 + log r; r = policy / reference. Exact gradients in the loss:
    k2 on policy, k1 and k3 with kl_weighted; in the reward: k1."""


class _OrPackaged:
    """Validation that lets a union of objectives accept those of installed packages, by their `type`."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        ours = {
            name: handler.generate_schema(kind)
            for kind in members(source)
            for name in literal_of(kind.model_fields["type"])
        }

        def read(value: Any, ours: Callable[[Any], Any]) -> Any:
            named = value.get("type") if isinstance(value, Mapping) else None
            is_ours = not isinstance(named, str) or named in known or not is_offered(PackagedObjective, named)
            if isinstance(value, PackagedObjective) or is_ours:
                return value if isinstance(value, PackagedObjective) else ours(value)
            return find_variant(PackagedObjective, named).model_validate(value)

        known = set(ours)
        by_own_fields = core_schema.simple_ser_schema("any")
        union = core_schema.tagged_union_schema(ours, "type")
        return core_schema.no_info_wrap_validator_function(read, union, serialization=by_own_fields)


Objective = Annotated[
    RegularizedObjective
    | FormulaObjective
    | Ppo
    | Grpo
    | Dapo
    | DrGrpo
    | Gspo
    | Cispo
    | Rloo
    | ReinforcePlusPlus
    | ReinforcePlusPlusBaseline
    | PackagedObjective,
    _OrPackaged(),
]
