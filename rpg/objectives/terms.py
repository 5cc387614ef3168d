"""Terms of the equations: a batch of tokens, and the ratios between the three policies.

π is the policy being trained, π_old the one that sampled, π_ref the reference; w = π/π_old, r = π/π_ref and
q = π_ref/π_old, so that r = w/q. A is the advantage. SG(x) is x as a constant.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from types import MappingProxyType

import torch
from torch import Tensor

from rpg.objectives.distribution import StateDivergence
from specs.schema.objective import RatioOver

MAX_LOG_RATIO = 60.0
"""Largest log-ratio, nats. exp(60) = 1.1e26 leaves room in float32 for a product with the log-ratio of a whole response
and an advantage. Larger ratios are clamped and pass no gradient."""


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """Returns exp(log_ratio), clamped to exp(MAX_LOG_RATIO)."""
    return torch.exp(log_ratio.clamp(max=MAX_LOG_RATIO))


FOR_FORMULAS = ("entropy", "rollout_logprobs", "rewards")
"""Inputs that only formulas read."""


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """A batch of responses for an objective: floats [batch, time], one entry per response token, padding anywhere.

    Raises:
        ValueError: a shape is not [batch, time], or shapes differ.
    """

    logprobs: Tensor
    """log π(y_t | x, y_<t) under the policy being trained, nats. The only differentiable input."""
    old_logprobs: Tensor
    """Logprobs of the same tokens under the policy that counts as the step's sampler, nats. Constant."""
    ref_logprobs: Tensor
    """Logprobs of the same tokens under the reference policy, nats. Constant. Equal to `old_logprobs` if the sampler is
    the reference."""
    advantages: Tensor
    """Advantage of each token, reward units. Constant."""
    response_mask: Tensor
    """1 on tokens that the policy sampled and is trained on. Values elsewhere, NaN included, change nothing."""
    entropy: Tensor | None = None
    """Entropy of the policy being trained at each token, nats. Constant. This field and the next two are needed only if
    a formula reads them. They may be [batch, 1]."""
    rollout_logprobs: Tensor | None = None
    """Logprobs of the same tokens by the engine that sampled them, nats. Constant."""
    rewards: Tensor | None = None
    """Reward of each token's response. Constant."""
    state: StateDivergence | None = None
    """Divergence at the state before each token, [batch, time]. Needed if the objective sums it over the vocabulary.
    Its value is differentiable too."""

    def __post_init__(self) -> None:
        tensors = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "state"}
        if self.state is not None:
            tensors["state"] = self.state.value
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items() if tensor is not None}
        whole = shapes["logprobs"]
        fits = [shape == whole or (name in FOR_FORMULAS and shape == (*whole[:1], 1)) for name, shape in shapes.items()]
        if len(whole) != 2 or not all(fits):
            given = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
            raise ValueError(f"all inputs must have one shape [batch, time]; given: {given}")

    def prepared(self) -> "TokenBatch":
        """Returns the batch in float32 or wider. All tensors except `logprobs` are constant, the mask is bool, and
        padding is 0."""
        mask = self.response_mask.detach() != 0
        dtype = torch.promote_types(self.logprobs.dtype, torch.float32)

        def counted(values: Tensor) -> Tensor:
            return torch.where(mask, values.to(dtype), 0.0)

        read = {name: getattr(self, name) for name in FOR_FORMULAS}
        return TokenBatch(
            logprobs=counted(self.logprobs),
            old_logprobs=counted(self.old_logprobs.detach()),
            ref_logprobs=counted(self.ref_logprobs.detach()),
            advantages=counted(self.advantages.detach()),
            response_mask=mask,
            **{name: counted(values.detach()) for name, values in read.items() if values is not None},
            state=None if self.state is None else self.state.where(mask, dtype),
        )


