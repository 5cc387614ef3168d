"""Every metric that a step of training records, described once.

What a guard may watch, which checkpoint is the best, the progress lines, the charts of a report and docs/metrics.md all
follow from these entries. To add a metric, add its entry here and its value in rpg/metrics.py.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One number a step, as it stands in the table `metrics`."""

    name: str
    """Name in the table `metrics`."""
    title: str
    """Title of its chart, without the unit."""
    meaning: str
    """A sentence or two of Markdown; formulas as code."""
    unit: str = ""
    """Empty for a number without one, and for the reward's own."""
    better: Literal["higher", "lower", ""] = ""
    """Which way is better, other things equal; empty where neither is."""
    least: float = 0.0
    """No value is below it; minus infinity, in SQL NULL: there is no such bound."""
    most: float = math.inf
    """No value is above it; infinity, in SQL NULL: there is no such bound."""
    short_name: str = ""
    """In the progress lines; empty: they leave it out."""
    guardable: bool = False
    """A guard may watch it, and the best checkpoint may be chosen by it: it is recorded at every step, all ranks know
    it before the step's checkpoint is saved, and it is repeatable."""
    repeatable: bool = True
    """A repeated run gives the same values; times and memory differ."""
    charted: bool = False
    """Reports and comparisons of runs show it, in the order of this file; `pipelines/report/curves.py` draws it."""
    tells_outcome: bool = False
    """It says what the policy became, not how fast: a report holds its last steps side by side."""
    at_evaluations: bool = False
    """It is recorded at evaluated steps only; at the end of training it is its last value, not a mean of last steps."""
    recorded_with: str = ""
    """The spec's key or engine without which it is not recorded; empty: it always is."""

    @property
    def heading(self) -> str:
        """The title with the unit."""
        return f"{self.title}, {self.unit}" if self.unit else self.title


