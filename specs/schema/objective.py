"""Objectives: one frozen class each, joined by `type`. Class defaults are the vetted setting.

A new objective is a formula in a spec, or a class here, named in the union at the end, and an equation in
`rpg/objectives`.
"""

import keyword
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Discriminator, Field, Tag, ValidationError, model_validator
from pydantic_core import InitErrorDetails

from specs.errors import Issue, IssueError
from specs.schema.base import Spec, addition
from specs.schema.clip import (
    Clip,
    DualClip,
    EqualMargins,
    HigherMargins,
    NoClip,
    ResponseMargins,
    TruncateClip,
    ValueClip,
)
from specs.schema.formula import FUNCTIONS, SYMBOLS, FormulaError, Node, parse_formula
from specs.schema.schedule import Schedulable, ValueSchedule, constant, largest, smallest

__all__ = [
    "Advantage",
    "Aggregation",
    "BaseObjective",
    "Cispo",
    "ClippedPublishedObjective",
    "Divergence",
    "DualClip",
    "FormulaObjective",
    "GradientClaim",
    "NoClip",
    "Objective",
    "PublishedObjective",
    "RegularizedObjective",
    "TruncateClip",
    "ValueClip",
]

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum", "fixed_length"]
Divergence = Literal["forward", "reverse", "unnormalized_forward", "unnormalized_reverse", "none"]
Level = Literal["token", "sequence"]
Baseline = Literal["group_mean", "leave_one_out", "batch_mean", "none"]
Scale = Literal["none", "group_std", "batch_std"]
KlEstimator = Literal["k1", "k2", "k3"]
RatioOver = Literal["token", "sequence", "geometric_mean"]
"""What an importance ratio is of: a token; a whole response; the geometric mean of a response's tokens."""
Weight = Annotated[float | ValueSchedule, Schedulable(ge=0)]
Parameter = Annotated[float | ValueSchedule, Schedulable()]
Claim = Literal["always", "on_policy", "never"]
"""When the expected gradient is exactly that of the objective named: always; where the policy is the sampler; never."""


class Advantage(Spec):
    """Reward minus a baseline, divided by a scale, perhaps whitened."""

    baseline: Baseline = "group_mean"
    """group: the responses to one prompt; leave_one_out: the group's other responses; batch: a step's rollouts."""
    scale: Scale = "none"
    """Divide by the standard deviation (ddof 1) plus 1e-4."""
    whiten: Literal["none", "tokens"] = "none"
    """tokens: afterwards to mean 0 and variance 1 over all response tokens of the step, as REINFORCE++ does."""
    rewards: Literal["summed", "normalized_each"] = addition("summed")
    """Terms of a weighted_sum: added up as they are, or each first brought to mean 0 and deviation 1 (ddof 1, plus
    1e-4) within its group, so that no term drowns another. Baseline and scale are then taken of the sum. GDPO,
    arXiv:2601.05242: normalized_each, with baseline batch_mean and scale batch_std, as TRL has it; with baseline and
    scale none and whiten tokens, as its authors' code has it."""

    credit: Literal["outcome", "turn"] = addition("outcome")
    """What a turn of the policy answers for. outcome: the reward of the whole response, with the rewards of its turns.
    turn: its return, that is its own reward, those of the turns after it and the reward of the response; baseline and
    scale are taken over the returns from the same turn on, where a response that has ended counts by its last. With
    leave_one_out both have the same expected gradient on policy; with group_mean both have 1 - 1/G of it, G being the
    size of a group."""


