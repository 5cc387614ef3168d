"""Base classes of objectives, with the properties that training, certificates and checks need. Also the schema of
advantages."""

from abc import abstractmethod
from typing import Annotated, Any, ClassVar, Literal, Self, assert_never

from specs.schema.base import OpenSection, Spec, addition
from specs.schema.schedule import ClosedLoop, Schedulable, ValueSchedule, constant

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum", "fixed_length"]
Divergence = Literal["forward", "reverse", "unnormalized_forward", "unnormalized_reverse", "jensen_shannon", "none"]
Direction = Literal["reverse", "forward", "jensen_shannon"]
"""Kind of a divergence by its expected gradient. An unnormalized divergence has the gradient of the normalized one."""
SummedOver = Literal["sampled", "top_k", "full"]
Level = Literal["token", "sequence"]
Baseline = Literal["group_mean", "leave_one_out", "batch_mean", "none"]
Scale = Literal["none", "group_std", "batch_std", "group_mean"]
KlEstimator = Literal["k1", "k2", "k3"]
RatioOver = Literal["token", "sequence", "geometric_mean"]
"""Scope of an importance ratio: a token, a whole response, or a response's tokens as their geometric mean."""
Weight = Annotated[
    float | ValueSchedule | ClosedLoop,
    Schedulable(ge=0, of=("kl/reverse", "kl/forward", "drift/reverse", "drift/forward")),
]
Parameter = Annotated[float | ValueSchedule, Schedulable()]
Claim = Literal["always", "on_policy", "never"]
"""When the expected gradient equals that of the claimed function: always, only while the policy is the sampling policy,
or never."""


def direction_of(divergence: Divergence) -> Direction:
    """Returns a divergence without the word unnormalized; reverse for `none`."""
    match divergence:
        case "forward" | "unnormalized_forward":
            return "forward"
        case "jensen_shannon":
            return "jensen_shannon"
        case "reverse" | "unnormalized_reverse" | "none":
            return "reverse"
        case never:
            assert_never(never)


class Advantage(Spec):
    """Reward minus a baseline, divided by a scale and optionally whitened."""

    baseline: Baseline = "group_mean"
    """Mean reward that is subtracted. group_mean: over the responses to one prompt; leave_one_out: over the group's
    other responses; batch_mean: over a step's rollouts. none subtracts nothing."""
    scale: Scale = "none"
    """Divisor. group_std, batch_std: the standard deviation (ddof 1) plus 1e-4. group_mean: the mean of the group's
    rewards, which must be at least 0 (MaxRL, arXiv:2602.02710); a group whose mean is 0 has advantages of 0."""
    whiten: Literal["none", "tokens"] = "none"
    """tokens: the advantages are then normalised to mean 0 and variance 1 over all response tokens of the step, as in
    REINFORCE++."""
    rewards: Literal["summed", "normalized_each"] = addition("summed")
    """How the terms of a weighted_sum are added. summed: as they are. normalized_each: each term is first normalised to
    mean 0 and deviation 1 (ddof 1, plus 1e-4) within its group, so that no term dominates. Baseline and scale apply to
    the sum. GDPO, arXiv:2601.05242, is normalized_each: with baseline batch_mean and scale batch_std as in TRL; with
    baseline and scale none and whiten tokens as in its authors' code."""

    credit: Literal["outcome", "turn"] = addition("outcome")
    """Reward that a turn of the policy is credited with. outcome: the reward of the whole response, including the
    rewards of its turns. turn: the turn's return, which is its own reward, the rewards of later turns and the reward of
    the response. Baseline and scale are then taken over the returns from the same turn on; a response that has ended
    counts with its last return. With leave_one_out both have the same expected gradient on policy; with group_mean both
    have 1 - 1/G of it, G being the size of a group."""


