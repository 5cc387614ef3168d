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

EVALUATION = "evaluation"
"""The `kind` in the documents of a run that measures a model as it is; those of a run that trains have none."""


@dataclass(frozen=True, slots=True)
class MetricRow:
    """One figure of one step."""

    run_id: str
    """The run, as in `runs`."""
    attempt: Int32
    """Which start of the trainer wrote the row, from 1; see `attempts`."""
    step: Int32
    """Step of training, from 1."""
    name: str
    """A name of the page Metrics, such as `reward/mean`."""
    value: float
    """In the metric's unit, see the page Metrics."""
    recorded_at: datetime
    """When the step's figures were written."""


@dataclass(frozen=True, slots=True)
class RolloutRow:
    """One response."""

    run_id: str
    """The run, as in `runs`."""
    attempt: Int32
    """Which start of the trainer wrote the row, from 1; see `attempts`."""
    step: Int32
    """Step of training that sampled it for its batch, from 1."""
    rollout_id: Int32
    """Position in the step's batch, from 0."""
    prompt_id: str
    """Content hash of the problem."""
    group_id: Int32
    """Responses to one prompt share it; numbered from 0 in each step."""
    prompt: str
    """The text that the policy was given."""
    response: str
    """The text that followed: what the policy sampled and, in several turns, what its environment said."""
    reward: float
    """Reward units; penalties and rewards of turns included."""
    correct: bool | None
    """Whether the scorer takes the answer for right, penalties aside; NULL of a graded reward, which does not say."""
    advantage: float
    """Reward units: the mean advantage of its tokens."""
    num_tokens: Int32
    """Tokens that the policy sampled. Those that its environment gave are rows of `tokens` and not counted here."""
    finish_reason: str
    """stop: the response ended by itself; length: it was cut at the maximum length."""
    policy_version: Int32
    """Version of the policy that sampled it: how many times weights had been loaded."""
    trained_version: Int32
    """Version of the policy that the step began to train; less policy_version, the staleness in steps."""
    reference_version: Int32
    """Version of the reference at that step: how often it had moved."""
    reward_error: str | None
    """Why the scorer failed; NULL where it did not."""
    reward_terms: str | None = None
    """Terms of a weighted_sum, JSON: {"NAME": [value, weight]}. NULL of other rewards, and where the scorer failed."""
    verdicts: str | None = None
    """What judges said, JSON; the view `verdicts` has a row for each. NULL where none was asked."""


@dataclass(frozen=True, slots=True)
class TokenRow:
    """One response token. All logprobs in nats. Of a token that the policy did not sample none is known."""

    run_id: str
    """The run, as in `runs`."""
    attempt: Int32
    """Which start of the trainer wrote the row, from 1; see `attempts`."""
    step: Int32
    """Step of training, from 1."""
    rollout_id: Int32
    """The response, as in `rollouts`."""
    position: Int32
    """Place in the response, from 0; given tokens are counted."""
    token_id: Int32
    """Number of the token in the tokenizer's vocabulary."""
    logprob: Float32 | None
    """log π: of the policy at the update that last trained on the token, nats; NULL if none did."""
    old_logprob: Float32 | None
    """log π_old: of the policy at the start of the step, by the learner, nats."""
    rollout_logprob: Float32 | None
    """Logprob under the policy that sampled, by the engine, nats."""
    ref_logprob: Float32 | None
    """log π_ref: of the reference policy, nats."""
    ratio: Float32 | None
    """exp(logprob - old_logprob), without a unit; of the whole response where the objective takes it so."""
    clipped: bool | None
    """Whether a bound of the clip acted on the token."""
    entropy: Float32 | None
    """Entropy of the distribution of the next token, at the sampling temperature, nats."""
    sampled: bool
    """Whether the policy sampled it. False: given by the environment of several turns (what a tool returned, what a
    user said), and context alone."""


@dataclass(frozen=True, slots=True)
class TurnRow:
    """One turn of a response, where the environment gives turns."""

    run_id: str
    """The run, as in `runs`."""
    attempt: Int32
    """Which start of the trainer wrote the row, from 1; see `attempts`."""
    step: Int32
    """Step of training, from 1."""
    rollout_id: Int32
    """The response, as in `rollouts`."""
    turn: Int32
    """Place in the response, from 0; the first follows the prompt."""
    sampled: bool
    """Whether the policy sampled it. False: given by the environment, and context alone."""
    tool: str | None
    """Name of the tool whose answer it is, as the policy called it; NULL of all other turns."""
    text: str
    """Its tokens as text, special tokens included."""
    num_tokens: Int32
    """Tokens of the turn."""
    reward: float | None
    """Reward of a turn of the policy by itself, reward units, beside that of the response; NULL: it has none."""
    error: str | None
    """Why the call was answered by an error, or how an agent's program failed behind this turn; NULL: nothing went
    wrong."""
    seconds: float | None
    """Wall time that the tool took; NULL of all other turns."""
    restart: bool
    """Whether the given tokens are the whole context of what follows: an agent's program has written its history anew,
    and nothing before them is seen from here on."""


