"""Rules for closed loops, plateaus and updates of the reference that clear the optimizer."""

import math
from collections.abc import Iterator

from specs.errors import Issue
from specs.metrics import BY_NAME
from specs.rules.idle import on_policy
from specs.schema.experiment import Experiment
from specs.schema.objective import PublishedObjective
from specs.schema.schedule import largest, loops_in


def loops(experiment: Experiment) -> Iterator[Issue]:
    """Checks that the metric of a closed loop is measured, can reach the target, and depends on the key."""
    for path, loop in loops_in(experiment):
        most = BY_NAME[loop.of].most if loop.of in BY_NAME else math.inf
        if loop.target >= most:
            allowed = f"a number in (0, {most:g})"
            yield Issue(f"{loop.of} is at most {most:g}", (*path, "target"), f"{loop.target:g}", allowed)
        if loop.of.startswith("drift/") and not experiment.evaluation.every_steps:
            hint = "write evaluation.every_steps"
            yield Issue(
                f"{loop.of} is measured at evaluations, and the run has none", (*path, "of"), loop.of, hint=hint
            )
        elif loop.of.startswith("drift/") and not experiment.measures_drift:
            yield Issue(f"{loop.of} is not measured", (*path, "of"), loop.of, hint="write evaluation.drift: true")
        elif loop.of.startswith("drift/") and not experiment.answers_sets:
            message = f"{loop.of} is measured on the responses to evaluation sets, and no set gets any"
            yield Issue(message, (*path, "of"), loop.of, hint="name a set of problems in data.evaluation")
        if reason := _unmoved(experiment, path[-1]):
            message, hint = reason
            yield Issue(f"the key cannot change {loop.of}: {message}", (*path, "of"), loop.of, hint=hint)


def _unmoved(experiment: Experiment, key: str) -> tuple[str, str] | None:
    """Returns the reason why a key has no influence on its loop's metric, and a hint; None if it has influence."""
    more_updates = "raise training.minibatches or training.epochs"
    if key in ("low", "high"):
        return ("with 1 minibatch x 1 epoch every ratio is 1", more_updates) if on_policy(experiment) else None
    if key != "kl_coef":
        return None
    objective, reference = experiment.objective, experiment.reference
    another = "take reference.source initial or snapshot"
    if not objective.needs_reference:
        return "the objective has no divergence", "name a divergence, or give kl_coef a number"
    if reference.source == "behaviour" and objective.penalizes_reward:
        return "the reference is the policy that samples, so the penalty in the reward is always 0", another
    update = reference.update
    follows = reference.source == "behaviour" or (
        update is not None and update.every_steps == 1 and not largest(update.ema_decay) and not update.after_steps
    )
    if follows and on_policy(experiment):
        return "the policy is its own reference, so the divergence is always 0", f"{another}, or {more_updates}"
    match objective:
        case PublishedObjective(penalizes_loss=True, kl_estimator="k1", kl_weighted=False):
            return "k1 in the loss has an expected gradient of 0", "write kl_weighted: true, or another kl_estimator"
        case _:
            return None


def plateau(experiment: Experiment) -> Iterator[Issue]:
    """Checks that a plateau has evaluations to count."""
    update = experiment.reference.update
    if update and update.plateau and not experiment.evaluation.every_steps:
        yield Issue(
            "nothing is evaluated during training",
            ("reference", "update", "plateau"),
            given=str(update.plateau),
            hint="write `evaluation.every_steps`, or leave `plateau` out",
        )
    elif update and update.plateau and not experiment.answers_sets:
        hint = "name a set of problems in data.evaluation, or leave plateau out"
        message = "no evaluation set gets responses, whose scores a plateau compares"
        yield Issue(message, ("reference", "update", "plateau"), given=str(update.plateau), hint=hint)


def resets(experiment: Experiment) -> Iterator[Issue]:
    """Checks that the optimizer is not cleared after every step."""
    update = experiment.reference.update
    if update and update.reset_optimizer and not update.conditions:
        yield Issue(
            "the reference is updated every step, and the optimizer would be reset each time",
            ("reference", "update", "reset_optimizer"),
            given="true with ema_decay alone",
            hint="write a condition such as `every_steps` or `plateau`, or leave `reset_optimizer` out",
        )


RULES = (loops, plateau, resets)
