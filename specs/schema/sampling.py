"""Which of the sampled responses are trained on, and with which weight."""

from typing import Literal

from pydantic import Field

from specs.schema.base import Spec


class DynamicSampling(Spec):
    """DAPO's, arXiv:2503.14476: groups whose scores are all equal are thrown away, other prompts sampled instead."""

    max_batches: int = Field(10, ge=2)
    """Rounds of sampling in a step at most, the first included. What is missing then is filled with the first groups
    that were thrown away, so that a step always has prompts_per_step groups."""


class Correction(Spec):
    """Importance weights learner / engine on each token's loss, for the logprobs in which the two differ."""

    type: Literal["none", "truncate", "mask"] = "none"
    """none; truncate: min(ratio, bound), truncated importance sampling; mask: the ratio within [1 / bound, bound], 0
    outside."""
    bound: float = Field(2.0, gt=1)
    """Largest weight."""


class Overlong(Spec):
    """DAPO's soft overlong punishment, arXiv:2503.14476 eq. 13: reward taken off as a response nears its limit."""

    buffer: int = Field(ge=1)
    """Tokens before rollout.max_response_length over which the penalty grows linearly from 0."""
    penalty: float = Field(1.0, gt=0)
    """Reward taken off at the limit."""
