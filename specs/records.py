"""The recorded rows as plain classes. Trainer and store share this single description.

Every row of a segment carries `run_id` and `attempt` (which start of the trainer wrote it) as columns. Times are UTC.
The annotations determine the column types: int -> BIGINT, float -> DOUBLE, Float32 -> FLOAT, Int32 -> INTEGER, str ->
VARCHAR, bool -> BOOLEAN, datetime -> TIMESTAMP WITH TIME ZONE; `| None` marks a column that may be NULL.
"""

from dataclasses import dataclass
from datetime import datetime
from typing import NewType

Float32 = NewType("Float32", float)
Int32 = NewType("Int32", int)

EVALUATION = "evaluation"
"""Value of `kind` in the documents of a run that evaluates a model. Documents of a training run have no `kind`."""


@dataclass(frozen=True, slots=True)
class MetricRow:
    """One value of one metric at one step."""

    run_id: str
    """Id of the run, as in `runs`."""
    attempt: Int32
    """Number of the trainer's start that wrote the row, from 1; see `attempts`."""
    step: Int32
    """Step of training, from 1."""
    name: str
    """Name on the page Metrics, such as `reward/mean`."""
    value: float
    """Value in the metric's unit, see the page Metrics."""
    recorded_at: datetime
    """Time at which the step's metrics were written."""


@dataclass(frozen=True, slots=True)
class RolloutRow:
    """One response."""

    run_id: str
    """Id of the run, as in `runs`."""
    attempt: Int32
    """Number of the trainer's start that wrote the row, from 1; see `attempts`."""
    step: Int32
    """Step of training for whose batch it was sampled, from 1."""
    rollout_id: Int32
    """Position in the step's batch, from 0."""
    prompt_id: str
    """Content hash of the problem."""
    group_id: Int32
    """Number of the group, shared by the responses to one prompt, from 0 in each step."""
    prompt: str
    """Text of the prompt."""
    response: str
    """Text of the response: the policy's text and, with several turns, the environment's."""
    reward: float
    """Reward, in reward units, including penalties and rewards of turns."""
    correct: bool | None
    """Whether the scorer marked the answer right, regardless of penalties; NULL for a graded reward, which does not
    mark answers."""
    advantage: float
    """Mean advantage of its tokens, in reward units."""
    num_tokens: Int32
    """Tokens that the policy sampled. Tokens that its environment gave are rows of `tokens` and not counted here."""
    finish_reason: str
    """stop: the response ended by itself; length: it was cut at the maximum length."""
    policy_version: Int32
    """Version of the policy that sampled it (with `rollout.partial`: that sampled its first token). It is the number of
    weight loads before that."""
    trained_version: Int32
    """Version of the policy at the beginning of the step. This minus `policy_version` is the staleness in steps."""
    reference_version: Int32
    """Version of the reference at that step: the number of its updates before."""
    reward_error: str | None
    """Reason why the scorer failed; NULL if it did not."""
    reward_terms: str | None = None
    """Terms of a weighted_sum, JSON: {"NAME": [value, weight]}. NULL for other rewards, and if the scorer failed."""
    verdicts: str | None = None
    """Answers of judges, JSON; the view `verdicts` has a row for each. NULL if no judge was asked."""


@dataclass(frozen=True, slots=True)
class TokenRow:
    """One response token. All logprobs are in nats, and NULL for a token that the policy did not sample."""

    run_id: str
    """Id of the run, as in `runs`."""
    attempt: Int32
    """Number of the trainer's start that wrote the row, from 1; see `attempts`."""
    step: Int32
    """Step of training, from 1."""
    rollout_id: Int32
    """Number of the response, as in `rollouts`."""
    position: Int32
    """Place in the response, from 0, counting given tokens."""
    token_id: Int32
    """Number of the token in the tokenizer's vocabulary."""
    logprob: Float32 | None
    """log π under the policy at the last update that trained on the token, nats; NULL if no update did."""
    old_logprob: Float32 | None
    """log π_old under the policy at the start of the step, computed by the learner, nats."""
    rollout_logprob: Float32 | None
    """Logprob under the policy that sampled, computed by the engine, nats."""
    ref_logprob: Float32 | None
    """log π_ref under the reference policy, nats."""
    ratio: Float32 | None
    """exp(logprob - old_logprob), without a unit; that of the whole response if the objective's ratio is over
    responses."""
    clipped: bool | None
    """Whether a bound of the clip acted on the token."""
    entropy: Float32 | None
    """Entropy of the distribution of the next token, at the sampling temperature, nats."""
    sampled: bool
    """Whether the policy sampled it. False for context from the environment, such as a tool's answer or a user's
    remark."""
    policy_version: Int32 | None = None
    """Version of the policy that sampled it; NULL for given tokens, and in rows of earlier releases."""


