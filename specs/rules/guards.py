"""Warnings: guards that can never fire, and fields of guards that have no effect."""

from collections.abc import Iterator

from specs.errors import Issue
from specs.metrics import BY_NAME
from specs.rules.idle import on_policy
from specs.schema.experiment import Experiment
from specs.schema.training import Guard


def _idle_guards(experiment: Experiment) -> Iterator[Issue]:
    """Yields warnings for bounds that no value can violate, and for more consecutive steps than the run has."""
    for index, guard in enumerate(experiment.training.guards):
        for name, value in (("above", guard.above), ("below", guard.below)):
            if value is not None and (reason := _never_fires(experiment, guard, name, value)):
                yield Issue(
                    "the guard can never fire",
                    ("training", "guards", index, name),
                    given=f"{guard.metric} {name} {value:g}: {reason}",
                )
        if guard.for_steps > experiment.training.steps:
            yield Issue(
                "the guard can never fire",
                ("training", "guards", index, "for_steps"),
                given=f"{guard.for_steps} violating steps in a run of {experiment.training.steps}",
            )


def _never_fires(experiment: Experiment, guard: Guard, name: str, value: float) -> str:
    """Returns the reason why the metric cannot be above (below) this bound; empty if it can."""
    metric, longest = guard.metric, experiment.rollout.max_response_length
    least, most = BY_NAME[metric].least, BY_NAME[metric].most
    if name == "below":
        return "it is never negative" if value <= least else ""
    if value >= most:
        return f"it is at most {most:g}"
    if metric.startswith("response_length/") and value >= longest:
        return f"rollout.max_response_length is {longest}"
    if on_policy(experiment) and metric.startswith("clip_fraction/"):
        return "with 1 minibatch x 1 epoch every ratio is 1"
    if on_policy(experiment) and metric == "kl/behaviour" and value >= 0:
        return "with 1 minibatch x 1 epoch the policy that is trained is the one that sampled"
    return ""


def _idle_roll_back(experiment: Experiment) -> Iterator[Issue]:
    """Yields warnings for fields that only roll-backs use, and for roll-backs that may find no checkpoint."""
    training = experiment.training
    for index, guard in enumerate(training.guards):
        path = ("training", "guards", index)
        if guard.action != "roll_back":
            for name in sorted({"learning_rate_factor", "at_most"} & guard.model_fields_set):
                yield Issue(f"{name} has no effect", (*path, name), given=f"action {guard.action}")
            continue
        saved = training.checkpoint
        if saved.every_steps + guard.for_steps > training.steps:
            yield Issue(
                "the guard has nothing to roll back to",
                (*path, "action"),
                given=f"a checkpoint every {saved.every_steps} of {training.steps} steps, {guard.for_steps} violating",
                hint="lower training.checkpoint.every_steps",
            )
        elif guard.for_steps - 1 > (saved.keep_last - 1) * saved.every_steps:
            yield Issue(
                "the checkpoints from before the violation may be gone when the guard acts",
                (*path, "for_steps"),
                given=f"{guard.for_steps} steps, with the last {saved.keep_last} checkpoints of every"
                f" {saved.every_steps} steps kept",
                hint="raise training.checkpoint.keep_last",
            )


IDLE_KNOBS = (_idle_guards, _idle_roll_back)
