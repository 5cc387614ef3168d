"""Rules of evaluation during training: the resources that it needs beside the trainer, and settings that leave it no
work."""

from collections.abc import Iterator
from dataclasses import replace

from specs.errors import Issue
from specs.schema.experiment import Experiment

_PATH = ("evaluation", "concurrent_ranks")


def concurrent(experiment: Experiment) -> Iterator[Issue]:
    """Yields issues with `concurrent_ranks`: these ranks need room beside training's ranks, and evaluation problems,
    and exclude evaluation by the trainer."""
    evaluation, launcher = experiment.evaluation, experiment.launcher
    ranks = evaluation.concurrent_ranks
    if not ranks:
        return
    if evaluation.every_steps:
        yield Issue(
            "the trainer evaluates its policy itself",
            _PATH,
            given=f"{ranks}, with evaluation.every_steps {evaluation.every_steps}",
            hint="write `checkpoints: all` and `training.export_every_steps` and leave `every_steps` out; or leave "
            "`concurrent_ranks` out",
        )
    if not experiment.data.evaluation:
        hint = "name a set in `data.evaluation`, or leave `concurrent_ranks` out"
        yield Issue("there is no evaluation set", _PATH, given=str(ranks), hint=hint)
    if any(launcher.issues(experiment.training)):
        return  # these issues describe the nodes
    beside = experiment.concurrent_evaluation
    if issue := next(beside.launcher.issues(beside.training), None):
        yield replace(
            issue, path=_PATH, hint="write the number of training's ranks on a node, or a divisor or multiple of it"
        )


RULES = (concurrent,)