METRICS: tuple[Metric, ...] = (
    Metric(
        name="reward/mean",
        title="Reward, mean of a step",
        meaning="Mean reward of the step's responses, penalties included.",
        better="higher",
        least=-math.inf,
        short_name="reward",
        guardable=True,
        charted=True,
        tells_outcome=True,
    ),
    Metric(
        name="reward/std",
        title="Spread of the reward",
        meaning="Standard deviation of the rewards of the step's responses, ddof 1; 0 of a single response.",
        guardable=True,
    ),
    Metric(
        name="reward/error_fraction",
        title="Responses that could not be scored",
        meaning="Share of the step's responses on which the reward failed: it raised, hung, died, or what it asks did"
        " not answer. They count with reward 0, or the worst value of a graded one. With dynamic sampling, of all that"
        " was sampled for the step.",
        unit="share",
        better="lower",
        most=1.0,
        guardable=True,
    ),
    Metric(
        name="kl/reverse",
        title="KL(policy || reference)",
        meaning="Unnormalised KL(π ‖ π_ref) of a token: the mean of `r log(π/π_ref) - r + π_ref/π_old`, r = π/π_old.",
        unit="nats",
        short_name="kl",
        guardable=True,
        charted=True,
        tells_outcome=True,
    ),
    Metric(
        name="kl/forward",
        title="KL(reference || policy)",
        meaning="Unnormalised KL(π_ref ‖ π) of a token: the mean of `r - s + s log(π_ref/π)`, r = π/π_old,"
        " s = π_ref/π_old.",
        unit="nats",
        guardable=True,
        charted=True,
        tells_outcome=True,
    ),
    Metric(
        name="drift/reverse",
        title="Drift, KL(policy || policy before training)",
        meaning="Divergence from the policy before training, whatever the reference: the summed log-ratio of the"
        " responses that the policy samples to the evaluation sets, over their tokens. At the evaluated steps only.",
        unit="nats a token",
        better="lower",
        least=-math.inf,
        charted=True,
        tells_outcome=True,
        at_evaluations=True,
        recorded_with="evaluation.drift",
    ),
    Metric(
        name="drift/forward",
        title="Drift, KL(policy before training || policy)",
        meaning="The same of the responses that the policy before training sampled.",
        unit="nats a token",
        better="lower",
        least=-math.inf,
        charted=True,
        tells_outcome=True,
        at_evaluations=True,
        recorded_with="evaluation.drift",
    ),
    Metric(
        name="drift/reverse_response",
        title="Drift of a whole response, reverse",
        meaning="`drift/reverse` of a whole response: the mean over the responses.",
        unit="nats a response",
        better="lower",
        least=-math.inf,
        at_evaluations=True,
        recorded_with="evaluation.drift",
    ),
    Metric(
        name="drift/forward_response",
        title="Drift of a whole response, forward",
        meaning="`drift/forward` of a whole response: the mean over the responses.",
        unit="nats a response",
        better="lower",
        least=-math.inf,
        at_evaluations=True,
        recorded_with="evaluation.drift",
    ),
    Metric(
        name="weight/variance",
        title="Variance of a token's gradient weight",
        meaning="Variance over the tokens of the factor of ∇ log π in minus the loss's gradient.",
        better="lower",
        guardable=True,
        charted=True,
        tells_outcome=True,
    ),
    Metric(
        name="entropy",
        title="Entropy",
        meaning="Mean entropy of the policy at the sampled tokens, at the sampling temperature.",
        unit="nats a token",
        short_name="entropy",
        guardable=True,
        charted=True,
        tells_outcome=True,
    ),
    Metric(
        name="clip_fraction/high",
        title="Clipped above",
        meaning="Share of the tokens on which the upper bound of the clip acts.",
        unit="share of tokens",
        most=1.0,
        guardable=True,
        charted=True,
        tells_outcome=True,
    ),
    Metric(
        name="clip_fraction/low",
        title="Clipped below",
        meaning="Share of the tokens on which the lower bound of the clip acts.",
        unit="share of tokens",
        most=1.0,
        guardable=True,
        charted=True,
        tells_outcome=True,
    ),
    Metric(
        name="clip_fraction/dual",
        title="Clipped by the dual bound",
        meaning="Share of the tokens on which the dual bound acts: a negative advantage and a ratio above it.",
        unit="share of tokens",
        most=1.0,
        guardable=True,
        charted=True,
    ),
    Metric(
        name="response_length/mean",
        title="Response length",
        meaning="Mean length of the step's responses: tokens that the policy sampled.",
        unit="tokens",
        short_name="length",
        guardable=True,
        charted=True,
        tells_outcome=True,
    ),
    Metric(
        name="response_length/max",
        title="Longest response",
        meaning="Length of the longest: tokens that the policy sampled.",
        unit="tokens",
        guardable=True,
    ),
    Metric(
        name="truncated_fraction",
        title="Cut off at the maximum length",
        meaning="Share of the step's responses that reached `rollout.max_response_length`.",
        unit="share",
        better="lower",
        most=1.0,
        guardable=True,
        charted=True,
    ),
    Metric(
        name="turns/mean",
        title="Turns of the policy",
        meaning="Mean number of turns that the policy sampled in a response.",
        unit="turns",
        charted=True,
        tells_outcome=True,
        recorded_with="rollout.rollouter",
    ),
    Metric(
        name="calls/mean",
        title="Calls of tools",
        meaning="Mean number of calls in a response that were answered.",
        unit="calls",
        charted=True,
        tells_outcome=True,
        recorded_with="rollout.rollouter",
    ),
    Metric(
        name="calls/error_fraction",
        title="Calls answered by an error",
        meaning="Share of the calls that were answered by an error: no such tool, wrong arguments, or the tool failed.",
        unit="share",
        better="lower",
        most=1.0,
        charted=True,
        recorded_with="rollout.rollouter",
    ),
    Metric(
        name="turn_reward/mean",
        title="Rewards of turns",
        meaning="Mean over the responses of the rewards that the environment gave their turns, together.",
        unit="reward units",
        charted=True,
        recorded_with="rollout.rollouter",
    ),
    Metric(
        name="given_fraction",
        title="Given tokens",
        meaning="Share of the response tokens that the environment gave: context, which nothing trains on.",
        unit="share of tokens",
        most=1.0,
        charted=True,
        recorded_with="rollout.rollouter",
    ),
    Metric(
        name="zero_std_fraction",
        title="Groups without a signal",
        meaning="Share of the step's groups whose rewards are all equal: within the group nothing is better. With"
        " `advantage.rewards: normalized_each` what counts are the normalised sums of the terms.",
        unit="share",
        better="lower",
        most=1.0,
        guardable=True,
        charted=True,
    ),
    Metric(
        name="dynamic_sampling/batches",
        title="Rounds of dynamic sampling",
        meaning="Rounds of prompts sampled to fill the step.",
        unit="rounds",
        better="lower",
        recorded_with="rollout.dynamic_sampling",
    ),
    Metric(
        name="dynamic_sampling/dropped_groups",
        title="Groups thrown away",
        meaning="Groups of equal scores that were sampled and not trained on.",
        unit="groups",
        better="lower",
        recorded_with="rollout.dynamic_sampling",
    ),
    Metric(
        name="dynamic_sampling/dropped_tokens",
        title="Tokens thrown away",
        meaning="Sampled tokens of those groups.",
        unit="tokens",
        better="lower",
        recorded_with="rollout.dynamic_sampling",
    ),
    Metric(
        name="dynamic_sampling/filled_groups",
        title="Places filled with groups of equal scores",
        meaning="Groups of equal scores that were trained on, because `max_batches` rounds gave too few others.",
        unit="groups",
        better="lower",
        recorded_with="rollout.dynamic_sampling",
    ),
    Metric(
        name="dynamic_sampling/reward_mean",
        title="Score, mean of all that was sampled",
        meaning="Mean score of all responses sampled for the step, those thrown away included; without penalties.",
        better="higher",
        least=-math.inf,
        recorded_with="rollout.dynamic_sampling",
    ),
    Metric(
        name="dynamic_sampling/surplus_tokens",
        title="Tokens sampled ahead for nothing",
        meaning="Tokens sampled for prompts after the last one that the step needed, which `refill: stream` begins"
        " before it knows. Their groups are not trained on, and the prompts are taken again by the next step. 0 with"
        " `refill: rounds`.",
        unit="tokens",
        better="lower",
        recorded_with="rollout.dynamic_sampling",
    ),
    Metric(
        name="trained_fraction",
        title="Tokens computed",
        meaning="Share of the step's response tokens that went through forward and backward.",
        unit="share",
        most=1.0,
        recorded_with="training.skip_zero_advantage",
    ),
    Metric(
        name="loss",
        title="Loss",
        meaning="Mean of the updates' losses, without that which balances experts. The value of a policy-gradient loss"
        " says nothing about progress.",
        least=-math.inf,
        guardable=True,
    ),
    Metric(
        name="aux_loss",
        title="Load-balancing loss",
        meaning="Mean over the updates of `experts * sum_e f_e P_e`: `f_e` is the share of an update's trained tokens"
        " that expert `e` is chosen for, `P_e` its mean probability, both over all layers. Of an even load it is the"
        " number of experts a token. Not multiplied by `training.router_aux_loss_coef`, and not part of `loss`.",
        better="lower",
        recorded_with="a mixture of experts",
    ),
    Metric(
        name="experts/largest_load",
        title="Largest load of an expert",
        meaning="Tokens of the busiest expert of any layer, over the mean of its layer's experts: 1 where the load is"
        " even. By the learner's routers, or with `rollout.replay_routing` by the sampler's.",
        better="lower",
        recorded_with="a mixture of experts",
    ),
    Metric(
        name="experts/idle_fraction",
        title="Idle experts",
        meaning="Share of the experts of all layers that none of the step's trained tokens was sent to.",
        unit="share",
        better="lower",
        most=1.0,
        recorded_with="a mixture of experts",
    ),
    Metric(
        name="grad_norm",
        title="Gradient norm before clipping",
        meaning="Mean over the updates of the gradient's global norm, before it is scaled down to `max_grad_norm`.",
        guardable=True,
        charted=True,
        tells_outcome=True,
    ),
    Metric(
        name="skipped_updates",
        title="Updates skipped",
        meaning="Updates of the step that were not made, since their gradients were not finite. They are in no other"
        " metric; a step without any other update has no metrics of updates.",
        better="lower",
        recorded_with="`training.on_not_finite: skip`",
    ),
    Metric(
        name="ratio/mean",
        title="Mean importance ratio",
        meaning="Mean of r = π/π_old: of a token, or of the whole response where the objective takes it so.",
        guardable=True,
    ),
    Metric(
        name="ratio/max",
        title="Largest importance ratio",
        meaning="The largest r of a token.",
        better="lower",
        guardable=True,
        charted=True,
    ),
    Metric(
        name="ratio/ess",
        title="Effective sample size",
        meaning="Share of the n tokens that the ratios leave: `(Σ r)² / (n Σ r²)`.",
        unit="share",
        better="higher",
        most=1.0,
        guardable=True,
        charted=True,
        tells_outcome=True,
    ),
    Metric(
        name="kl/behaviour",
        title="KL to the sampling policy",
        meaning="KL(π_old ‖ π) of a token: the mean of `r - 1 - log r`, r = π/π_old.",
        unit="nats",
        guardable=True,
        charted=True,
    ),
    Metric(
        name="kl/rollout",
        title="KL from the engine to the learner",
        meaning="KL(π_rollout ‖ π_old) of a token: the mean of `q - 1 - log q`, q = π_old/π_rollout.",
        unit="nats",
        better="lower",
    ),
    Metric(
        name="rollout_ratio/mean",
        title="Mean ratio of learner to engine",
        meaning="Mean of q = π_old/π_rollout.",
    ),
    Metric(
        name="rollout_ratio/max",
        title="Largest ratio of learner to engine",
        meaning="The largest q of a token.",
        better="lower",
    ),
    Metric(
        name="clip_fraction/rollout",
        title="Corrected at the bound",
        meaning="Share of the tokens whose weight the bound of `rollout.correction` changed; 0 without a correction.",
        unit="share of tokens",
        better="lower",
        most=1.0,
    ),
    Metric(
        name="sentinel/difference",
        title="Engine and learner apart on the probe",
        meaning="Largest difference of a logprob of the probe prompt after the step's weights were loaded.",
        unit="nats",
        better="lower",
        charted=True,
        recorded_with="a vllm engine",
    ),
    Metric(
        name="sentinel/mean",
        title="Engine and learner apart on the probe, mean",
        meaning="Mean difference of the logprobs of the probe prompt after the step's weights were loaded.",
        unit="nats",
        better="lower",
        recorded_with="a vllm engine",
    ),
    Metric(
        name="staleness/mean",
        title="Staleness",
        meaning="Steps that the policy was trained for between sampling the responses and training on them.",
        unit="steps",
        better="lower",
    ),
    Metric(
        name="staleness/max",
        title="Largest staleness",
        meaning="The same, of the oldest response.",
        unit="steps",
        better="lower",
    ),
    Metric(
        name="reference/version",
        title="Version of the reference",
        meaning="How often the reference has moved.",
        unit="moves",
    ),
    Metric(
        name="reference/age_steps",
        title="Age of the reference",
        meaning="Steps since the reference moved.",
        unit="steps",
        charted=True,
    ),
    Metric(
        name="learning_rate",
        title="Learning rate",
        meaning="Of the step's last update, after schedule and guards.",
        charted=True,
    ),
    Metric(
        name="clip/low",
        title="Lower margin of the clip",
        meaning="`objective.clip.low` at the step.",
        most=1.0,
        charted=True,
        recorded_with="a schedule in `objective.clip.low`",
    ),
    Metric(
        name="clip/high",
        title="Upper margin of the clip",
        meaning="`objective.clip.high` at the step.",
        charted=True,
        recorded_with="a schedule in `objective.clip.high`",
    ),
    Metric(
        name="kl_coef",
        title="Weight of the divergence",
        meaning="`objective.kl_coef` at the step.",
        charted=True,
        recorded_with="a schedule in `objective.kl_coef`",
    ),
    Metric(
        name="reference/every_steps",
        title="Steps between two moves of the reference",
        meaning="`reference.update.every_steps` at the step.",
        unit="steps",
        charted=True,
        recorded_with="a schedule in `reference.update.every_steps`",
    ),
    Metric(
        name="time/rollout",
        title="Time of sampling",
        meaning="Sampling; with `rollout.max_staleness` only what training waited for it.",
        unit="seconds",
        better="lower",
        repeatable=False,
    ),
    Metric(
        name="time/reward",
        title="Time of scoring",
        meaning="Handing responses to the scorer and waiting for it; it works while other responses are sampled.",
        unit="seconds",
        better="lower",
        repeatable=False,
    ),
    Metric(
        name="time/tools",
        title="Time of tools",
        meaning="Answering calls, all calls of the step added up; other responses are sampled meanwhile.",
        unit="seconds",
        better="lower",
        repeatable=False,
        recorded_with="rollout.rollouter",
    ),
    Metric(
        name="time/logprobs",
        title="Time of old and reference logprobs",
        meaning="Cutting minibatches and recomputing old and reference logprobs.",
        unit="seconds",
        better="lower",
        repeatable=False,
    ),
    Metric(
        name="time/update",
        title="Time of the updates",
        meaning="Forward, backward and optimizer.",
        unit="seconds",
        better="lower",
        repeatable=False,
    ),
    Metric(
        name="time/sync",
        title="Time of loading weights",
        meaning="Loading the new weights into the sampler, and proving that they arrived.",
        unit="seconds",
        better="lower",
        repeatable=False,
    ),
    Metric(
        name="time/checkpoint",
        title="Time of saving",
        meaning="Exporting weights and copying the state; writing it goes on beside the next step.",
        unit="seconds",
        better="lower",
        repeatable=False,
    ),
    Metric(
        name="time/evaluate",
        title="Time to evaluate",
        meaning="Sampling and scoring the answers to the evaluation sets, in the steps that are evaluated.",
        unit="seconds",
        better="lower",
        repeatable=False,
        recorded_with="evaluation.every_steps",
    ),
    Metric(
        name="time/step",
        title="Time of a step",
        meaning="The whole step, from the end of the one before.",
        unit="seconds",
        better="lower",
        repeatable=False,
        charted=True,
    ),
    Metric(
        name="tokens_per_second/rollout",
        title="Sampling",
        meaning="Response tokens sampled, over the time that sampling took. 0 where a run went on with rollouts that"
        " were sampled before.",
        unit="tokens a second",
        better="higher",
        repeatable=False,
        charted=True,
    ),
    Metric(
        name="tokens_per_second/train",
        title="Training",
        meaning="Tokens trained on, prompts and given tokens included, once an epoch, over `time/update`.",
        unit="tokens a second",
        better="higher",
        repeatable=False,
        charted=True,
    ),
    Metric(
        name="mfu",
        title="Share of the GPU's peak",
        meaning="Operations of the first rank's passes, forward and backward, without those that are recomputed, over"
        " what its GPU could do in `time/update` at its bfloat16 peak. `rpg plan` says what to expect.",
        unit="share",
        better="higher",
        repeatable=False,
        charted=True,
        recorded_with="a GPU whose peak is known",
    ),
    Metric(
        name="memory/peak_gib",
        title="Peak memory",
        meaning="Of the first rank's process since it began: on a GPU what torch allocated at most, less the whole"
        " segments that a sleeping engine had given back, so at least that much; on a CPU its largest resident set.",
        unit="GiB",
        better="lower",
        repeatable=False,
        charted=True,
    ),
)
"""All of them, in the order in which reports and docs show them."""

