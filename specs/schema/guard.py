"""Guards: bounds on the metrics of a run, and what happens when a metric is outside them."""

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
    """Watches one metric after every step, before the step's checkpoint is saved."""

    metric: GuardedMetric
    """The metric (docs/metrics.md); not_finite: the loss or the gradient norm is NaN or infinite, which needs no bound.
    A run without a guard on not_finite has one with action stop; training.on_not_finite says when it acts on an
    update. A step in which every update was skipped has no metrics of updates, and no guard on these looks at it."""
    above: float | None = None
    """A value above it violates the guard; so does NaN."""
    below: float | None = None
    """A value below it violates the guard; so does NaN."""
    for_steps: int = Field(1, ge=1)
    """The guard acts when so many steps in a row violate it."""
    action: Literal["warn", "stop", "roll_back"] = "stop"
    """warn: an event and a line in the log, once until a step is within the bounds again. stop: the run fails after the
    step, without a checkpoint of it. roll_back: training goes on from the last checkpoint before the violation, with a
    lower learning rate; if the guard then fires again by the same step, from an earlier checkpoint."""
    learning_rate_factor: float = Field(0.5, gt=0, le=1)
    """roll_back: the learning rate of later steps is multiplied by it, each time."""
    at_most: int = Field(2, ge=1)
    """roll_back: how often this guard does so in a run; after that it stops the run."""

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
