"""Check that the sampler has the learner's weights. Both compute the logprobs of a probe, and these must agree.

An engine that kept old weights raises no other error: training would continue on samples of the wrong policy.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rpg.samplers.base import Sampler
from specs.schema.rollout import Rollout

LogprobsFn = Callable[[Sequence[int], int], Sequence[float]]
"""Function (token ids, prompt length) -> logprobs of the tokens after the prompt, nats, at temperature 1."""

_PROBE_TOKENS = 32
_OUTLIER = 10.0
"""Tolerance of one token as a multiple of the tolerance of the mean. In bfloat16 a single unlikely token may deviate by
this much."""
_MOVED_TOKENS = 8
"""If a load changes at least this many of the learner's logprobs, unchanged logprobs of the engine cannot be chance."""


class StaleEngineError(RuntimeError):
    """Error raised if the sampler's weights are not the learner's."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Tokens whose logprobs are compared."""

    token_ids: tuple[int, ...]
    prompt_length: int
    """Length of the prompt, at least 1. The logprobs of the tokens after it are compared."""


def probe_of(prompt: Sequence[int], *, max_length: int) -> Probe:
    """Returns the prompt, repeated twice and cut to 32 tokens and to the length. Any text would do."""
    return Probe(tuple([*prompt, *prompt][: max(2, min(_PROBE_TOKENS, max_length - 1))]), prompt_length=1)


def open_sentinel(rollout: Rollout, probe: Probe, *, precision: str, device_type: str) -> "Sentinel | None":
    """Returns the check of the spec's sampler after each load of weights; None if its `logprob_tolerance` is None.

    On a GPU a separate engine computes in the type of the base model's weights, whatever the learner's precision is.
    """
    on_cpu = device_type == "cpu"
    exact = on_cpu and precision == "float32"
    tolerance = rollout.logprob_tolerance(exact=exact)
    if tolerance is None:
        return None
    return Sentinel(
        probe,
        tolerance=tolerance,
        token_tolerance=tolerance if exact else _OUTLIER * tolerance,
        as_precise_as_learner=on_cpu or precision != "float32",
    )


class Sentinel:
    """Comparison of engines with their learner after each load of weights."""

    def __init__(
        self,
        probe: Probe,
        *,
        tolerance: float,
        token_tolerance: float | None = None,
        as_precise_as_learner: bool = True,
    ) -> None:
        """Takes the probe and its tolerances.

        Args:
            tolerance: the largest mean difference over the probe's tokens that is allowed, nats.
            token_tolerance: the largest difference of any of them that is allowed, nats; None means the same as
                `tolerance`.
            as_precise_as_learner: whether the engine computes at least as precisely as the learner, so that an update
                that changes the learner's logprobs changes the engine's as well.
        """
        self._probe = probe
        self.tolerance = tolerance
        self.token_tolerance = tolerance if token_tolerance is None else token_tolerance
        self._as_precise_as_learner = as_precise_as_learner
        self._before: dict[int, tuple[list[float], list[float]]] = {}
        """Engine -> the engine's and the learner's logprobs in the last check."""
        self.difference = 0.0
        """Largest difference in the last check, nats."""
        self.mean_difference = 0.0
        """Mean difference over the probe's tokens in that check, nats."""

    def check(self, sampler: Sampler, learner_logprobs: LogprobsFn) -> float:
        """Returns the largest difference between any engine's and the learner's logprobs of the probe, nats.

        Steps too small for the bound do not hide an engine that loads no weights: its logprobs keep the same bits while
        the learner's move.

        Raises:
            StaleEngineError: a difference is above its bound, or not a number, or the engine's logprobs did not move.
        """
        learner = list(learner_logprobs(self._probe.token_ids, self._probe.prompt_length))
        found = [self._check_engine(number, sampler, learner) for number in range(sampler.engines)]
        self.difference, self.mean_difference = (max(each) for each in zip(*found, strict=True))
        return self.difference

    def _check_engine(self, number: int, sampler: Sampler, learner: list[float]) -> tuple[float, float]:
        """Returns the largest and the mean difference of one engine."""
        probe = self._probe
        engine = list(sampler.logprobs(probe.token_ids, prompt_length=probe.prompt_length, engine=number))
        differences = [abs(one - other) for one, other in zip(engine, learner, strict=True)]
        difference, mean = max(differences), sum(differences) / len(differences)
        stale = f"after load {sampler.policy_version} the sampler does not hold the learner's weights: "
        # Written so that NaN fails.
        if not difference <= self.token_tolerance or not mean <= self.tolerance:
            raise StaleEngineError(f"{stale}{self._too_far_apart(difference, mean)}")
        if self._stood_still(number, engine, learner):
            raise StaleEngineError(
                f"{stale}its logprobs of the probe have the same bits as before the load, although the learner's have"
                " changed"
            )
        self._before[number] = engine, learner
        return difference, mean

    def _too_far_apart(self, difference: float, mean: float) -> str:
        key = "(rollout.sentinel_tolerance)"
        if self.token_tolerance == self.tolerance:
            return f"logprobs of the probe differ by {difference:.3g} nats, allowed {self.tolerance:g} {key}"
        return (
            f"logprobs of the probe differ by {mean:.3g} nats in the mean, allowed {self.tolerance:g} {key}, and by"
            f" {difference:.3g} at most, allowed {self.token_tolerance:g}"
        )

    def _stood_still(self, number: int, engine: list[float], learner: list[float]) -> bool:
        """Returns whether the engine's logprobs have the same bits as before the load, although the learner's have
        moved.

        Rounding can move a few of the learner's logprobs and none of the engine's, but not those of half the probe.
        """
        if number not in self._before or not self._as_precise_as_learner:
            return False
        engine_before, learner_before = self._before[number]
        moved = sum(now != then for now, then in zip(learner, learner_before, strict=True))
        return engine == engine_before and moved >= max(_MOVED_TOKENS, len(learner) / 2)
