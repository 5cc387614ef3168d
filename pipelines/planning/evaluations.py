"""How many checkpoints a run evaluates, and on how many problems, from the spec alone."""

from specs.schema.experiment import Experiment


def evaluated_checkpoints(experiment: Experiment) -> int:
    """Checkpoints that a run evaluates, the base model and the last one included."""
    return evaluated_on_the_way(experiment, experiment.training.steps) + 1 + measures_base(experiment)


def measures_base(experiment: Experiment) -> bool:
    """Whether the base model is evaluated, beside the trained one."""
    return experiment.evaluation.checkpoints != "final"


def evaluated_on_the_way(experiment: Experiment, end: int) -> int:
    """Checkpoints that a run up to a step evaluates beside the base model, the rungs of a study and its last one."""
    every, exports = experiment.evaluation.every_steps, experiment.training.export_every_steps
    looks = (end - 1) // every if every else 0
    if experiment.evaluation.checkpoints == "all" and exports:
        looks += (end - 1) // exports
    return looks


def evaluation_problems(experiment: Experiment) -> int | None:
    """Problems of all sets that are evaluated; None where a set's size is not known before it is read."""
    chosen, total = experiment.evaluation.datasets, 0
    for source in experiment.data.evaluation:
        if chosen and source.name not in chosen:
            continue
        sizes = [size for size in (source.limit, getattr(source, "size", 0)) if size]
        if not sizes:
            return None
        total += min(sizes)
    return total