@dataclass(frozen=True, slots=True)
class TurnRow:
    """One turn of a response, for environments of several turns."""

    run_id: str
    """Id of the run, as in `runs`."""
    attempt: Int32
    """Number of the trainer's start that wrote the row, from 1; see `attempts`."""
    step: Int32
    """Step of training, from 1."""
    rollout_id: Int32
    """Number of the response, as in `rollouts`."""
    turn: Int32
    """Place in the response, from 0; the first follows the prompt."""
    sampled: bool
    """Whether the policy sampled it. False for context from the environment."""
    tool: str | None
    """Name, as the policy called it, of the tool that answered; NULL for all other turns."""
    text: str
    """Text of its tokens, including special tokens."""
    num_tokens: Int32
    """Tokens of the turn."""
    reward: float | None
    """Own reward of a policy's turn, in reward units, in addition to the response's reward; NULL if it has none."""
    error: str | None
    """Reason for an error as the call's answer, or of a failure of an agent's program after this turn; NULL without an
    error."""
    seconds: float | None
    """Wall time of the tool, seconds; NULL for all other turns."""
    restart: bool
    """Whether these given tokens replace all earlier context: an agent's program has rewritten its history, and the
    policy no longer sees the turns before."""


@dataclass(frozen=True, slots=True)
class EvaluationRow:
    """One measure of one checkpoint on one set."""

    run_id: str
    """Id of the run, as in `runs`."""
    fingerprint: str
    """Fingerprint of the evaluate stage that measured it; the run's state names the current one."""
    step: Int32
    """Step of training whose policy was measured; 0 for the base model."""
    dataset: str
    """Name of the evaluation set."""
    metric: str
    """mean@k: share of right answers among k responses; pass@k: whether one of k is right; maj@k: whether the answer
    that most of k give is right. score@k: mean score of k responses under a graded reward, the only measure of such a
    set. accuracy, bits_per_byte: measures of sets that are not answered. drift/reverse, drift/forward: divergence
    between the policy and the policy before training, nats per token; with _response at the end, per response."""
    value: float
    """Mean over the problems: a share, 0 to 1, for score@k a value in the reward's units, for drift nats."""
    ci_low: float
    """Lower end of the value's interval, at the level of `evaluation.confidence`."""
    ci_high: float
    """Upper end of that interval."""
    num_problems: Int32
    """Number of the set's problems that were answered."""
    samples_per_problem: Int32
    """Number of responses to each problem."""
    attempt: Int32 | None = None
    """Number of the trainer's start that measured it, or that exported the checkpoint for an evaluation during
    training; NULL if the evaluate stage measured it."""
    worst: float | None = None
    """Least possible value of score@k according to the reward; NULL if the reward declares none, and for other
    measures, whose least value is 0."""


@dataclass(frozen=True, slots=True)
class EvaluationSampleRow:
    """One response of an evaluation."""

    run_id: str
    """Id of the run, as in `runs`."""
    fingerprint: str
    """Fingerprint of the evaluate stage, as in `evaluations`."""
    step: Int32
    """Step of training whose policy answered; 0 for the base model."""
    dataset: str
    """Name of the evaluation set."""
    problem_id: str
    """Content hash of the problem."""
    sample: Int32
    """Number of the response to its problem, from 0."""
    prompt: str
    """Text of the prompt."""
    response: str
    """Text of the response: the policy's text and, with several turns, the environment's."""
    answer: str
    """Right answer of the problem."""
    extracted: str | None
    """Answer that the scorer extracted. For maj@k, responses with equal extracted answers count as one vote group."""
    score: float
    """Score, in reward units, without penalties."""
    correct: bool | None
    """Whether the scorer marked the answer right; NULL for a graded reward, which does not mark answers."""
    num_tokens: Int32
    """Tokens that the policy sampled."""
    finish_reason: str
    """stop: the response ended by itself; length: it was cut at the maximum length."""
    reward_error: str | None
    """Reason why the scorer failed; NULL if it did not."""
    attempt: Int32 | None = None
    """Number of the trainer's start that sampled it, or that exported the policy for an evaluation during training;
    NULL if the evaluate stage sampled it."""
    cluster: str | None = None
    """Value of the problem's field `data.evaluation[].cluster`, shared with related problems of the set; NULL if it has
    none."""
    verdicts: str | None = None
    """Answers of judges, JSON; the view `verdicts` has a row for each. NULL if no judge was asked."""
    turns: str | None = None
    """Turns of the response, JSON; the view `turns` has a row for each. NULL without an environment of several
    turns."""


