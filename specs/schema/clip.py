"""Clips of the importance ratio. `low` and `high` are margins around ratio 1, never bounds."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from specs.schema.base import Spec
from specs.schema.schedule import Schedulable, ValueSchedule

LowerMargin = Annotated[float | ValueSchedule, Schedulable(gt=0, lt=1)]
UpperMargin = Annotated[float | ValueSchedule, Schedulable(gt=0)]


class NoClip(Spec):
    """Every token keeps its gradient."""

    type: Literal["none"] = "none"


class DualClip(Spec):
    """RPG-Style Clip with the REINFORCE estimator, PPO's dual clip on the reward part with the differentiable one."""

    type: Literal["dual"] = "dual"
    low: LowerMargin = 0.2
    """Margin below ratio 1: with a negative advantage a token stops counting under 1 - low."""
    high: UpperMargin = 0.28
    """Margin above ratio 1: with a positive advantage a token stops counting from 1 + high."""
    dual: float = Field(10.0, gt=1)
    """Bound on the ratio when the advantage is negative."""
    branch: Literal["raw", "regularized"] = "raw"
    """Whose sign decides the side: raw, the advantage (the paper's code); regularized, the advantage with the
    divergence (the paper's Algorithm 2; Algorithm 1 with the differentiable estimator)."""
    keep_divergence: bool = False
    """Whether a clipped token keeps the divergence's gradient. The differentiable estimator on the raw branch always
    does."""


class TruncateClip(Spec):
    """The ratio is replaced by its clamp to [1 - low, 1 + high] wherever it weighs; no token stops counting.
    REINFORCE only."""

    type: Literal["truncate"] = "truncate"
    low: LowerMargin = 0.2
    """Margin below ratio 1."""
    high: UpperMargin = 0.28
    """Margin above ratio 1."""


class ValueClip(Spec):
    """The value of ratio times regularized advantage is clipped as in PPO's dual clip and then weighs the gradient, the
    paper's eq. 4.1; no token stops counting. REINFORCE only."""

    type: Literal["value"] = "value"
    low: LowerMargin = 0.2
    """Margin below ratio 1: with a negative regularized advantage the ratio counts as at least 1 - low."""
    high: UpperMargin = 0.28
    """Margin above ratio 1: with another regularized advantage the ratio counts as at most 1 + high."""
    dual: float = Field(10.0, gt=1)
    """Bound on the ratio when the regularized advantage is negative."""


Clip = Annotated[NoClip | DualClip | TruncateClip | ValueClip, Field(discriminator="type")]


class EqualMargins(Spec):
    """PPO's clip: margins on both sides of ratio 1."""

    low: LowerMargin = 0.2
    """Margin below ratio 1: with a negative advantage a token stops counting under 1 - low."""
    high: UpperMargin = 0.2
    """Margin above ratio 1: with a positive advantage a token stops counting over 1 + high."""
    dual: float = Field(0.0, ge=0)
    """Bound on the ratio when the advantage is negative, over 1; 0: none."""

    @model_validator(mode="after")
    def _above_one(self) -> "EqualMargins":
        if 0 < self.dual <= 1:
            raise ValueError("dual must be 0 (none) or greater than 1")
        return self


class HigherMargins(EqualMargins):
    """DAPO's clip-higher."""

    high: UpperMargin = 0.28
    """Margin above ratio 1: with a positive advantage a token stops counting over 1 + high."""


class ResponseMargins(EqualMargins):
    """GSPO's, around the geometric mean of a response's ratios, which moves far less than a token's."""

    low: LowerMargin = 3e-4
    """Margin below ratio 1: with a negative advantage a response stops counting under 1 - low."""
    high: UpperMargin = 4e-4
    """Margin above ratio 1: with a positive advantage a response stops counting over 1 + high."""
