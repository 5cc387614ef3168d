"""Closed loops: values of the spec that move after each step so that a metric meets its target."""

import math
from collections.abc import Mapping
from typing import Any

from specs.schema.base import Spec
from specs.schema.schedule import ClosedLoop, Place, loops_in

MOST_ERROR = 0.2
"""Largest relative error that counts in a step. It limits a loop's change per step to `gain` times this."""
LOWERED_BY_MORE = ("entropy",)
"""Metrics that rise with the loop's value. A loop on such a metric raises its value while the metric is below the
target."""


def next_value(value: float, measured: float, loop: ClosedLoop) -> float:
    """Returns a loop's value for the next step: value * (1 + gain * e), e = measured / target - 1 in [-0.2, 0.2].

    The sign is minus for a metric that rises with the value. A metric that is NaN leaves the value as it is.

    Args:
        value: at the step that was measured.
        measured: the metric at that step.
        loop: with its start and bounds, see `specs.schema.schedule.settled`.
    Source: Ziegler 2019, arXiv:1909.08593, section 2.2, with K_beta = gain. Differs: bounds on the value.
    Example: the divergence is twice its target, which counts as an error of 0.2.
        >>> loop = ClosedLoop(target=0.02, of="kl/reverse", start=0.1, least=1e-4, most=100.0)
        >>> round(next_value(0.1, 0.04, loop), 6), round(next_value(0.1, 0.019, loop), 6)
        (0.102, 0.0995)
    """
    if math.isnan(measured):
        return value
    error = min(max(measured / loop.target - 1, -MOST_ERROR), MOST_ERROR)
    moved = value * (1 + (-error if loop.of in LOWERED_BY_MORE else error) * loop.gain)
    assert loop.least is not None
    assert loop.most is not None
    return min(max(moved, loop.least), loop.most)


class ClosedLoops:
    """The closed loops of a spec, with their values at the current step. All ranks have the same values, because they
    see the same metrics."""

    def __init__(self, spec: Spec) -> None:
        self._loops = dict(loops_in(spec))
        self.values: dict[Place, float] = {path: loop.start or 0.0 for path, loop in self._loops.items()}
        """Value of each loop, by its path in the spec."""

    @property
    def metrics(self) -> set[str]:
        """Returns the metrics that the loops follow."""
        return {loop.of for loop in self._loops.values()}

    def follow(self, metrics: Mapping[str, float]) -> None:
        """Moves each loop by its metric. A loop whose metric is not among these keeps its value."""
        for path, loop in self._loops.items():
            if loop.of in metrics:
                self.values[path] = next_value(self.values[path], metrics[loop.of], loop)

    def state_dict(self) -> dict[str, Any]:
        """Returns the values, as plain values for JSON."""
        return {".".join(path): value for path, value in self.values.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a `state_dict` of the same spec. A loop that it lacks keeps its start."""
        for path in self.values:
            if (value := state.get(".".join(path))) is not None:
                self.values[path] = float(value)