class BaseObjective(Spec):
    """An objective, with the properties that training, certificates and checks need."""

    published: ClassVar[dict[str, dict[str, Any]]]
    """Published `advantage` and `reference`, which a spec gets for the keys it leaves out."""
    certified: ClassVar[tuple[dict[str, Any], ...]] = ({},)
    """Settings that `rpg certify` lists, each given by the fields that differ from their defaults."""

    @property
    @abstractmethod
    def needs_reference(self) -> bool:
        """Whether the reference policy's logprobs enter the loss or the reward."""

    @property
    def summed_over(self) -> SummedOver:
        """Tokens over which the divergence at a state is summed: the sampled one, or several. Several need the
        reference's distribution."""
        return "sampled"

    @property
    def top_k(self) -> int:
        """Number of the reference's most likely tokens over which the divergence is summed; 0 with any other sum."""
        return 0

    @property
    def penalizes_reward(self) -> bool:
        """Whether the divergence is subtracted from the reward, so that advantages depend on old and reference
        logprobs."""
        return False

    @property
    def ratio_over(self) -> RatioOver:
        """Unit of the importance ratio."""
        return "token"

    @property
    def symbols(self) -> frozenset[str]:
        """Symbols that the objective's formula reads; empty for an objective that is not a formula."""
        return frozenset()

    @property
    def without_advantage(self) -> bool:
        """Whether responses with an advantage of 0 also have a gradient."""
        return self.needs_reference

    @property
    def claims_divergence(self) -> bool:
        """Whether the claimed gradient includes that of a divergence."""
        return self.needs_reference

    @property
    def claimed_kl_coef(self) -> float:
        """Weight of the claimed divergence."""
        return constant(getattr(self, "kl_coef", 0.0))

    def with_kl_coef(self, kl_coef: float) -> Self:
        """Returns the objective with another weight of its divergence."""
        return self.model_copy(update={"kl_coef": kl_coef})

    @property
    @abstractmethod
    def exact(self) -> Claim:
        """When the expected gradient is claimed to be exactly that of the expected reward minus the divergence."""

    @property
    @abstractmethod
    def claim_level(self) -> Level:
        """Whether the claimed divergence is of each token or of the whole response."""

    @property
    def claim_divergence(self) -> Direction:
        """Direction of the claimed divergence: reverse is KL(policy || reference), forward KL(reference || policy)."""
        return "reverse"


class PackagedObjective(BaseObjective, OpenSection):
    """An objective of an installed package, for losses that a formula cannot express. A variant's own fields are its
    settings."""

    group: ClassVar[str] = "rpg.objectives"
    package: ClassVar[str] = ""

    published: ClassVar[dict[str, dict[str, Any]]] = {"reference": {"source": "behaviour"}}
    reads: ClassVar[frozenset[str]] = frozenset()
    """Symbols that it reads from its terms, among H, R, p_engine, r and q. With r or q a reference policy is kept."""

    type: str
    """Name of the objective."""
    aggregation: Aggregation = "token_mean"
    """How token losses become the loss of an update."""

    @abstractmethod
    def losses(self, terms: Any) -> tuple[Any, Any]:
        """Returns the loss of each token [B, T], not masked, and a mask of the tokens on which its clip acts.

        Args:
            terms: `rpg.objectives.terms.Terms`, over the unit that `ratio_over` names.
        """

    @property
    def symbols(self) -> frozenset[str]:
        """Symbols named in `reads`."""
        return self.reads

    @property
    def needs_reference(self) -> bool:
        """Whether it reads r or q."""
        return bool(self.reads & {"r", "q"})

    @property
    def without_advantage(self) -> bool:
        """True, since a package's loss may have a gradient at A = 0."""
        return True

    @property
    def exact(self) -> Claim:
        """`never`, unless a variant overrides it; its claim is then checked by enumeration, and must be true."""
        return "never"

    @property
    def claim_level(self) -> Level:
        """`token`: the divergence of each token."""
        return "token"

    @property
    def claims_divergence(self) -> bool:
        """Whether it has a field kl_coef, the weight of a divergence, and claims to be exact."""
        return self.exact != "never" and "kl_coef" in type(self).model_fields

    def with_kl_coef(self, kl_coef: float) -> Self:
        """Returns the objective with another weight of its divergence; itself if it has no kl_coef."""
        return super().with_kl_coef(kl_coef) if "kl_coef" in type(self).model_fields else self
