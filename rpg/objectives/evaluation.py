"""Evaluates an objective on a batch of tokens: the losses, and all values of them that training shows."""

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from rpg.objectives import formula, regularized, rivals  # noqa: F401  (the equations, which register themselves)
from rpg.objectives.clipping import Clipped
from rpg.objectives.distribution import StateDivergence, of_logits
from rpg.objectives.kl import penalty, token_divergences
from rpg.objectives.registry import equation
from rpg.objectives.terms import TERMS, Terms, TokenBatch, token_terms
from specs.schema.objective import Objective, PublishedObjective, RegularizedObjective
from specs.schema.schedule import constant


@dataclass(frozen=True, slots=True)
class ObjectiveEvaluation:
    """The values of an objective for each token, all [batch, time]. All except the losses are constant, and 0 or False
    at positions with `response_mask` 0."""

    losses: Tensor
    """Losses of the tokens, as `token_losses` returns them."""
    weight: Tensor
    """m, the factor of ∇log π in minus the gradient of the sum of the losses. A divergence that is summed over the
    vocabulary is left out, because its gradient is not a multiple of ∇log π."""
    ratio: Tensor
    """π/π_old of the token, of the response, or the response's geometric mean, as the objective uses it."""
    clipped_low: Tensor
    """Whether the lower margin of the clip acts, bool. At most one side acts on a token."""
    clipped_high: Tensor
    """Whether the upper margin acts, bool."""
    clipped_dual: Tensor
    """Whether the bound for negative advantages acts, bool."""
    kl_reverse: Tensor
    """Estimate of KL(π ‖ π_ref) at each token, nats, ≥ 0. Its mean over tokens is unbiased for the states that the
    sampler visits. With `kl: full` this and the next field are exact at each state."""
    kl_forward: Tensor
    """Estimate of KL(π_ref ‖ π) at each token, nats."""
    kl_behaviour: Tensor
    """Estimate of KL(π_old ‖ π) at each token, nats."""

    @property
    def clipped(self) -> Tensor:
        """Returns whether any side of the clip acts, bool."""
        return self.clipped_low | self.clipped_high | self.clipped_dual

    def diagnostics(self) -> dict[str, Tensor]:
        """Returns all values except the losses, by name."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "losses"}


def evaluate_objective(objective: Objective, batch: TokenBatch) -> ObjectiveEvaluation:
    """Returns the losses of a batch, differentiable if its logprobs are, and their diagnostics.

    The weight is the gradient of these losses by `logprobs`, and stops there; the losses stay differentiable.
    """
    differentiable = batch.logprobs.requires_grad
    leaf = batch.logprobs if differentiable else batch.logprobs.detach().requires_grad_()
    with torch.enable_grad():
        prepared = replace(batch, logprobs=leaf).prepared()
        losses, clipped, terms, tokens = _losses(objective, prepared)
        counted = torch.where(prepared.response_mask, losses, 0.0).sum()
        (gradient,) = torch.autograd.grad(counted, leaf, retain_graph=differentiable)
    with torch.no_grad():
        per_token = {
            "weight": -gradient,
            "ratio": terms.ratio,
            "clipped_low": clipped.low,
            "clipped_high": clipped.high,
            "clipped_dual": clipped.dual,
            **token_divergences(tokens),
        }
        masked = {
            name: torch.where(prepared.response_mask, values, torch.zeros_like(values))
            for name, values in per_token.items()
        }
    return ObjectiveEvaluation(losses=losses if differentiable else losses.detach(), **masked)


def token_losses(
    objective: Objective,
    *,
    logprobs: Tensor,
    old_logprobs: Tensor,
    ref_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    entropy: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
    rewards: Tensor | None = None,
    logits: Tensor | None = None,
    ref_logits: Tensor | None = None,
    token_ids: Tensor | None = None,
    state: StateDivergence | None = None,
) -> Tensor:
    """Returns the loss of each token, to minimise. It is neither masked nor averaged; see aggregate.py.

    Args:
        objective: from a spec, or from `specs.parse_objective`. If schedules change it over training, pass the result
            of `specs.schema.schedule.at_step`.
        logprobs: [batch, time], log π(y_t | x, y_<t) under the policy being trained, nats. The only differentiable
            input.
        old_logprobs: the same tokens under the policy that counts as the step's sampler, nats. Constant.
        ref_logprobs: the same tokens under the reference policy, nats. Constant. Pass `old_logprobs` if the sampler is
            the reference.
        advantages: reward units. Constant. If ratios are those of whole responses, the mean over a response counts.
        response_mask: 1 on tokens that the policy sampled and is trained on. Values elsewhere, NaN included, change
            nothing.
        entropy, rollout_logprobs, rewards: H, log p_engine and R, [batch, time] or [batch, 1], if a formula reads
            them. Constant.
        logits: [batch, time, vocabulary] of the policy being trained, over the sampling temperature, if the objective's
            `kl` is full or top_k. Differentiable.
        ref_logits: the reference's, in the same shape. Constant.
        token_ids: [batch, time], int64, the sampled tokens, if `kl` is top_k.
        state: the divergence that is summed over tokens, in place of the three.
    Returns:
        [batch, time], float32 or wider; the sum over positions with `response_mask` 1 is the loss of the sequence. A
        ratio whose logarithm exceeds 60 nats is clamped there, so the loss and its gradient stay finite; a
        differentiated ratio passes no gradient there. Small ratios underflow to 0.
    Raises:
        ValueError: shapes differ, a parameter is still a schedule, or an input that a formula reads is missing.
    """
    if state is None and isinstance(objective, RegularizedObjective) and objective.summed_over != "sampled":
        if logits is None or ref_logits is None:
            raise ValueError(f"`kl: {objective.kl}` needs `logits` and `ref_logits`")
        counted = _counted_states(response_mask, logits, ref_logits, token_ids)
        state = of_logits(objective.divergence, *counted, top_k=objective.top_k, token_ids=token_ids)
    batch = TokenBatch(
        logprobs, old_logprobs, ref_logprobs, advantages, response_mask, entropy, rollout_logprobs, rewards, state
    )
    return _losses(objective, batch.prepared())[0]


def _counted_states(
    response_mask: Tensor, logits: Tensor, ref_logits: Tensor, token_ids: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns both policies' logits in float32 or wider, with 0 at positions with mask 0.

    Raises:
        ValueError: the shapes do not fit the mask's, or token_ids are no ids of the vocabulary.
    """
    whole, vocabulary = response_mask.shape, logits.shape[-1]
    fits = logits.shape == ref_logits.shape == (*whole, vocabulary)
    if not fits or (token_ids is not None and token_ids.shape != whole):
        given = {"response_mask": response_mask, "logits": logits, "ref_logits": ref_logits, "token_ids": token_ids}
        listed = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in given.items() if tensor is not None)
        raise ValueError(f"logits must be [batch, time, vocabulary], all other inputs [batch, time]; given: {listed}")
    mask = (response_mask.detach() != 0)[..., None]
    if token_ids is not None:
        ids = token_ids[mask[..., 0]]
        if ids.is_floating_point() or bool(((ids < 0) | (ids >= vocabulary)).any()):
            raise ValueError(
                f"token_ids must be whole numbers from 0 to {vocabulary - 1}: the logits have {vocabulary} tokens"
            )
    wide = torch.promote_types(logits.dtype, torch.float32)
    return torch.where(mask, logits.to(wide), 0.0), torch.where(mask, ref_logits.detach().to(wide), 0.0)


def _losses(objective: Objective, batch: TokenBatch) -> tuple[Tensor, Clipped, Terms, Terms]:
    """Returns, for a prepared batch, the losses with the penalty, the marks of the clip, the terms with the objective's
    ratio, and the terms of single tokens."""
    tokens = token_terms(batch)
    terms = tokens if objective.ratio_over == "token" else TERMS[objective.ratio_over](batch)
    losses, clipped = equation(objective, terms)
    if isinstance(objective, PublishedObjective) and objective.penalizes_loss:
        estimate = penalty(tokens, estimator=objective.kl_estimator, weighted=objective.kl_weighted)
        losses = losses + constant(objective.kl_coef) * estimate
    return losses, clipped, terms, tokens
