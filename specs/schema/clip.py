"""Clips of the importance ratio. `low` and `high` are margins around ratio 1, not bounds."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from specs.schema.base import Spec
from specs.schema.schedule import ClosedLoop, Schedulable, ValueSchedule

LowerMargin = Annotated[float | ValueSchedule | ClosedLoop, Schedulable(gt=0, lt=1, of=("clip_fraction/low",))]
UpperMargin = Annotated[float | ValueSchedule | ClosedLoop, Schedulable(gt=0, of=("clip_fraction/high",))]
DualBound = Annotated[float | ValueSchedule, Schedulable(gt=1)]


class NoClip(Spec):
    """No clip: every token keeps its gradient."""

    type: Literal["none"] = "none"


class DualClip(Spec):
    """RPG-Style Clip with the REINFORCE estimator; PPO's dual clip on the reward part with the differentiable
    estimator."""

    type: Literal["dual"] = "dual"
    low: LowerMargin = 0.2
    """Margin below ratio 1: with a negative advantage a token is clipped below 1 - low."""
    high: UpperMargin = 0.28
    """Margin above ratio 1: with a positive advantage a token is clipped from 1 + high on."""
    dual: DualBound = 10.0
    """Bound on the ratio when the advantage is negative."""
    branch: Literal["raw", "regularized"] = "raw"
    """Quantity whose sign selects the side. raw: the advantage (the paper's code). regularized: the advantage with the
    divergence (the paper's Algorithm 2; Algorithm 1 with the differentiable estimator)."""
    keep_divergence: bool = False
    """Whether a clipped token keeps the divergence's gradient. The differentiable estimator on the raw branch always
    keeps it."""


class TruncateClip(Spec):
    """A clamp of the ratio to [1 - low, 1 + high] in every weight; no token is dropped. REINFORCE only."""

    type: Literal["truncate"] = "truncate"
    low: LowerMargin = 0.2
    """Margin below ratio 1."""
    high: UpperMargin = 0.28
    """Margin above ratio 1."""


class ValueClip(Spec):
    """A clip of the value of ratio times regularized advantage, as in PPO's dual clip. The clipped value weights the
    gradient, the paper's eq. 4.1; no token is dropped. REINFORCE only."""

    type: Literal["value"] = "value"
    low: LowerMargin = 0.2
    """Margin below ratio 1: with a negative regularized advantage a ratio below 1 - low counts as 1 - low."""
    high: UpperMargin = 0.28
    """Margin above ratio 1: with any other regularized advantage a ratio above 1 + high counts as 1 + high."""
    dual: DualBound = 10.0
    """Bound on the ratio when the regularized advantage is negative."""


Clip = Annotated[NoClip | DualClip | TruncateClip | ValueClip, Field(discriminator="type")]


class EqualMargins(Spec):
    """PPO's clip: margins on both sides of ratio 1."""

    low: LowerMargin = 0.2
    """Margin below ratio 1: with a negative advantage a token is clipped below 1 - low."""
    high: UpperMargin = 0.2
    """Margin above ratio 1: with a positive advantage a token is clipped above 1 + high."""
    dual: Annotated[float | ValueSchedule, Schedulable(ge=0)] = 0.0
    """Bound on the ratio when the advantage is negative, above 1. 0 disables it."""

    @model_validator(mode="after")
    def _above_one(self) -> "EqualMargins":
        values = [value for _, value in self.dual.schedule] if isinstance(self.dual, ValueSchedule) else [self.dual]
        if any(0 < value <= 1 for value in values):
            raise ValueError("dual must be 0 (none) or greater than 1")
        if isinstance(self.dual, ValueSchedule) and self.dual.between != "step" and 0 < values.count(0) < len(values):
            raise ValueError("dual cannot change gradually from 0 (none) to a bound: write between: step")
        return self


class HigherMargins(EqualMargins):
    """DAPO's clip-higher."""

    high: UpperMargin = 0.28
    """Margin above ratio 1: with a positive advantage a token is clipped above 1 + high."""


class ResponseMargins(EqualMargins):
    """GSPO's margins, around the geometric mean of a response's ratios, which varies far less than a token's ratio."""

    low: LowerMargin = 3e-4
    """Margin below ratio 1: with a negative advantage a response is clipped below 1 - low."""
    high: UpperMargin = 4e-4
    """Margin above ratio 1: with a positive advantage a response is clipped above 1 + high."""
