"""Certificates: how much an objective's expected gradient differs from the exact gradient of the function that it
claims to optimise."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from rpg.certificate.cases import SITUATIONS, Cases, enumerated_cases
from rpg.certificate.coverage import not_covered
from rpg.objectives import TokenBatch, evaluate_objective, token_losses
from rpg.objectives.distribution import StateDivergence
from rpg.objectives.kl import reward_penalties
from specs.schema.experiment import Experiment
from specs.schema.objective import Direction, FormulaObjective, Objective, PublishedObjective, RegularizedObjective
from specs.schema.schedule import at_step, constant, loops_in, schedules_in

Turns = Literal["one", "outcome", "turn"]
TOLERANCE = 1e-10
"""Largest allowed relative error, in float64, of a gradient that is claimed to be exact."""
TOP_K = 2
"""Largest number of the reference's likeliest tokens that `kl: top_k` sums over here, so that some enumerated tokens
are left out."""
TITLES: Mapping[Direction, str] = {
    "reverse": "reverse KL",
    "forward": "forward KL",
    "jensen_shannon": "Jensen-Shannon divergence",
}
NAMED = {
    "nothing": 0.0,
    "reverse KL of each token": ("reverse", "token", 1.0),
    "forward KL of each token": ("forward", "token", 1.0),
    "reverse KL of the response": ("reverse", "sequence", 1.0),
    "forward KL of the response": ("forward", "sequence", 1.0),
    "Jensen-Shannon divergence of each token": ("jensen_shannon", "token", 1.0),
    "Jensen-Shannon divergence of the response": ("jensen_shannon", "sequence", 1.0),
    "minus the forward KL of each token": ("forward", "token", -1.0),
}
"""Candidates for the function whose gradient is the divergence's part: name -> (divergence, level, sign)."""


@dataclass(frozen=True, slots=True)
class GradientFinding:
    """The gradient in one situation: error and cosine in the worst case, and the mean variance over the cases."""

    policy: str
    """on_policy: the policy is the sampler. off_policy: it is not."""
    reference: str
    """sampler: the reference is the sampler. apart: it is a third policy."""
    error: float
    """Relative error of the expected gradient, compared with that of the claimed function."""
    cosine: float
    """Cosine of the angle between the expected gradient and that of the claimed function."""
    variance: float
    """Trace of the covariance of the gradient from one response; reward units squared."""
    divergence_error: dict[str, float]
    """Relative error of the divergence's part alone, compared with the named divergence of each token and of the whole
    response."""
    divergence_gradient_of: str
    """Function whose gradient is the divergence's part; empty if no candidate matches, or without a divergence."""


@dataclass(frozen=True, slots=True)
class PartialFinding:
    """The gradient if a newer policy continues responses that an older one began (`rollout.partial`), in the worst case
    with the newer policy in training."""

    error: float
    """Relative error of the expected gradient over all responses. The old policy of each token is its sampler."""
    short_error: float
    """Relative error of the expected gradient over only those responses that end before the change. Steps train on
    these first."""
    short_cosine: float
    """Cosine of the angle between this gradient and that of the claimed function."""
    mean_length: float
    """Mean number of tokens of a response."""
    short_length: float
    """Mean number of tokens of the responses that end before the change."""


@dataclass(frozen=True, slots=True)
class Certificate:
    """A comparison of an objective's gradient with the exact one, in every situation."""

    objective: dict[str, Any]
    """The resolved objective. A nonzero kl_coef is replaced by 1 here, so that divergence and reward have equal
    weight."""
    claim: str
    """When the expected gradient is claimed to be exact: always, on_policy or never."""
    claimed: str
    """The claimed function, with whose gradient the objective's is compared."""
    holds: bool
    """Whether the claim is true within the tolerance in every enumerated case."""
    tolerance: float
    num_cases: int
    turns: Turns
    """one: a response is a single turn. outcome, turn: a response has several turns, each with a reward, and given
    tokens between them. `Advantage.credit` says which rewards count for a turn."""
    length_cosine: float
    """Effect of the aggregation on the on-policy gradient: for sequence_mean, which divides by each response's own
    length, the smallest cosine to the exact gradient. 1 for the other aggregations, which only scale it."""
    findings: tuple[GradientFinding, ...]
    not_covered: dict[str, Any] = field(default_factory=dict)
    """Keys of the spec, with their values, that may make the run's gradient differ from the certified one. Empty if
    there are no such keys, or if the certificate covers an objective alone."""
    partial: PartialFinding | None = None
    """Finding for responses that several policies sampled; None without `rollout.partial`."""
    closed_loops: dict[str, float] = field(default_factory=dict)
    """Keys of the spec that a closed loop changes -> the start value, with which the objective is enumerated. Empty if
    there are no such keys, or if the certificate covers an objective alone."""

    def as_json(self) -> dict[str, Any]:
        """Returns the certificate as plain data."""
        return asdict(self)

    def finding(self, policy: str, reference: str) -> GradientFinding:
        """Returns the finding in one situation."""
        return next(entry for entry in self.findings if (entry.policy, entry.reference) == (policy, reference))


