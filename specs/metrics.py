"""Every metric that a step of training records, described once.

These entries define the metrics of guards, the choice of the best checkpoint, the progress lines, the charts of a
report and docs/metrics.md. To add a metric, add its entry here and its value in rpg/metrics.py.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One number per step in the table `metrics`."""

    name: str
    """Name in the table `metrics`."""
    title: str
    """Title of the metric's chart, without the unit."""
    meaning: str
    """Explanation in a sentence or two of Markdown, with formulas as code."""
    unit: str = ""
    """Unit; empty for a number without a unit, and for reward units."""
    better: Literal["higher", "lower", ""] = ""
    """The better direction, other things being equal; empty if neither is better."""
    least: float = 0.0
    """Lower bound of the values; minus infinity, NULL in SQL, if unbounded."""
    most: float = math.inf
    """Upper bound of the values; infinity, NULL in SQL, if unbounded."""
    short_name: str = ""
    """Name in progress lines. Empty if they leave the metric out."""
    guardable: bool = False
    """Whether guards and the choice of the best checkpoint may use the metric: it is recorded at every step, known to
    all ranks before the step's checkpoint is saved, and repeatable."""
    repeatable: bool = True
    """Whether a repeated run gives the same values. Times and memory do not."""
    charted: bool = False
    """Whether reports and comparisons of runs show the metric, in the order of this file. `pipelines/report/curves.py`
    draws it."""
    tells_outcome: bool = False
    """Whether the metric describes the trained policy, and not the speed. Reports compare its last steps between
    runs."""
    at_evaluations: bool = False
    """Whether only evaluated steps have the metric. Its value at the end of training is then the last one, not a mean
    over last steps."""
    recorded_with: str = ""
    """Key of the spec, or engine, that the metric requires; empty if it is always recorded."""

    @property
    def heading(self) -> str:
        """Returns the title with the unit."""
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
        meaning="Standard deviation of the rewards of the step's responses, ddof 1; 0 for a single response.",
        guardable=True,
    ),
    Metric(
        name="reward/error_fraction",
        title="Responses that could not be scored",
        meaning="Share of the step's responses on which the reward failed: it raised, hung, died, or its service did"
        " not answer. They count with reward 0, or the worst value of a graded reward. With dynamic sampling the"
        " share is over all responses sampled for the step.",
        unit="share",
        better="lower",
        most=1.0,
        guardable=True,
    ),
    Metric(
        name="kl/reverse",
        title="KL(policy || reference)",
        meaning="Unnormalised KL(π ‖ π_ref) of a token: the mean of `r log(π/π_ref) - r + π_ref/π_old`, r = π/π_old."
        " With `objective.kl: full` the mean of the exact divergences at the tokens' states.",
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
        " s = π_ref/π_old. With `objective.kl: full` the mean of the exact divergences at the tokens' states.",
        unit="nats",
        guardable=True,
        charted=True,
        tells_outcome=True,
    ),
    Metric(
        name="drift/reverse",
        title="Drift, KL(policy || policy before training)",
        meaning="Divergence from the policy before training, whatever the reference is: the sum of the log-ratios of"
        " the responses that the policy samples for the evaluation sets, divided by their number of tokens. Only at"
        " evaluated steps.",
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
        meaning="The same for responses that the policy before training sampled.",
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
        meaning="Variance over the tokens of the factor that ∇ log π has in the loss's negative gradient.",
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
        meaning="Mean length of the step's responses, counting the tokens that the policy sampled.",
        unit="tokens",
        short_name="length",
        guardable=True,
        charted=True,
        tells_outcome=True,
    ),
    Metric(
        name="response_length/max",
        title="Longest response",
        meaning="Length of the longest response, counting the tokens that the policy sampled.",
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
        meaning="Mean number of answered calls in a response.",
        unit="calls",
        charted=True,
        tells_outcome=True,
        recorded_with="rollout.rollouter",
    ),
    Metric(
        name="calls/error_fraction",
        title="Calls answered by an error",
        meaning="Share of the calls that were answered with an error: no such tool, wrong arguments, or the tool"
        " failed.",
        unit="share",
        better="lower",
        most=1.0,
        charted=True,
        recorded_with="rollout.rollouter",
    ),
    Metric(
        name="turn_reward/mean",
        title="Rewards of turns",
        meaning="Mean over the responses of the sum of the rewards that the environment gave to their turns.",
        unit="reward units",
        charted=True,
        recorded_with="rollout.rollouter",
    ),
    Metric(
        name="given_fraction",
        title="Given tokens",
        meaning="Share of the response tokens that the environment gave: context that is not trained on.",
        unit="share of tokens",
        most=1.0,
        charted=True,
        recorded_with="rollout.rollouter",
    ),
    Metric(
        name="zero_std_fraction",
        title="Groups without a signal",
        meaning="Share of the step's groups whose rewards are all equal, so that no response is better than another."
        " With `advantage.rewards: normalized_each`, the sums of the normalised terms are compared instead.",
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
        meaning="Sampled tokens of the groups thrown away.",
        unit="tokens",
        better="lower",
        recorded_with="rollout.dynamic_sampling",
    ),
    Metric(
        name="dynamic_sampling/filled_groups",
        title="Places filled with groups of equal scores",
        meaning="Groups of equal scores that were trained on, because `max_batches` rounds sampled too few"
        " groups of different scores.",
        unit="groups",
        better="lower",
        recorded_with="rollout.dynamic_sampling",
    ),
    Metric(
        name="dynamic_sampling/reward_mean",
        title="Score, mean of all that was sampled",
        meaning="Mean score of all responses sampled for the step, including those thrown away, without penalties.",
        better="higher",
        least=-math.inf,
        recorded_with="rollout.dynamic_sampling",
    ),
    Metric(
        name="dynamic_sampling/surplus_tokens",
        title="Tokens sampled ahead for nothing",
        meaning="Tokens sampled for prompts beyond the last one that the step needed, which `refill: stream` starts"
        " ahead of time. Their groups are not trained on, and the next step samples the prompts again. 0 with"
        " `refill: rounds`.",
        unit="tokens",
        better="lower",
        recorded_with="rollout.dynamic_sampling",
    ),
    Metric(
        name="partial/continued_fraction",
        title="Responses of several policies",
        meaning="Share of the step's responses that began in an earlier step and continued under later weights.",
        unit="share",
        most=1.0,
        recorded_with="rollout.partial",
    ),
    Metric(
        name="partial/unfinished",
        title="Unfinished responses",
        meaning="Responses under way when the step had its groups; they continue in the next step.",
        unit="responses",
        recorded_with="rollout.partial",
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
        meaning="Mean of the updates' losses, without the load-balancing loss. The value of a policy-gradient loss"
        " says nothing about progress.",
        least=-math.inf,
        guardable=True,
    ),
    Metric(
        name="aux_loss",
        title="Load-balancing loss",
        meaning="Mean over the updates of `experts * sum_e f_e P_e`: `f_e` is the share of an update's trained tokens"
        " that expert `e` is chosen for, `P_e` its mean probability, both over all layers. With an even load it is"
        " the number of experts per token. Not multiplied by `training.router_aux_loss_coef`, and not part of `loss`.",
        better="lower",
        recorded_with="a mixture of experts",
    ),
    Metric(
        name="experts/largest_load",
        title="Largest load of an expert",
        meaning="Tokens of the busiest expert of any layer, divided by the mean over its layer's experts: 1 if the load"
        " is even. The learner's routers count, or the sampler's with `rollout.replay_routing`.",
        better="lower",
        recorded_with="a mixture of experts",
    ),
    Metric(
        name="experts/idle_fraction",
        title="Idle experts",
        meaning="Share of the experts of all layers that got none of the step's trained tokens.",
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
        meaning="Updates of the step that were skipped because their gradients were not finite. Other metrics exclude"
        " them; a step whose updates were all skipped has no metrics of updates.",
        better="lower",
        recorded_with="`training.on_not_finite: skip`",
    ),
    Metric(
        name="ratio/mean",
        title="Mean importance ratio",
        meaning="Mean of r = π/π_old, per token, or per whole response if the objective's ratio is over responses.",
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
        meaning="Effective number of tokens under the ratios, as a share of the n tokens: `(Σ r)² / (n Σ r²)`.",
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
        meaning="Share of the tokens on which the bounds of `rollout.correction` acted; 0 without a correction.",
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
        meaning="Steps that the policy was trained for between sampling a token and training on it, mean over the"
        " tokens.",
        unit="steps",
        better="lower",
    ),
    Metric(
        name="staleness/max",
        title="Largest staleness",
        meaning="Staleness of the oldest token.",
        unit="steps",
        better="lower",
    ),
    Metric(
        name="reference/version",
        title="Version of the reference",
        meaning="Number of updates of the reference.",
        unit="moves",
    ),
    Metric(
        name="reference/age_steps",
        title="Age of the reference",
        meaning="Steps since the last update of the reference.",
        unit="steps",
        charted=True,
    ),
    Metric(
        name="learning_rate",
        title="Learning rate",
        meaning="Learning rate of the step's last update, after schedule and guards.",
        charted=True,
    ),
    Metric(
        name="clip/low",
        title="Lower margin of the clip",
        meaning="`objective.clip.low` at the step.",
        most=1.0,
        charted=True,
        recorded_with="a schedule or closed loop in `objective.clip.low`",
    ),
    Metric(
        name="clip/high",
        title="Upper margin of the clip",
        meaning="`objective.clip.high` at the step.",
        charted=True,
        recorded_with="a schedule or closed loop in `objective.clip.high`",
    ),
    Metric(
        name="clip/dual",
        title="Dual bound of the clip",
        meaning="`objective.clip.dual` at the step.",
        charted=True,
        recorded_with="a schedule in `objective.clip.dual`",
    ),
    Metric(
        name="max_ratio",
        title="Bound on the ratio",
        meaning="`objective.max_ratio` at the step.",
        charted=True,
        recorded_with="a schedule in `objective.max_ratio`",
    ),
    Metric(
        name="kl_coef",
        title="Weight of the divergence",
        meaning="`objective.kl_coef` at the step.",
        charted=True,
        recorded_with="a schedule or closed loop in `objective.kl_coef`",
    ),
    Metric(
        name="entropy_coef",
        title="Weight of the entropy bonus",
        meaning="`training.entropy_coef` at the step.",
        charted=True,
        recorded_with="a schedule or closed loop in `training.entropy_coef`",
    ),
    Metric(
        name="temperature",
        title="Sampling temperature",
        meaning="`rollout.temperature` at the step.",
        charted=True,
        recorded_with="a schedule in `rollout.temperature`",
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
        name="reference/ema_decay",
        title="Share of the reference that a move keeps",
        meaning="`reference.update.ema_decay` at the step.",
        unit="share",
        most=1.0,
        charted=True,
        recorded_with="a schedule in `reference.update.ema_decay`",
    ),
    Metric(
        name="time/rollout",
        title="Time of sampling",
        meaning="Sampling; with `rollout.max_staleness` only the time that training waited for it.",
        unit="seconds",
        better="lower",
        repeatable=False,
    ),
    Metric(
        name="time/reward",
        title="Time of scoring",
        meaning="Passing responses to the scorer and waiting for it; it works while other responses are sampled.",
        unit="seconds",
        better="lower",
        repeatable=False,
    ),
    Metric(
        name="time/tools",
        title="Time of tools",
        meaning="Answering calls, summed over all calls of the step; other responses are sampled at the same time.",
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
        meaning="Loading the new weights into the sampler, and verifying them.",
        unit="seconds",
        better="lower",
        repeatable=False,
    ),
    Metric(
        name="time/checkpoint",
        title="Time of saving",
        meaning="Exporting weights and copying the state; the state is written during the next step.",
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
        meaning="The whole step, from the end of the previous one.",
        unit="seconds",
        better="lower",
        repeatable=False,
        charted=True,
    ),
    Metric(
        name="tokens_per_second/rollout",
        title="Sampling",
        meaning="Response tokens sampled, divided by the time that sampling took. 0 if a resumed run used rollouts that"
        " had been sampled before.",
        unit="tokens a second",
        better="higher",
        repeatable=False,
        charted=True,
    ),
    Metric(
        name="tokens_per_second/train",
        title="Training",
        meaning="Tokens trained on, including prompts and given tokens, counted once per epoch, over `time/update`.",
        unit="tokens a second",
        better="higher",
        repeatable=False,
        charted=True,
    ),
    Metric(
        name="mfu",
        title="Share of the GPU's peak",
        meaning="Operations of the first rank's passes, forward and backward, without recomputed ones, as a share of"
        " its GPU's bfloat16 peak in `time/update`. `rpg plan` shows the expected value.",
        unit="share",
        better="higher",
        repeatable=False,
        charted=True,
        recorded_with="a GPU whose peak is known",
    ),
    Metric(
        name="memory/peak_gib",
        title="Peak memory",
        meaning="Peak of the first rank's process since its start. On a GPU it is torch's largest allocation minus"
        " the whole segments that a sleeping engine had released, a lower bound; on a CPU it is the largest resident"
        " set.",
        unit="GiB",
        better="lower",
        repeatable=False,
        charted=True,
    ),
)
"""All metrics, in the order of reports and docs."""

