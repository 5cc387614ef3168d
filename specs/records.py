"""The recorded rows, as plain classes: the one description that the trainer writes by and the store reads by.

Every row of a segment carries `run_id` and `attempt` (which start of the trainer wrote it) as columns.
Times are UTC. Column types follow from the annotations: int -> BIGINT, float -> DOUBLE, Float32 -> FLOAT,
Int32 -> INTEGER, str -> VARCHAR, bool -> BOOLEAN, datetime -> TIMESTAMP WITH TIME ZONE; `| None` marks a column that
may be NULL.
"""

from dataclasses import dataclass
from datetime import datetime
from typing import NewType

Float32 = NewType("Float32", float)
Int32 = NewType("Int32", int)


@dataclass(frozen=True, slots=True)
class MetricRow:
    """One figure of one step."""

    run_id: str
    attempt: Int32
    step: Int32
    name: str
    """A name of specs/metrics.py."""
    value: float
    recorded_at: datetime


@dataclass(frozen=True, slots=True)
class RolloutRow:
    """One response."""

    run_id: str
    attempt: Int32
    step: Int32
    rollout_id: Int32
    """Position in the step's batch, from 0."""
    prompt_id: str
    """Content hash of the problem."""
    group_id: Int32
    """Responses to one prompt share it; from 0 in each step."""
    prompt: str
    response: str
    reward: float
    """Penalties included."""
    correct: bool
    """What the scorer says, penalties aside."""
    advantage: float
    num_tokens: Int32
    """That the policy sampled; those that its environment gave it are rows of `tokens` and not counted here."""
    finish_reason: str
    """stop: ended by itself; length: cut at the maximum."""
    policy_version: Int32
    """Number of weight loads before the policy that sampled it."""
    trained_version: Int32 | None
    """The same count for the policy that the step began to train; less policy_version, the staleness in steps. NULL in
    older records."""
    reference_version: Int32
    """Number of moves of the reference before it."""
    reward_error: str | None
    """Why the scorer failed, where it did."""


@dataclass(frozen=True, slots=True)
class TokenRow:
    """One response token. All logprobs in nats. Of a token that the policy did not sample none is known."""

    run_id: str
    attempt: Int32
    step: Int32
    rollout_id: Int32
    position: Int32
    """From 0 within the response."""
    token_id: Int32
    logprob: Float32 | None
    """At the update that last trained on it; NULL if none did."""
    old_logprob: Float32 | None
    """Of the policy at the start of the step, by the learner."""
    rollout_logprob: Float32 | None
    """Of the same policy, by the engine that sampled."""
    ref_logprob: Float32 | None
    """Of the reference policy."""
    ratio: Float32 | None
    """exp(logprob - old_logprob); of the whole response where the objective takes it so."""
    clipped: bool | None
    """Whether a bound of the clip acted on it."""
    entropy: Float32 | None
    """Of the next token's distribution, nats."""
    sampled: bool
    """False: given by the environment of several turns (what a tool returned, what a user said), and context alone.
    True in older records."""


@dataclass(frozen=True, slots=True)
class EvaluationRow:
    """One measure of one checkpoint on one set."""

    run_id: str
    fingerprint: str
    """Of the evaluate stage whose settings it was measured with; the run's state names the current one."""
    step: Int32
    dataset: str
    metric: str
    """mean@k, pass@k or maj@k."""
    value: float
    ci_low: float
    """Lower end of the interval, at the level of `evaluation.confidence`."""
    ci_high: float
    """Upper end."""
    num_problems: Int32
    samples_per_problem: Int32
    attempt: Int32 | None = None
    """Which start of the trainer measured it; NULL where the evaluate stage did."""


@dataclass(frozen=True, slots=True)
class EvaluationSampleRow:
    """One response of an evaluation."""

    run_id: str
    fingerprint: str
    step: Int32
    dataset: str
    problem_id: str
    sample: Int32
    prompt: str
    response: str
    answer: str
    extracted: str | None
    """What the scorer read as the answer; responses that agree in it vote together in maj@k."""
    score: float
    correct: bool
    num_tokens: Int32
    finish_reason: str
    reward_error: str | None
    attempt: Int32 | None = None


@dataclass(frozen=True, slots=True)
class CheckpointRow:
    """One saved state of a run."""

    run_id: str
    attempt: Int32
    step: Int32
    path: str
    """Relative to the run's directory."""
    kind: str
    """full: everything needed to go on; weights: the policy alone, as safetensors."""
    num_bytes: int
    recorded_at: datetime


@dataclass(frozen=True, slots=True)
class EventRow:
    """Something that happened to a run."""

    run_id: str
    attempt: Int32
    step: Int32
    kind: str
    """started, resumed, reference_moved, checkpoint_saved, reward_failed, finished, ... A rolled_back counts even where
    the run later goes back to before its step."""
    message: str
    recorded_at: datetime


TABLES = {
    "metrics": MetricRow,
    "rollouts": RolloutRow,
    "tokens": TokenRow,
    "evaluations": EvaluationRow,
    "evaluation_samples": EvaluationSampleRow,
    "checkpoints": CheckpointRow,
    "events": EventRow,
}