def certify(objective: Objective, turns: Turns = "one") -> Certificate:
    """Enumerates every response of small autoregressive policies and compares gradients, without sampling, in float64.

    The loss is the sum of a response's token losses, as with `aggregation: sequence_sum`; the advantage is the reward
    minus its mean. The certificate does not cover the effect of scaling the advantages.
    """
    cases, far = (
        _cases(several_turns=turns != "one", engine="p_engine" in objective.symbols, far=far) for far in (False, True)
    )
    objective, given = _few_likeliest(objective), objective
    divergence = objective.claim_divergence if objective.claims_divergence else ""
    weighed, alone = objective.with_kl_coef(1.0 if divergence else 0.0), objective.with_kl_coef(0.0)
    # The clip of a formula may depend on any value, so the formula is tested with its own coefficient too.
    tested = [weighed, objective] if isinstance(objective, FormulaObjective) and objective != weighed else [weighed]
    slopes = token_gradients(weighed, cases, turns)
    penalty = token_gradients(alone, cases, turns) - slopes if divergence and alone != weighed else None
    exact = _exact(weighed, cases, divergence)
    gradients = _gradients(tested, cases, turns, divergence)
    findings = tuple(_finding(cases, index, slopes, gradients, penalty, divergence) for index in range(len(SITUATIONS)))
    far_errors = _errors(far, _gradients(tested, far, turns, divergence))
    # A clip that is too wide to act on near policies still makes the gradient wrong for distant ones.
    findings = tuple(
        replace(finding, error=error) if finding.error <= TOLERANCE and not error <= TOLERANCE else finding
        for finding, error in zip(findings, far_errors, strict=True)
    )
    claimed = {
        "always": findings,
        "on_policy": [finding for finding in findings if finding.policy == "on_policy"],
        "never": [],
    }
    return Certificate(
        objective=given.model_dump(mode="json"),
        claim=objective.exact,
        claimed=_claimed(objective, divergence),
        holds=all(finding.error <= TOLERANCE for finding in claimed[objective.exact]),
        tolerance=TOLERANCE,
        num_cases=len(cases.situation) + len(far.situation),
        turns=turns,
        length_cosine=_length_cosine(objective, cases, slopes, exact),
        findings=findings,
    )


def _gradients(
    objectives: Sequence[Objective], cases: Cases, turns: Turns, divergence: Direction | Literal[""]
) -> list[tuple[Tensor, Tensor]]:
    """Returns the expected and the exact gradient of each objective. [prefixes, vocabulary]"""
    return [
        (cases.expected(token_gradients(each, cases, turns)), _exact(each, cases, divergence)) for each in objectives
    ]


def _few_likeliest(objective: Objective) -> Objective:
    """Returns the objective with its sum limited to the TOP_K likeliest tokens."""
    if not isinstance(objective, RegularizedObjective) or objective.kl != "top_k":
        return objective
    return objective.model_copy(update={"kl_top_k": min(TOP_K, objective.kl_top_k)})


def _errors(cases: Cases, gradients: Sequence[tuple[Tensor, Tensor]]) -> list[float]:
    """Returns the largest relative error in each situation. NaN counts as the largest."""
    errors = torch.stack([cases.relative_error(*pair) for pair in gradients]).amax(0)
    return [errors[cases.situation == index].max().item() for index in range(len(SITUATIONS))]


def _exact(objective: Objective, cases: Cases, divergence: Direction | Literal[""]) -> Tensor:
    """Returns the gradient of the function that the objective claims to optimise. [prefixes, vocabulary]"""
    exact = cases.exact["reward", objective.claim_level]
    return exact - objective.claimed_kl_coef * cases.exact[divergence, objective.claim_level] if divergence else exact