@dataclass(frozen=True, slots=True)
class EvaluationRow:
    """One measure of one checkpoint on one set."""

    run_id: str
    """The run, as in `runs`."""
    fingerprint: str
    """Fingerprint of the evaluate stage whose settings it was measured with; the run's state names the current one."""
    step: Int32
    """Step of training whose policy was measured; 0: the base model."""
    dataset: str
    """Name of the evaluation set."""
    metric: str
    """mean@k: share of right answers among k responses; pass@k: whether one of k is right; maj@k: whether the answer
    that most of k give is right. score@k: mean score of k responses, of a graded reward; such a set has no other. Of
    sets that are scored by likelihood: accuracy, or bits_per_byte. drift/reverse, drift/forward: divergence between the
    policy and the policy before training, nats per token; with _response at the end, per response."""
    value: float
    """Mean over the problems: a share, 0 to 1; of score@k in the reward's own units, of drift in nats."""
    ci_low: float
    """Lower end of the interval of the value, at the level of `evaluation.confidence`."""
    ci_high: float
    """Upper end of that interval."""
    num_problems: Int32
    """Problems of the set that were answered."""
    samples_per_problem: Int32
    """Responses to each problem."""
    attempt: Int32 | None = None
    """Which start of the trainer measured it, or exported what was measured while training went on; NULL where the
    evaluate stage did."""
    worst: float | None = None
    """Least value of score@k that the reward says there can be; NULL: it says none, and of other measures, where it
    is 0."""


@dataclass(frozen=True, slots=True)
class EvaluationSampleRow:
    """One response of an evaluation."""

    run_id: str
    """The run, as in `runs`."""
    fingerprint: str
    """Fingerprint of the evaluate stage, as in `evaluations`."""
    step: Int32
    """Step of training whose policy answered; 0: the base model."""
    dataset: str
    """Name of the evaluation set."""
    problem_id: str
    """Content hash of the problem."""
    sample: Int32
    """Number of the response to its problem, from 0."""
    prompt: str
    """The text that the policy was given."""
    response: str
    """The text that followed: what the policy sampled and, in several turns, what its environment said."""
    answer: str
    """The right answer."""
    extracted: str | None
    """What the scorer read as the answer; responses that agree in it vote together in maj@k."""
    score: float
    """What the scorer gives, reward units; no penalties."""
    correct: bool | None
    """Whether the scorer takes the answer for right; NULL of a graded reward, which does not say."""
    num_tokens: Int32
    """Tokens that the policy sampled."""
    finish_reason: str
    """stop: the response ended by itself; length: it was cut at the maximum length."""
    reward_error: str | None
    """Why the scorer failed; NULL where it did not."""
    attempt: Int32 | None = None
    """Which start of the trainer asked, or exported the policy that was asked while training went on; NULL where the
    evaluate stage did."""
    cluster: str | None = None
    """What the problem shares with others of its set, as `data.evaluation[].cluster` has it; NULL: nothing."""
    verdicts: str | None = None
    """What judges said, JSON; the view `verdicts` has a row for each. NULL where none was asked."""
    turns: str | None = None
    """Turns of the response, JSON; the view `turns` has a row for each. NULL where no environment gives turns."""


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
    """Value of the metric: of accuracy 1 or 0, of bits_per_byte the item's own bits per byte."""
    num_bytes: Int32 | None
    """Bytes of a piece of text, by which bits_per_byte weights it; NULL of other metrics."""
    text: str
    """The question, or the piece of text."""
    response: str | None
    """The likeliest choice; NULL of a text."""
    answer: str | None
    """The right choice; NULL of a text."""
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
    recorded_at: datetime
    """When it was measured."""
    attempt: Int32 | None = None
    """Which start of the trainer measured it, as in `evaluations`."""
    cluster: str | None = None
    """Name of the problem's cluster in its set; NULL if it has none."""


@dataclass(frozen=True, slots=True)
class CheckpointRow:
    """One saved state of a run."""

    run_id: str
    """The run, as in `runs`."""
    attempt: Int32
    """Which start of the trainer wrote the row, from 1; see `attempts`."""
    step: Int32
    """Step of training after which it was saved."""
    path: str
    """Path of its directory, relative to the run's directory."""
    kind: str
    """full: everything needed to go on; weights: the policy alone, as safetensors."""
    num_bytes: int
    """Size, bytes."""
    recorded_at: datetime
    """When it was saved."""


@dataclass(frozen=True, slots=True)
class EventRow:
    """Something that happened to a run."""

    run_id: str
    """The run, as in `runs`."""
    attempt: Int32
    """Which start of the trainer wrote the row, from 1; see `attempts`. 0: none did, but what executes the run."""
    step: Int32
    """Step of training at which it happened; 0: before the first."""
    kind: str
    """started, resumed, not_packed, reference_moved, updates_skipped, checkpoint_saved, reward_failed, finished,
    sink_failed, ... A rolled_back counts even where the run later goes back to before its step."""
    message: str
    """What happened, in words."""
    recorded_at: datetime
    """When it happened."""


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
"""Tables that are most of a record. Each rank writes a share of them. Of a record elsewhere they are fetched only where
somebody asks for them."""
EVALUATED = ("evaluations", "evaluation_samples", "evaluation_scores", "drift_samples")
"""Tables that the evaluate stage writes; the trainer writes all of them."""