class BaseObjective(Spec):
    """Questions that training, certificates and checks ask of every objective."""

    published: ClassVar[dict[str, dict[str, Any]]]
    """The `advantage` and `reference` it was published with; a spec that leaves them out gets these."""
    certified: ClassVar[tuple[dict[str, Any], ...]] = ({},)
    """The settings that `rpg certify` lists: each names the fields that are not at their default."""

    @property
    @abstractmethod
    def needs_reference(self) -> bool:
        """Whether the reference policy's logprobs enter the loss or the reward."""

    @property
    def penalizes_reward(self) -> bool:
        """Whether the divergence is taken off the reward, so that advantages depend on old and reference logprobs."""
        return False

    @property
    def ratio_over(self) -> RatioOver:
        """Unit of the importance ratio."""
        return "token"

    @property
    def symbols(self) -> frozenset[str]:
        """Symbols that it reads as a formula; none of an objective that is none."""
        return frozenset()

    @property
    def without_advantage(self) -> bool:
        """Whether responses with an advantage of 0 have a gradient."""
        return self.needs_reference

    @property
    def claims_divergence(self) -> bool:
        """Whether a divergence is part of what its gradient is said to be of."""
        return self.needs_reference

    @property
    def claimed_kl_coef(self) -> float:
        """Weight of that divergence."""
        return constant(getattr(self, "kl_coef", 0.0))

    def with_kl_coef(self, kl_coef: float) -> Self:
        """The objective with another weight of its divergence."""
        return self.model_copy(update={"kl_coef": kl_coef})

    @property
    @abstractmethod
    def exact(self) -> Claim:
        """When the expected gradient is said to be exactly that of the expected reward less the divergence."""

    @property
    @abstractmethod
    def claim_level(self) -> Level:
        """Whether that divergence is of each token or of the whole response."""

    @property
    def claim_divergence(self) -> Literal["reverse", "forward"]:
        """Its direction: reverse is KL(policy || reference), forward KL(reference || policy)."""
        return "reverse"


class RegularizedObjective(BaseObjective):
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
    kl_coef: Weight = 1e-4
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
        if isinstance(self.clip, ValueClip):
            raise ValueError("clip type value needs estimator reinforce: a clipped value has no gradient to follow")
        if isinstance(self.clip, DualClip) and self.clip.branch == "regularized":
            if self.divergence in ("forward", "unnormalized_forward"):
                raise ValueError(
                    "clip branch regularized with estimator differentiable needs a reverse divergence: "
                    "a forward one cannot be written as the ratio times an advantage"
                )
            if self.clip.keep_divergence:
                raise ValueError(
                    "clip keep_divergence cannot act with branch regularized and estimator differentiable: "
                    "the divergence is inside the clipped advantage"
                )
        return self

    @property
    def needs_reference(self) -> bool:
        """Whether the objective has a divergence."""
        return self.divergence != "none" and largest(self.kl_coef) > 0

    @property
    def ratio_over(self) -> RatioOver:
        """Unit of the ratio, as `level` says."""
        return self.level

    @property
    def exact(self) -> Claim:
        """A clip biases the gradient as soon as the policy has left the sampler."""
        return "always" if isinstance(self.clip, NoClip) else "on_policy"

    @property
    def claim_level(self) -> Level:
        """Level of the claim, as `level` says."""
        return self.level

    @property
    def claim_divergence(self) -> Literal["reverse", "forward"]:
        """An unnormalized divergence has the expected gradient of the normalized one."""
        return "forward" if self.divergence in ("forward", "unnormalized_forward") else "reverse"