def certify_over_training(objective: Objective, turns: Turns = "one") -> dict[int, Certificate]:
    """Returns step -> certificate of the objective at that step.

    The steps are the first one, and those points and middles of ramps of the schedules at which the objective
    differs."""
    steps = {1}.union(*(schedule.phases() for _, schedule in schedules_in(objective)))
    objectives = {step: at_step(objective, step) for step in sorted(steps)}
    first_steps: dict[str, int] = {}
    for step, changed in objectives.items():
        first_steps.setdefault(changed.model_dump_json(), step)
    return {step: certify(objectives[step], turns) for step in first_steps.values()}


def certify_experiment(experiment: Experiment) -> dict[int, Certificate]:
    """Returns the certificates of an experiment's objective by step, each with the keys that it does not cover."""
    left_out = not_covered(experiment)
    loops = {".".join(("objective", *path)): loop.start or 0.0 for path, loop in loops_in(experiment.objective)}
    certificates = certify_over_training(experiment.objective, turns_of(experiment))
    certificates = {
        step: replace(certificate, not_covered=left_out, closed_loops=loops)
        for step, certificate in certificates.items()
    }
    if experiment.rollout.partial:
        return {step: _with_partial(each, at_step(experiment.objective, step)) for step, each in certificates.items()}
    return certificates


def _with_partial(certificate: Certificate, objective: Objective) -> Certificate:
    """Returns the certificate with the finding for a sampler that changes within a response. A claim of `always` covers
    this too."""
    cases, objective = _cases(is_cut=True), _few_likeliest(objective)
    short = cases.short()
    divergence = objective.claim_divergence if objective.claims_divergence else ""
    weighed = objective.with_kl_coef(1.0 if divergence else 0.0)
    ((of_all, exact),) = _gradients([weighed], cases, "one", divergence)
    ((of_short, _),) = _gradients([weighed], short, "one", divergence)
    errors = cases.relative_error(of_all, exact)
    newer = torch.tensor([policy == "on_policy" for policy, _ in SITUATIONS])[cases.situation]
    finding = PartialFinding(
        error=errors[newer].max().item(),
        short_error=cases.relative_error(of_short, exact)[newer].max().item(),
        short_cosine=cases.cosine(of_short, exact)[newer].min().item(),
        mean_length=cases.mean_length(),
        short_length=short.mean_length(),
    )
    holds = certificate.holds and (certificate.claim != "always" or errors.max().item() <= TOLERANCE)
    return replace(certificate, holds=holds, partial=finding)


def certificate_record(certificates: Mapping[int, Certificate]) -> dict[str, Any]:
    """Returns the record of a run's certificates: the only certificate, or {"steps": {step: certificate}}."""
    plain = {str(step): certificate.as_json() for step, certificate in certificates.items()}
    return {"steps": plain} if len(plain) > 1 else plain["1"]


def turns_of(experiment: Experiment) -> Turns:
    """Returns the kind of turns that an experiment's certificates cover."""
    return experiment.advantage.credit if experiment.rollout.rollouter.gives_tokens else "one"


@cache
def _cases(*, several_turns: bool = False, engine: bool = False, far: bool = False, is_cut: bool = False) -> Cases:
    return enumerated_cases(turns=several_turns, engine=engine, far=far, is_cut=is_cut)


def token_gradients(objective: Objective, cases: Cases, turns: Turns = "one") -> Tensor:
    """Returns the gradient of each response's loss with respect to the logits that predict each token. [responses,
    length, vocabulary]"""
    logprobs = cases.logprobs.clone().requires_grad_()
    distributions: dict[str, Any] = {}
    if objective.summed_over != "sampled":
        distributions = {
            "logits": cases.logits[cases.prefixes].requires_grad_(),
            "ref_logits": cases.ref_logits[cases.prefixes],
            "token_ids": cases.tokens,
        }
    losses = token_losses(
        objective,
        logprobs=logprobs,
        old_logprobs=cases.old_logprobs,
        ref_logprobs=cases.ref_logprobs,
        advantages=_advantages(objective, cases, turns),
        response_mask=cases.response_mask,
        entropy=cases.entropy,
        rollout_logprobs=cases.rollout_logprobs,
        rewards=cases.rewards[:, None],
        **distributions,
    )
    total = torch.where(cases.response_mask, losses, 0.0).sum()
    logits = [distributions["logits"]] if distributions else []
    return cases.gradients(*torch.autograd.grad(total, [logprobs, *logits]))


