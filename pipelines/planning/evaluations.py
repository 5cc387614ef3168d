"""Numbers of checkpoints that a run evaluates, and of their problems, from the spec alone."""

from specs.schema.experiment import Experiment


def evaluated_checkpoints(experiment: Experiment) -> int:
    """Returns the number of checkpoints that a run evaluates, the base model and the last one included."""
    return evaluated_on_the_way(experiment, experiment.training.steps) + 1 + measures_base(experiment)


def measures_base(experiment: Experiment) -> bool:
    """Returns whether the base model is evaluated in addition to the trained one."""
    return experiment.evaluation.checkpoints != "final"


def evaluated_on_the_way(experiment: Experiment, end: int) -> int:
    """Returns the number of intermediate checkpoints that a run up to a step evaluates: without the base model, a
    study's rungs and the last checkpoint."""
    every, exports = experiment.evaluation.every_steps, experiment.training.export_every_steps
    looks = (end - 1) // every if every else 0
    if experiment.evaluation.checkpoints == "all" and exports:
        looks += (end - 1) // exports
    return looks


def evaluation_problems(experiment: Experiment) -> int | None:
    """Returns the number of problems that the policy answers in all evaluation sets. None if a set's size is unknown
    before it is read."""
    chosen, total = experiment.evaluation.datasets, 0
    for source in experiment.data.evaluation:
        if not source.answered or (chosen and source.name not in chosen):
            continue
        sizes = [size for size in (source.limit, getattr(source, "size", 0)) if size]
        if not sizes:
            return None
        total += min(sizes)
    return total