class PublishedObjective(BaseObjective):
    """An objective that RPG is compared with, its defaults as published. All share a penalty on the divergence
    KL(policy || reference), estimated from the sampled token."""

    published: ClassVar[dict[str, dict[str, Any]]] = {
        "advantage": {"baseline": "group_mean", "scale": "group_std"},
        "reference": {"source": "behaviour"},
    }
    kl_credit: ClassVar[Literal["response", "to_go"]] = "response"
    """Penalty that a token answers for with kl_in reward: its whole response's, or that of itself and what follows."""

    kl_coef: Weight = 0.0
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
    def _acts(self) -> "PublishedObjective":
        if self.kl_weighted and self.kl_in == "reward":
            raise ValueError("kl_weighted cannot act with kl_in reward: a reward is a number, not part of the loss")
        return self

    @property
    def needs_reference(self) -> bool:
        """Whether the objective has a penalty."""
        return largest(self.kl_coef) > 0

    @property
    def penalizes_reward(self) -> bool:
        """Whether the objective has a penalty, and in the reward."""
        return self.kl_in == "reward" and largest(self.kl_coef) > 0

    @property
    def penalizes_loss(self) -> bool:
        """Whether the objective has a penalty, and in the loss."""
        return self.kl_in == "loss" and largest(self.kl_coef) > 0

    @property
    def exact(self) -> Claim:
        """Exact on policy at most, since the ratio is clipped; with a penalty only where its estimator has the
        divergence's gradient."""
        if largest(self.kl_coef) == 0:
            return "on_policy"
        if self.kl_in == "reward":
            return "on_policy" if self.kl_estimator == "k1" else "never"
        return "on_policy" if self.kl_weighted == (self.kl_estimator != "k2") else "never"

    @property
    def claim_level(self) -> Level:
        """A penalty in the reward charges a token for what follows, one in the loss does not."""
        return "sequence" if self.kl_in == "reward" else "token"


class ClippedPublishedObjective(PublishedObjective):
    """A rival with PPO's clip."""

    clip: EqualMargins = EqualMargins()


class Ppo(ClippedPublishedObjective):
    """PPO's clipped surrogate without a critic, arXiv:1707.06347."""

    published: ClassVar[dict[str, dict[str, Any]]] = {
        "advantage": {"baseline": "batch_mean", "scale": "batch_std"},
        "reference": {"source": "behaviour"},
    }

    type: Literal["ppo"] = "ppo"


class Grpo(ClippedPublishedObjective):
    """Group relative policy optimization, arXiv:2402.03300: k3 in the loss without importance weight, token means
    averaged.

    With kl_weighted the penalty's gradient is that of the divergence it names.
    """

    published: ClassVar[dict[str, dict[str, Any]]] = {
        "advantage": {"baseline": "group_mean", "scale": "group_std"},
        "reference": {"source": "initial"},
    }
    certified: ClassVar[tuple[dict[str, Any], ...]] = ({}, {"kl_weighted": True})

    type: Literal["grpo"] = "grpo"
    kl_coef: Weight = 0.04
    """Weight of the divergence; 0: none, and no reference policy is held."""
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
    """CISPO, arXiv:2506.13585: REINFORCE with the ratio held at a bound, no token drops out. Bound of
    arXiv:2510.13786."""

    type: Literal["cispo"] = "cispo"
    max_ratio: float = Field(5.0, gt=1)
    """Bound on the ratio: a value, not a margin (TRL's epsilon_high with its loss type cispo)."""


class Rloo(ClippedPublishedObjective):
    """REINFORCE leave-one-out, arXiv:2402.14740, with TRL's clip of the whole response's ratio; k1 in the reward."""

    published: ClassVar[dict[str, dict[str, Any]]] = {
        "advantage": {"baseline": "leave_one_out", "scale": "none"},
        "reference": {"source": "initial"},
    }

    type: Literal["rloo"] = "rloo"
    kl_coef: Weight = 0.05
    """Weight of the divergence; 0: none, and no reference policy is held."""
    kl_estimator: KlEstimator = "k1"
    """k1: log r; k2: half of log r squared; k3: 1/r - 1 + log r; r = policy / reference. Exact gradients: k1."""
    kl_in: Literal["loss", "reward"] = "reward"
    """Where the penalty enters: the loss of each token, or its reward when it was sampled."""
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
    """Weight of the divergence; 0: none, and no reference policy is held."""
    kl_estimator: KlEstimator = "k1"
    """k1: log r; k2: half of log r squared; k3: 1/r - 1 + log r; r = policy / reference. Exact gradients: k1."""
    kl_in: Literal["loss", "reward"] = "reward"
    """Where the penalty enters: the loss of each token, or its reward when it was sampled."""