@dataclass(frozen=True, slots=True)
class EvaluationScoreRow:
    """One metric on one item of an evaluation set that is not answered. An item is a question, a piece of text, or a
    document of an lm-eval task."""

    run_id: str
    """The run, as in `runs`."""
    fingerprint: str
    """Fingerprint of the evaluate stage, as in `evaluations`."""
    step: Int32
    """Step of training whose policy was measured. The base model has step 0."""
    dataset: str
    """Name of the evaluation set."""
    metric: str
    """Metric, as in `evaluations`."""
    item_id: str
    """Identity of the item in its set, the same for every policy."""
    value: float
    """Value of the metric: 1 or 0 for accuracy; for bits_per_byte, the item's own bits per byte."""
    num_bytes: Int32 | None
    """Bytes of a piece of text, by which bits_per_byte weights it; NULL for other metrics."""
    text: str
    """The question, or the piece of text."""
    response: str | None
    """The likeliest choice; NULL for a text."""
    answer: str | None
    """The right choice; NULL for a text."""
    attempt: Int32 | None = None
    """Which start of the trainer measured it, as in `evaluations`."""


@dataclass(frozen=True, slots=True)
class DriftSampleRow:
    """One response under the policy and under the policy before training, by the learner at temperature 1."""

    run_id: str
    """The run, as in `runs`."""
    fingerprint: str
    """Fingerprint of the evaluate stage, as in `evaluations`."""
    step: Int32
    """Step of training whose policy was measured."""
    dataset: str
    """Name of the evaluation set."""
    problem_id: str
    """Content hash of the problem."""
    sample: Int32
    """Number of the response to its problem, from 0."""
    direction: str
    """reverse: the policy sampled the response; forward: the policy before training did."""
    logprob: float
    """Logprob of the response's sampled tokens under the policy, together, nats."""
    initial_logprob: float
    """Logprob of these tokens under the policy before training, nats."""
    num_tokens: Int32
    """Sampled tokens of the response."""
    attempt: Int32 | None = None
    """Which start of the trainer measured it, as in `evaluations`."""
    cluster: str | None = None
    """Name of the problem's cluster in its set; NULL if it has none."""


@dataclass(frozen=True, slots=True)
class CheckpointRow:
    """One saved state of a run."""

    run_id: str
    """Id of the run, as in `runs`."""
    attempt: Int32
    """Number of the trainer's start that wrote the row, from 1; see `attempts`."""
    step: Int32
    """Step of training after which it was saved."""
    path: str
    """Path of its directory, relative to the run's directory."""
    kind: str
    """full: the whole state, for resuming; weights: the policy alone, as safetensors."""
    num_bytes: int
    """Size in bytes."""
    recorded_at: datetime
    """Time at which it was saved."""


@dataclass(frozen=True, slots=True)
class EventRow:
    """One event of a run."""

    run_id: str
    """Id of the run, as in `runs`."""
    attempt: Int32
    """Number of the trainer's start that wrote the row, from 1; see `attempts`. 0 for events of the process that
    executes the run."""
    step: Int32
    """Step of training at which it happened; 0 for events before the first step."""
    kind: str
    """started, resumed, not_packed, reference_moved, updates_skipped, checkpoint_saved, reward_failed, finished,
    sink_failed, ... A rolled_back counts even if the run later returns to an earlier step."""
    message: str
    """Description of the event."""
    recorded_at: datetime
    """Time of the event."""


TABLES = {
    "metrics": MetricRow,
    "rollouts": RolloutRow,
    "tokens": TokenRow,
    "turns": TurnRow,
    "evaluations": EvaluationRow,
    "evaluation_samples": EvaluationSampleRow,
    "evaluation_scores": EvaluationScoreRow,
    "drift_samples": DriftSampleRow,
    "checkpoints": CheckpointRow,
    "events": EventRow,
}
LARGE_TABLES = ("rollouts", "tokens", "turns")
"""Tables that make up most of a record. Each rank writes a share of them. From a remote record they are fetched only on
request."""
EVALUATED = ("evaluations", "evaluation_samples", "evaluation_scores", "drift_samples")
"""Tables that the evaluate stage writes; the trainer writes all of them."""
