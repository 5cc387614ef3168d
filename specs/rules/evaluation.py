"""Rules of evaluation while training goes on: what it needs beside the trainer, and where it has nothing to do."""

from collections.abc import Iterator
from dataclasses import replace

from specs.errors import Issue
from specs.schema.experiment import Experiment

_PATH = ("evaluation", "concurrent_ranks")


def concurrent(experiment: Experiment) -> Iterator[Issue]:
    """The ranks need a place beside training's, and problems to ask. And either they measure, or the trainer does."""
    evaluation, launcher = experiment.evaluation, experiment.launcher
    ranks = evaluation.concurrent_ranks
    if not ranks:
        return
    if evaluation.every_steps:
        yield Issue(
            "the trainer evaluates its policy itself",
            _PATH,
            given=f"{ranks}, with evaluation.every_steps {evaluation.every_steps}",
            hint="write checkpoints: all and training.export_every_steps, and leave every_steps out; or leave this out",
        )
    if not experiment.data.evaluation:
        hint = "name a set in data.evaluation, or leave concurrent_ranks out"
        yield Issue("there is no evaluation set", _PATH, given=str(ranks), hint=hint)
    if any(launcher.issues(experiment.training)):
        return  # they say what is wrong with the nodes
    beside = experiment.concurrent_evaluation
    if issue := next(beside.launcher.issues(beside.training), None):
        yield replace(issue, path=_PATH, hint="as many as training has on a node, a part or a multiple of that")


RULES = (concurrent,)