class ReinforcePlusPlusBaseline(ClippedPublishedObjective):
    """REINFORCE++ with the group mean as baseline, arXiv:2501.03262: k2 in the loss, advantages whitened over the
    batch's tokens."""

    published: ClassVar[dict[str, dict[str, Any]]] = {
        "advantage": {"baseline": "group_mean", "scale": "none", "whiten": "tokens"},
        "reference": {"source": "initial"},
    }

    type: Literal["reinforce_plus_plus_baseline"] = "reinforce_plus_plus_baseline"
    kl_coef: Weight = 1e-3
    """Weight of the divergence; 0: none, and no reference policy is held."""
    kl_estimator: KlEstimator = "k2"
    """k1: log r; k2: half of log r squared; k3: 1/r - 1 + log r; r = policy / reference. Exact gradients in the loss:
    k2 on policy, k1 and k3 with kl_weighted; in the reward: k1."""


class GradientClaim(Spec):
    """What the expected gradient of a formula is said to be: that of the expected reward less a divergence."""

    divergence: Divergence = "none"
    """From the reference policy; none: the gradient is that of the expected reward alone."""
    kl_coef: Annotated[float, Field(ge=0)] | str = 0.0
    """Weight of the divergence: a number, or the name of the parameter that is it."""
    exact: Literal["always", "on_policy"]
    """on_policy: while the policy is the one that sampled; always: off policy too."""

    @model_validator(mode="after")
    def _weighs(self) -> Self:
        if self.divergence == "none" and self.kl_coef != 0:
            raise IssueError(Issue("kl_coef has no effect", ("kl_coef",), f"{self.kl_coef}, with divergence none"))
        if self.divergence != "none" and self.kl_coef == 0:
            hint = "name the parameter that weighs it, or write its number"
            raise IssueError(Issue("the divergence has no weight", ("kl_coef",), "0", hint=hint))
        return self


ClaimOrNone = Annotated[
    Annotated[GradientClaim, Tag("exact")] | Annotated[Literal["none"], Tag("none")],
    Discriminator(lambda value: "exact" if isinstance(value, (Mapping, GradientClaim)) else "none"),
]


