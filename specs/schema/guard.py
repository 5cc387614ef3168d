"""Guards: figures of a run that somebody watches, and what happens when they leave their bounds."""

from typing import TYPE_CHECKING, Literal, TypeAlias

from pydantic import Field, model_validator

from specs.metrics import METRICS
from specs.schema.base import Spec

if TYPE_CHECKING:
    GuardableMetric: TypeAlias = str
    GuardedMetric: TypeAlias = str
else:
    GuardableMetric = Literal[tuple(metric.name for metric in METRICS if metric.guardable)]
    GuardedMetric = Literal["not_finite", GuardableMetric]


class Guard(Spec):
    """Watches one figure after every step, before the step's checkpoint is saved."""

    metric: GuardedMetric
    """The figure; not_finite: a loss or gradient norm that is no number, which needs no bound. Where no guard is on
    it, one with action stop is."""
    above: float | None = None
    """Trouble is a value above it, or one that is no number."""
    below: float | None = None
    """Trouble is a value below it, or one that is no number."""
    for_steps: int = Field(1, ge=1)
    """Steps of trouble one after another before the guard acts."""
    action: Literal["warn", "stop", "roll_back"] = "stop"
    """warn: an event and a line, once until the figure is back within its bounds. stop: the run fails after the step,
    without a checkpoint of it. roll_back: training goes on from the last checkpoint before the trouble, with a lower
    learning rate; where that did not get past the step, from the one before it."""
    learning_rate_factor: float = Field(0.5, gt=0, le=1)
    """roll_back: what the learning rate of later steps is multiplied by, each time."""
    at_most: int = Field(2, ge=1)
    """roll_back: how often this guard does so in a run; then it stops it."""

    @model_validator(mode="after")
    def _bounded(self) -> "Guard":
        if self.metric == "not_finite":
            if self.above is not None or self.below is not None:
                raise ValueError("not_finite has no bounds: leave above and below out")
            if self.action == "warn":
                raise ValueError("after a gradient that is no number the weights are none either: stop or roll_back")
        elif self.above is None and self.below is None:
            raise ValueError("a guard needs a bound: above, below or both")
        return self
