"""What ZeRO and the optimizer ask of the training section."""

from collections.abc import Iterator

from specs.errors import Issue
from specs.schema.experiment import Experiment


def offload(experiment: Experiment) -> Iterator[Issue]:
    """What ZeRO does not divide it cannot move to the host."""
    training = experiment.training
    for name, stages in (("optimizer", (2, 3)), ("parameters", (3,))):
        if getattr(training.offload, name) and training.zero_stage not in stages:
            yield Issue(
                "needs ZeRO",
                ("training", "offload", name),
                given=f"zero_stage {training.zero_stage}",
                allowed="training.zero_stage " + " or ".join(str(stage) for stage in stages),
            )


def schedule_free(experiment: Experiment) -> Iterator[Issue]:
    """Schedule-free AdamW has settings that AdamW has not."""
    training = experiment.training
    if training.optimizer.type != "schedule_free_adamw":
        return
    if training.schedule.type != "constant":
        yield Issue(
            "schedule_free_adamw averages the updates instead of lowering the rate",
            ("training", "schedule", "type"),
            given=training.schedule.type,
            allowed="constant",
            hint="leave schedule.type out; warmup_updates acts as before",
        )
    if training.optimizer.betas[0] == 0:
        yield Issue(
            "schedule_free_adamw divides by it",
            ("training", "optimizer", "betas", 0),
            given="0",
            allowed="a number in (0, 1)",
        )


RULES = (offload, schedule_free)