CHARTED = tuple(metric for metric in METRICS if metric.charted)
BY_NAME: Mapping[str, Metric] = {metric.name: metric for metric in METRICS}
REWARD = BY_NAME["reward/mean"]
"""What training raises: the learning curve, and what the best checkpoint is chosen by where the spec names no other."""


def progress_text(values: Mapping[str, float | None]) -> str:
    """Text of a step on a progress line; metrics that have no value are left out.

    Example:
        >>> progress_text({"kl/reverse": 0.00123, "reward/mean": 0.4375, "loss": 0.1})
        'reward 0.4375  kl 0.00123'
    """
    shown = ((metric.short_name, values.get(metric.name)) for metric in METRICS if metric.short_name)
    return "  ".join(f"{short_name} {value:.4g}" for short_name, value in shown if value is not None)


def lower_is_better(measure: str) -> bool:
    """Whether less of a measure of an evaluation is better: of drift, of bits per byte, of a perplexity.

    Example:
        >>> [lower_is_better(measure) for measure in ("drift/reverse", "bits_per_byte", "word_perplexity", "accuracy")]
        [True, True, True, False]
    """
    return measure.startswith("drift/") or measure == "bits_per_byte" or measure.endswith("perplexity")


def is_share(measure: str) -> bool:
    """Whether a measure of a set that is not answered is a share between 0 and 1."""
    return measure == "accuracy"
