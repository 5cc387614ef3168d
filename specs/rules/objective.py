"""Knobs of the objective, its advantages and its reference that cannot act, or act otherwise than they read."""

from collections.abc import Iterator

from specs.errors import Issue
from specs.schema.clip import DualClip, NoClip, TruncateClip
from specs.schema.experiment import Experiment
from specs.schema.objective import FormulaObjective, PublishedObjective, RegularizedObjective
from specs.schema.schedule import largest


def idle_penalty(experiment: Experiment) -> Iterator[Issue]:
    """How a divergence is estimated, without one; and one between a policy and itself."""
    objective = experiment.objective
    if not isinstance(objective, PublishedObjective):
        return
    kl_coef = largest(objective.kl_coef)
    if kl_coef == 0:
        for name in ("kl_estimator", "kl_in", "kl_weighted"):
            if getattr(objective, name) != type(objective).model_fields[name].default:
                yield Issue(f"{name} has no effect", ("objective", name), given="kl_coef 0", hint="raise kl_coef")
    elif objective.penalizes_reward and experiment.reference.source == "behaviour":
        yield Issue(
            "the divergence is always 0",
            ("objective", "kl_in"),
            given="reward, where the policy that sampled is compared with the reference: with source behaviour, itself",
            hint="take reference.source initial or snapshot, or write kl_in: loss",
        )
    elif kl_coef < 1e-2 and experiment.reference.source == "behaviour":
        yield Issue(
            "the divergence is invisible beside the reward",
            ("objective", "kl_coef"),
            given=f"{kl_coef:g} from the behaviour policy, which moves every step",
            hint="1e-2 or more, or a reference that stays: source snapshot or initial",
        )


def idle_clip_knobs(experiment: Experiment) -> Iterator[Issue]:
    """Knobs of a dual clip for a divergence that is not there, or that it cannot drop."""
    objective = experiment.objective
    if not isinstance(objective, RegularizedObjective) or not isinstance(objective.clip, DualClip):
        return
    clip, path = objective.clip, ("objective", "clip")
    if not objective.needs_reference:
        given = "divergence none" if objective.divergence == "none" else "kl_coef 0"
        if clip.keep_divergence:
            yield Issue("keep_divergence has no effect", (*path, "keep_divergence"), given=given)
        if clip.branch == "regularized":
            yield Issue("branch has no effect", (*path, "branch"), given=f"regularized, with {given}")


def idle_parameters(experiment: Experiment) -> Iterator[Issue]:
    """Numbers of a formula that it does not read."""
    objective = experiment.objective
    if not isinstance(objective, FormulaObjective):
        return
    for name in objective.parameters:
        if name not in objective.names():
            yield Issue("no formula reads it", ("objective", "parameters", name), hint="leave it out")


def margins_like_bounds(experiment: Experiment) -> Iterator[Issue]:
    """Margins of a clip that were most likely meant as bounds of the ratio: 0.8 and 1.28 for 0.2 and 0.28."""
    clip = getattr(experiment.objective, "clip", None)
    if clip is None or isinstance(clip, NoClip):
        return
    low, high = largest(clip.low), largest(clip.high)
    like_bounds = (0.5 < low <= 0.95, 1 < high <= 10)  # beyond these a bound is meant to be out of reach
    # A truncated ratio may well reach 5: importance sampling is truncated so.
    if all(like_bounds) or (any(like_bounds) and not isinstance(clip, TruncateClip)):
        meant_low, meant_high = 1 - low if like_bounds[0] else low, high - 1 if like_bounds[1] else high
        bounds = f"[{1 - meant_low:g}, {1 + meant_high:g}]"
        yield Issue(
            "these read like bounds, and they are margins around ratio 1",
            ("objective", "clip"),
            given=f"low {low:g}, high {high:g}: the clip acts outside [{1 - low:g}, {1 + high:g}]",
            hint=f"for the bounds {bounds} write low: {meant_low:g}, high: {meant_high:g}",
        )


def idle_cap(experiment: Experiment) -> Iterator[Issue]:
    """CISPO's bound on a ratio that is always 1."""
    if experiment.objective.type == "cispo" and on_policy(experiment):
        yield Issue(
            "max_ratio can never act",
            ("objective", "max_ratio"),
            given="1 minibatch x 1 epoch: the policy that is trained is the one that sampled, so every ratio is 1",
            hint="raise training.minibatches or training.epochs",
        )


def idle_schedule(experiment: Experiment) -> Iterator[Issue]:
    """A reference that waits for longer than the run takes."""
    update, steps = experiment.reference.update, experiment.training.steps
    if update is None:
        return
    if update.after_steps >= steps:
        yield Issue(
            "the reference never moves",
            ("reference", "update", "after_steps"),
            given=f"{update.after_steps} steps of {steps}",
            hint="lower after_steps or raise training.steps",
        )
    if update.kl_above and update.kl_window >= steps:
        yield Issue(
            "kl_above can never act",
            ("reference", "update", "kl_window"),
            given=f"a mean over {update.kl_window} steps, of {steps}",
            hint="lower kl_window or raise training.steps",
        )


def scale_without_spread(experiment: Experiment) -> Iterator[Issue]:
    """A group's deviation divides what is no deviation from the group."""
    advantage = experiment.advantage
    if advantage.scale == "group_std" and advantage.baseline in ("batch_mean", "none"):
        yield Issue(
            "a group whose rewards are all equal is divided by 1e-4",
            ("advantage", "scale"),
            given=f"group_std with baseline {advantage.baseline}, which leaves such a group an advantage",
            hint="take scale batch_std or none, or baseline group_mean or leave_one_out",
        )


def idle_skipping(experiment: Experiment) -> Iterator[Issue]:
    """Whitening takes the mean off every token."""
    if experiment.skips_zero_advantage and experiment.advantage.whiten == "tokens":
        yield Issue(
            "no advantage is exactly 0",
            ("training", "skip_zero_advantage"),
            given="advantage.whiten tokens, which takes the mean off every token's",
            hint="leave skip_zero_advantage out",
        )


def correction_of_tokens(experiment: Experiment) -> Iterator[Issue]:
    """Weights of single tokens under a ratio of the whole response."""
    objective, correction = experiment.objective, experiment.rollout.correction
    if objective.ratio_over == "sequence" and correction.type != "none":
        yield Issue(
            "the correction is inexact: it weighs each token, where the objective weighs whole responses",
            ("rollout", "correction", "type"),
            given=correction.type,
            hint="leave it out, or take an objective with ratios of tokens",
        )


def on_policy(experiment: Experiment) -> bool:
    """Whether every ratio is 1: one update a step, at the policy that sampled."""
    training = experiment.training
    return (
        training.minibatches * training.epochs == 1
        and not experiment.rollout.max_staleness
        and training.optimizer.type == "adamw"
    )


IDLE_KNOBS = (
    idle_penalty,
    idle_clip_knobs,
    idle_parameters,
    margins_like_bounds,
    idle_cap,
    idle_schedule,
    scale_without_spread,
    idle_skipping,
    correction_of_tokens,
)
