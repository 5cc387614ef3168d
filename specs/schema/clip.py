"""Clips of the importance ratio. `low` and `high` are margins around ratio 1, never bounds."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from specs.schema.base import Spec
from specs.schema.schedule import ClosedLoop, Schedulable, ValueSchedule

LowerMargin = Annotated[float | ValueSchedule | ClosedLoop, Schedulable(gt=0, lt=1, of=("clip_fraction/low",))]
UpperMargin = Annotated[float | ValueSchedule | ClosedLoop, Schedulable(gt=0, of=("clip_fraction/high",))]
DualBound = Annotated[float | ValueSchedule, Schedulable(gt=1)]


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
    dual: DualBound = 10.0
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
    dual: DualBound = 10.0
    """Bound on the ratio when the regularized advantage is negative."""


Clip = Annotated[NoClip | DualClip | TruncateClip | ValueClip, Field(discriminator="type")]


class EqualMargins(Spec):
    """PPO's clip: margins on both sides of ratio 1."""

    low: LowerMargin = 0.2
    """Margin below ratio 1: with a negative advantage a token stops counting under 1 - low."""
    high: UpperMargin = 0.2
    """Margin above ratio 1: with a positive advantage a token stops counting over 1 + high."""
    dual: Annotated[float | ValueSchedule, Schedulable(ge=0)] = 0.0
    """Bound on the ratio when the advantage is negative, over 1; 0: none."""

    @model_validator(mode="after")
    def _above_one(self) -> "EqualMargins":
        values = [value for _, value in self.dual.schedule] if isinstance(self.dual, ValueSchedule) else [self.dual]
        if any(0 < value <= 1 for value in values):
            raise ValueError("dual must be 0 (none) or greater than 1")
        if isinstance(self.dual, ValueSchedule) and self.dual.between != "step" and 0 < values.count(0) < len(values):
            raise ValueError("dual cannot go from 0 (none) to a bound by degrees: write between: step")
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
