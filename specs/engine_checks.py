"""Rules of the sampling: engines that cannot be, cuts that the ratio does not know, knobs that cannot act."""

from collections.abc import Iterator

from specs.errors import Problem
from specs.schema.experiment import Experiment
from specs.schema.rollout import VllmRollout


def biased_ratio(experiment: Experiment) -> Iterator[Problem]:
    """What is drawn from a cut distribution and trained on as if from the whole one."""
    rollout = experiment.rollout
    for name, value, whole in (("top_p", rollout.top_p, 1), ("top_k", rollout.top_k, 0)):
        if value != whole:
            yield Problem(
                "the importance ratio is biased",
                ("rollout", name),
                given=f"{value:g}: tokens are drawn from a part of the distribution, old_logprobs are of all of it",
                hint=f"leave {name} at {whole} in training; evaluation has its own",
            )


def idle_cuts(experiment: Experiment) -> Iterator[Problem]:
    """Cuts of a distribution from which only the likeliest token is taken."""
    evaluation = experiment.evaluation
    for name, value, whole in (("top_p", evaluation.top_p, 1), ("top_k", evaluation.top_k, 0)):
        if evaluation.temperature == 0 and value != whole:
            yield Problem(
                f"{name} has no effect",
                ("evaluation", name),
                given=f"{value:g} at temperature 0, which takes the likeliest token",
                hint=f"leave {name} out, or raise evaluation.temperature",
            )


def unequal_stops(experiment: Experiment) -> Iterator[Problem]:
    """A policy that is trained to stop at a text, and measured without it."""
    if experiment.rollout.stop and not experiment.evaluation.stop:
        yield Problem(
            "evaluation does not stop where training does",
            ("rollout", "stop"),
            given=", ".join(repr(text) for text in experiment.rollout.stop),
            hint="give evaluation.stop the same texts",
        )


def placement(experiment: Experiment) -> Iterator[Problem]:
    """Engines that cannot be where they are put."""
    rollout = experiment.rollout
    if not isinstance(rollout, VllmRollout):
        return
    colocated, size = rollout.placement == "colocated", rollout.tensor_parallel_size
    if colocated and size > 1:
        yield Problem(
            "an engine in the trainer's process has one GPU, the rank's",
            ("rollout", "tensor_parallel_size"),
            given=f"{size} with placement colocated",
            hint="write placement: dedicated, and rollout.engine_gpus",
        )
    if rollout.sleep and not colocated:
        yield Problem(
            "a dedicated engine shares its memory with nobody",
            ("rollout", "sleep"),
            given="true with placement dedicated",
            hint="leave sleep out, or write placement: colocated",
        )
    if rollout.sleep and experiment.resources.device == "cpu":
        yield Problem(
            "vLLM cannot sleep on a CPU",
            ("rollout", "sleep"),
            given="true with resources.device cpu",
            hint="leave sleep out",
        )
    for index, gpu in enumerate(rollout.engine_gpus):
        if gpu in rollout.engine_gpus[:index]:
            yield Problem("the GPU is given twice", ("rollout", "engine_gpus", index), given=str(gpu))
    if len(rollout.engine_gpus) % size:
        yield Problem(
            "the GPUs cannot be dealt out evenly",
            ("rollout", "engine_gpus"),
            given=f"{len(rollout.engine_gpus)} GPUs for engines of {size}",
            hint="a multiple of rollout.tensor_parallel_size",
        )


def idle_gpus(experiment: Experiment) -> Iterator[Problem]:
    """GPUs named for engines that take none."""
    rollout = experiment.rollout
    if not isinstance(rollout, VllmRollout) or not rollout.engine_gpus:
        return
    why = "placement colocated" if rollout.placement == "colocated" else "resources.device cpu"
    if rollout.placement == "colocated" or experiment.resources.device == "cpu":
        yield Problem("engine_gpus has no effect", ("rollout", "engine_gpus"), given=why, hint="leave it out")


RULES = (placement,)
IDLE_KNOBS = (biased_ratio, idle_cuts, unequal_stops, idle_gpus)