class FormulaObjective(BaseObjective):
    """An objective of your own, written as a formula: docs/objectives.md has its symbols. It is certified before it
    trains."""

    published: ClassVar[dict[str, dict[str, Any]]] = {
        "advantage": {"baseline": "group_mean", "scale": "none"},
        "reference": {"source": "behaviour"},
    }

    type: Literal["formula"] = "formula"
    level: Literal["token", "to_go", "sequence", "geometric_mean"] = "token"
    """What the symbols are of: a token, a whole response, or its geometric mean. to_go: a token too, and the divergence
    that is claimed is the whole response's."""
    parameters: dict[str, Parameter] = Field(default_factory=dict)
    """Numbers, or schedules, by the names that the formulas call them."""
    weight: str = ""
    """The weight m of the loss -SG(m) log pi. Either this or `loss`."""
    loss: str = ""
    """The loss of a token or of a whole response, which is differentiated as it is written."""
    clipped: str = ""
    """A condition: where the clip acts, for the metrics of clipping. Empty: nowhere."""
    claim: ClaimOrNone
    """What the gradient is said to be, which is enumerated before training and must be true; none: nothing."""
    aggregation: Aggregation = "token_mean"
    """How token losses become the loss of an update."""

    @model_validator(mode="after")
    def _readable(self) -> Self:
        if issues := [*self._issues()]:
            errors = [
                InitErrorDetails(type="value_error", loc=(), input=issue.given, ctx={"error": IssueError(issue)})
                for issue in issues
            ]
            raise ValidationError.from_exception_data("formula", errors)
        return self

    def _issues(self) -> Iterator[Issue]:
        for name in self.parameters:
            if not name.isascii() or not name.isidentifier() or keyword.iskeyword(name):
                yield Issue("not a name", ("parameters", name), name, "letters, digits and _, a letter first")
            elif name in SYMBOLS or name in FUNCTIONS:
                yield Issue("the name is taken by a symbol or a function", ("parameters", name), name)
        if bool(self.weight) == bool(self.loss):
            given = "both" if self.weight else "neither"
            hint = "weight is the m of the loss -SG(m) log pi; loss is differentiated as it is written"
            yield Issue("give either weight or loss", ("weight",) if self.weight else (), given, hint=hint)
        for key in ("weight", "loss", "clipped"):
            try:
                self.tree(key)
            except FormulaError as error:
                yield replace(error.issue, path=(key,))
        weighing = 0.0 if self.claim == "none" else self.claim.kl_coef
        if isinstance(weighing, str):
            if weighing not in self.parameters:
                known = ", ".join(self.parameters) or "a number: there are no parameters"
                yield Issue("no such parameter", ("claim", "kl_coef"), weighing, known)
            elif smallest(self.parameters[weighing]) < 0:
                yield Issue(
                    "must be at least 0", ("parameters", weighing), hint="it weighs the divergence of the claim"
                )

    def tree(self, key: Literal["weight", "loss", "clipped"]) -> Node | None:
        """The formula under a key; None where there is none."""
        text = getattr(self, key)
        of_responses = self.level in ("sequence", "geometric_mean")
        return (
            parse_formula(text, (*self.parameters,), condition=key == "clipped", of_responses=of_responses)
            if text
            else None
        )

    @property
    def symbols(self) -> frozenset[str]:
        """Symbols that occur in its formulas."""
        return frozenset(name for name in self.names() if name in SYMBOLS)

    def names(self) -> Iterator[str]:
        """Symbols and parameters that occur in its formulas, as often as they do."""
        for tree in (self.tree("weight"), self.tree("loss"), self.tree("clipped")):
            yield from tree.names() if tree else ()

    @property
    def needs_reference(self) -> bool:
        """Whether a formula reads r or q."""
        return bool(self.symbols & {"r", "q"})

    @property
    def without_advantage(self) -> bool:
        """Nothing keeps a formula from having a gradient where A is 0."""
        return True

    @property
    def ratio_over(self) -> RatioOver:
        """Unit of the symbols."""
        return "token" if self.level == "to_go" else self.level

    @property
    def exact(self) -> Claim:
        """Returns what `claim` says; never where it is none."""
        return "never" if self.claim == "none" else self.claim.exact

    @property
    def claim_level(self) -> Level:
        """The divergence of each token at level token, else that of the whole response."""
        return "token" if self.level == "token" else "sequence"

    @property
    def claims_divergence(self) -> bool:
        """Whether `claim` names a divergence."""
        return self.claim != "none" and self.claim.divergence != "none"

    @property
    def claim_divergence(self) -> Literal["reverse", "forward"]:
        """Direction of the divergence that `claim` names."""
        return "forward" if self.claim != "none" and "forward" in self.claim.divergence else "reverse"

    @property
    def claimed_kl_coef(self) -> float:
        """Weight of the divergence that `claim` names."""
        weight = 0.0 if self.claim == "none" else self.claim.kl_coef
        return constant(self.parameters[weight]) if isinstance(weight, str) else weight

    def with_kl_coef(self, kl_coef: float) -> Self:
        """The objective with another value of the parameter that weighs the divergence; itself where there is none."""
        if self.claim == "none" or not isinstance(name := self.claim.kl_coef, str):
            return self
        return self.model_copy(update={"parameters": {**self.parameters, name: kl_coef}})


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
    | ReinforcePlusPlusBaseline,
    Field(discriminator="type"),
]