def _advantages(objective: Objective, cases: Cases, turns: Turns) -> Tensor:
    """Returns the centred reward as every token's advantage. [responses, length]

    If a turn is credited with its return, the reward counts from the token's turn on. If the objective subtracts the
    divergence from the reward, it is subtracted here."""
    mask = cases.response_mask
    penalties = torch.zeros_like(cases.logprobs)
    if isinstance(objective, PublishedObjective) and objective.penalizes_reward:
        penalties[mask] = constant(objective.kl_coef) * reward_penalties(
            (cases.old_logprobs - cases.ref_logprobs)[mask],
            mask.sum(-1),
            estimator=objective.kl_estimator,
            credit=objective.kl_credit,
        )
    earlier = cases.earlier if turns == "turn" else torch.zeros_like(penalties)
    return torch.where(mask, cases.centred[:, None] - earlier - penalties, 0.0)


def weight_curves(objective: Objective) -> dict[str, list[tuple[float, float]]]:
    """Returns points (ratio, weight) of the curve of a token's gradient weight over its ratio, for advantages of 1 and
    -1.

    The reference is the sampler, which gives the token a probability of 0.5; it is the only token of its response. A
    divergence that is summed over tokens has no part in the weight.
    """
    ratios = torch.linspace(0.01, 3, 300, dtype=torch.float64)
    old = torch.full((len(ratios), 1), 0.5, dtype=torch.float64).log()
    curves = {}
    for advantage in (1.0, -1.0):
        logprobs, constant_ones = old + ratios.log()[:, None], torch.ones_like(old)
        none = torch.zeros_like(old)
        state = StateDivergence(none, none, none, none.bool())
        batch = TokenBatch(
            logprobs, old, old, advantage * constant_ones, constant_ones, constant_ones, old, constant_ones, state
        )
        weights = evaluate_objective(objective, batch).weight[:, 0]
        curves[f"A = {advantage:g}"] = list(zip(ratios.tolist(), weights.tolist(), strict=True))
    return curves


def _claimed(objective: Objective, divergence: Direction | Literal[""]) -> str:
    of = "of each token, in states of the sampler" if objective.claim_level == "token" else "of the whole response"
    return f"expected reward less the {TITLES[divergence]} {of}" if divergence else f"expected reward {of}"


def _finding(
    cases: Cases,
    situation: int,
    slopes: Tensor,
    gradients: Sequence[tuple[Tensor, Tensor]],
    penalty: Tensor | None,
    divergence: Direction | Literal[""],
) -> GradientFinding:
    """Returns the finding in a situation. `gradients`: expected and exact gradients, for each tested weight of the
    divergence."""
    here = cases.situation == situation
    errors, gradient_of = {}, ""
    if penalty is not None:
        part = cases.expected(penalty)
        for level in ("token", "sequence"):
            errors[level] = cases.relative_error(part, cases.exact[divergence, level])[here].max().item()
        gradient_of = _gradient_of(cases, here, part)
    return GradientFinding(
        policy=SITUATIONS[situation][0],
        reference=SITUATIONS[situation][1],
        error=_errors(cases, gradients)[situation],
        cosine=torch.stack([cases.cosine(*pair)[here].min() for pair in gradients]).min().item(),
        variance=cases.variance(slopes)[here].mean().item(),
        divergence_error=errors,
        divergence_gradient_of=gradient_of,
    )


def _length_cosine(objective: Objective, cases: Cases, slopes: Tensor, exact: Tensor) -> float:
    if objective.aggregation != "sequence_mean":
        return 1.0
    on_policy = torch.tensor([policy == "on_policy" for policy, _ in SITUATIONS])[cases.situation]
    divided = cases.expected(slopes / cases.response_mask.sum(-1)[:, None, None])
    return cases.cosine(divided, exact)[on_policy].min().item()


def _gradient_of(cases: Cases, here: Tensor, part: Tensor) -> str:
    """Returns the first candidate that agrees with the divergence's part in every case of the situation."""
    for name, candidate in NAMED.items():
        exact = torch.zeros_like(part)
        if isinstance(candidate, tuple):
            truth, level, sign = candidate
            exact = sign * cases.exact[truth, level]
        if cases.relative_error(part, exact)[here].max() <= TOLERANCE:
            return name
    return ""
