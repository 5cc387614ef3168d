"""Proof that the sampler holds the learner's weights: both give the logprobs of a probe, and these must agree.

An engine that kept old weights raises no error anywhere else: training goes on, on samples of the wrong policy.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rpg.engines.base import Sampler
from specs.schema.rollout import VllmRollout

LogprobsFn = Callable[[Sequence[int], int], Sequence[float]]
"""(token ids, prompt length) -> logprobs of the tokens after the prompt, nats, at temperature 1."""


_EXACT, _ROUNDED = 0.05, 0.5
"""Nats, by default: in float32; in bfloat16, where a model of 12 layers was seen 0.1 apart from itself."""


class StaleEngineError(RuntimeError):
    """The sampler's weights are not the learner's."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Tokens whose logprobs are compared."""

    token_ids: tuple[int, ...]
    prompt_length: int
    """The logprobs of the tokens after it are compared; at least 1."""


def tolerance_of(rollout: VllmRollout, *, precision: str, device_type: str) -> float:
    """The spec's bound, or that of the arithmetic: an engine on a GPU has the type of the base model's weights."""
    exact = precision == "float32" and device_type == "cpu"
    return rollout.sentinel_tolerance or (_EXACT if exact else _ROUNDED)


def check(sampler: Sampler, learner_logprobs: LogprobsFn, probe: Probe, *, tolerance: float) -> float:
    """The largest difference between the sampler's and the learner's logprobs of the probe, nats.

    Raises:
        StaleEngineError: it is above the tolerance, or not a number.
    """
    engine = sampler.logprobs(probe.token_ids, prompt_length=probe.prompt_length)
    learner = learner_logprobs(probe.token_ids, probe.prompt_length)
    difference = max(abs(one - other) for one, other in zip(engine, learner, strict=True))
    if not difference <= tolerance:  # so that NaN fails
        raise StaleEngineError(
            f"after load {sampler.policy_version} the sampler does not hold the learner's weights: "
            f"logprobs of the probe differ by {difference:.3g} nats, allowed {tolerance:g} (rollout.sentinel_tolerance)"
        )
    return difference