CHARTED = tuple(metric for metric in METRICS if metric.charted)
BY_NAME: Mapping[str, Metric] = {metric.name: metric for metric in METRICS}
REWARD = BY_NAME["reward/mean"]
"""The metric of the learning curve, and the default criterion for the best checkpoint."""


def progress_text(values: Mapping[str, float | None]) -> str:
    """Returns the text of a step on a progress line. Metrics without a value are left out.

    Example:
        >>> progress_text({"kl/reverse": 0.00123, "reward/mean": 0.4375, "loss": 0.1})
        'reward 0.4375  kl 0.00123'
    """
    shown = ((metric.short_name, values.get(metric.name)) for metric in METRICS if metric.short_name)
    return "  ".join(f"{short_name} {value:.4g}" for short_name, value in shown if value is not None)


def lower_is_better(measure: str) -> bool:
    """Returns whether lower values of an evaluation's measure are better, as for drift, bits per byte and perplexity.

    Example:
        >>> [lower_is_better(measure) for measure in ("drift/reverse", "bits_per_byte", "word_perplexity", "accuracy")]
        [True, True, True, False]
    """
    return measure.startswith("drift/") or measure == "bits_per_byte" or measure.endswith("perplexity")


def is_share(measure: str) -> bool:
    """Returns whether a measure of a set that is scored by likelihood is a share between 0 and 1."""
    return measure in ("accuracy", "acc", "acc_norm")