@dataclass(frozen=True)
class Terms:
    """The terms of the equations: a prepared batch with its ratios. Entries are tokens, [B, T], or whole responses, [B,
    1]."""

    logprobs: Tensor
    """log π of each token, nats [B, T]; 0 on padding. Differentiable."""
    log_policy: Tensor
    """log π of each entry: of the token, of the whole response, or the mean over the response's tokens.
    Differentiable."""
    log_ratio: Tensor
    """log w of each entry. Differentiable."""
    log_reference: Tensor
    """log q of each entry. Constant."""
    advantages: Tensor
    """A of each entry. For a response, the mean over its tokens. Constant."""
    share: Tensor
    """Share of an entry's loss that each of its tokens gets: 1, or one over the response's number of tokens."""
    response_mask: Tensor
    """Whether each token counts, bool [B, T]."""
    log_engine: Tensor | None = None
    """Log-probability of each entry under the engine that sampled it. Constant, like the next two fields."""
    entropy: Tensor | None = None
    """Entropy of the policy at each token, or its mean over the response's tokens."""
    rewards: Tensor | None = None
    """Reward of each entry's response."""
    state: StateDivergence | None = None
    """Divergence at the state before each token, summed over the vocabulary; None if the sampled token estimates it."""
    to_go: bool = False
    """Whether a token is credited with its response's divergence from this token on. Entries are then tokens."""

    @cached_property
    def log_ref_ratio_to_go(self) -> Tensor:
        """Returns the sum of log r from each token on. Constant."""
        return self.log_ref_ratio.detach().flip(-1).cumsum(-1).flip(-1)

    @cached_property
    def log_reference_so_far(self) -> Tensor:
        """Returns the sum of log q up to and including each token. Constant."""
        return self.log_reference.cumsum(-1)

    @cached_property
    def lengths(self) -> Tensor:
        """Returns the number of tokens that count in each response, at least 1. [B, 1]"""
        return self.response_mask.sum(-1, keepdim=True).clamp(min=1)

    @cached_property
    def ratio(self) -> Tensor:
        """Returns w of each entry. Constant. A loss that differentiates the ratio uses `bounded_exp(log_ratio)`."""
        return bounded_exp(self.log_ratio.detach())

    @property
    def log_ref_ratio(self) -> Tensor:
        """Returns log r of each entry. Differentiable."""
        return self.log_ratio - self.log_reference

    def per_token(self, losses: Tensor) -> Tensor:
        """Returns the losses of entries spread over their tokens, [B, T]. A response's tokens sum to its loss."""
        return (losses * self.share).expand_as(self.logprobs)


def token_terms(batch: TokenBatch) -> Terms:
    """Returns the terms of a prepared batch with ratios of single tokens."""
    return Terms(
        logprobs=batch.logprobs,
        log_policy=batch.logprobs,
        log_ratio=batch.logprobs - batch.old_logprobs,
        log_reference=batch.ref_logprobs - batch.old_logprobs,
        advantages=batch.advantages,
        share=torch.ones_like(batch.advantages),
        response_mask=batch.response_mask,
        log_engine=batch.rollout_logprobs,
        entropy=batch.entropy,
        rewards=batch.rewards,
        state=batch.state,
    )


def sequence_terms(batch: TokenBatch) -> Terms:
    """Returns the terms of a prepared batch with ratios of whole responses, whose log-ratios are the sums over
    tokens."""
    share = 1 / batch.response_mask.sum(-1, keepdim=True).clamp(min=1).to(batch.logprobs.dtype)
    engine, entropy, rewards = batch.rollout_logprobs, batch.entropy, batch.rewards
    return Terms(
        logprobs=batch.logprobs,
        log_policy=batch.logprobs.sum(-1, keepdim=True),
        log_ratio=(batch.logprobs - batch.old_logprobs).sum(-1, keepdim=True),
        log_reference=(batch.ref_logprobs - batch.old_logprobs).sum(-1, keepdim=True),
        advantages=batch.advantages.sum(-1, keepdim=True) * share,
        share=share,
        response_mask=batch.response_mask,
        log_engine=None if engine is None else engine.sum(-1, keepdim=True),
        entropy=None if entropy is None else entropy.sum(-1, keepdim=True) * share,
        rewards=None if rewards is None else rewards.sum(-1, keepdim=True) * share,
    )


def geometric_mean_terms(batch: TokenBatch) -> Terms:
    """Returns terms with the geometric mean of the ratios of a response's tokens. Each token gets the whole loss of its
    response."""
    whole = sequence_terms(batch)
    return replace(
        whole,
        log_policy=whole.log_policy * whole.share,
        log_ratio=whole.log_ratio * whole.share,
        log_reference=whole.log_reference * whole.share,
        log_engine=None if whole.log_engine is None else whole.log_engine * whole.share,
        share=torch.ones_like(whole.share),
    )


TERMS: Mapping[RatioOver, Callable[[TokenBatch], Terms]] = MappingProxyType(
    {"token": token_terms, "sequence": sequence_terms, "geometric_mean": geometric_mean_terms}
)
