"""How rewards become advantages."""

from typing import Literal

from specs.schema.base import Spec


class Advantage(Spec):
    """Reward minus a baseline, divided by a scale, perhaps whitened."""

    baseline: Literal["group_mean", "leave_one_out", "batch_mean", "none"] = "group_mean"
    """group: the responses to one prompt; leave_one_out: the group's other responses; batch: a step's rollouts."""
    scale: Literal["none", "group_std", "batch_std"] = "none"
    """Divide by the standard deviation (ddof 1) plus 1e-4."""
    whiten: Literal["none", "tokens"] = "none"
    """tokens: afterwards to mean 0 and variance 1 over all response tokens of the step, as REINFORCE++ does."""
