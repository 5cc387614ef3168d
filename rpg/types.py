"""The vocabulary of the loop: plain, frozen, every field documented."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem as the data stage published it."""

    problem_id: str
    """Hash of the content, so that copies share it."""
    prompt: str
    """The text that the model sees."""
    answer: str
    """The gold answer."""
    dataset: str
    """Name of the set it came from."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """What the scorer needs beyond the answer (reasoning-gym's entry)."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How responses are drawn."""

    temperature: float
    """Logits are divided by it; 0 is greedy."""
    top_p: float
    """Nucleus probability in (0, 1]; 1 is all tokens."""
    max_response_length: int
    """Tokens at most, the end token included."""
    top_k: int = 0
    """The likeliest tokens only, the nucleus taken of what is left; 0 is all."""
    stop: tuple[str, ...] = ()
    """Texts that end a response; the token that completes one is its last."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """One sampled response. Tokens are what the engine sampled, never re-encoded text."""

    response_ids: tuple[int, ...]
    """Sampled tokens, the end token included where there is one."""
    rollout_logprobs: tuple[float, ...]
    """Of each sampled token under the distribution it was drawn from, nats: tempered, cut to top_k and the nucleus,
    and renormalised. They differ from the learner's wherever a cut took something away."""
    finish_reason: FinishReason
    """stop: the end token was sampled, or a stop text completed; length: cut at max_response_length."""


OnResponse = Callable[[int, Rollout], None]
"""Told of a response once it has ended, and which it is: the i-th to prompt p is p * group_size + i."""


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """The responses to one prompt."""

    prompt_ids: tuple[int, ...]
    rollouts: tuple[Rollout, ...]
    policy_version: int
    """Number of weight loads of the sampler before these were drawn."""
