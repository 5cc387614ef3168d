"""Rules of the engines: where a sampler can run, what ZeRO and the optimizer ask for, cuts that bias the ratio."""

from collections.abc import Iterator

from specs.errors import Issue
from specs.schema.experiment import Experiment
from specs.schema.rollout import VllmRollout


def biased_ratio(experiment: Experiment) -> Iterator[Issue]:
    """What is drawn from a cut distribution and trained on as if from the whole one."""
    rollout = experiment.rollout
    for name, value, whole in (("top_p", rollout.top_p, 1), ("top_k", rollout.top_k, 0)):
        if value != whole:
            yield Issue(
                "the importance ratio is biased",
                ("rollout", name),
                given=f"{value:g}: tokens are drawn from a part of the distribution, old_logprobs are of all of it",
                hint=f"leave {name} at {whole} in training; evaluation has its own",
            )


def idle_cuts(experiment: Experiment) -> Iterator[Issue]:
    """Cuts of a distribution from which only the likeliest token is taken."""
    evaluation = experiment.evaluation
    for name, value, whole in (("top_p", evaluation.top_p, 1), ("top_k", evaluation.top_k, 0)):
        if evaluation.temperature == 0 and value != whole:
            yield Issue(
                f"{name} has no effect",
                ("evaluation", name),
                given=f"{value:g} at temperature 0, which takes the likeliest token",
                hint=f"leave {name} out, or raise evaluation.temperature",
            )


def unequal_stops(experiment: Experiment) -> Iterator[Issue]:
    """A policy that is trained to stop at a text, and measured without it."""
    if experiment.rollout.stop and not experiment.evaluation.stop:
        yield Issue(
            "evaluation does not stop where training does",
            ("rollout", "stop"),
            given=", ".join(repr(text) for text in experiment.rollout.stop),
            hint="give evaluation.stop the same texts",
        )


def placement(experiment: Experiment) -> Iterator[Issue]:
    """Engines that cannot be where they are put."""
    rollout = experiment.rollout
    if not isinstance(rollout, VllmRollout):
        return
    colocated, size = rollout.placement == "colocated", rollout.tensor_parallel_size
    if colocated and size > 1:
        yield Issue(
            "an engine in the trainer's process has one GPU, the rank's",
            ("rollout", "tensor_parallel_size"),
            given=f"{size} with placement colocated",
            hint="write placement: dedicated, and rollout.engine_gpus",
        )
    if rollout.sleep and not colocated:
        yield Issue(
            "a dedicated engine shares its memory with nobody",
            ("rollout", "sleep"),
            given="true with placement dedicated",
            hint="leave sleep out, or write placement: colocated",
        )
    if rollout.sleep and experiment.resources.device == "cpu":
        yield Issue(
            "vLLM cannot sleep on a CPU",
            ("rollout", "sleep"),
            given="true with resources.device cpu",
            hint="leave sleep out",
        )
    for index, gpu in enumerate(rollout.engine_gpus):
        if gpu in rollout.engine_gpus[:index]:
            yield Issue("the GPU is given twice", ("rollout", "engine_gpus", index), given=str(gpu))
    if len(rollout.engine_gpus) % size:
        yield Issue(
            "the GPUs cannot be dealt out evenly",
            ("rollout", "engine_gpus"),
            given=f"{len(rollout.engine_gpus)} GPUs for engines of {size}",
            hint="a multiple of rollout.tensor_parallel_size",
        )


def idle_gpus(experiment: Experiment) -> Iterator[Issue]:
    """GPUs named for engines that take none."""
    rollout = experiment.rollout
    if not isinstance(rollout, VllmRollout) or not rollout.engine_gpus:
        return
    why = "placement colocated" if rollout.placement == "colocated" else "resources.device cpu"
    if rollout.placement == "colocated" or experiment.resources.device == "cpu":
        yield Issue("engine_gpus has no effect", ("rollout", "engine_gpus"), given=why, hint="leave it out")


def _offload(experiment: Experiment) -> Iterator[Issue]:
    training = experiment.training
    for name, stages in (("optimizer", (2, 3)), ("parameters", (3,))):
        if getattr(training.offload, name) and training.zero_stage not in stages:
            yield Issue(
                "needs ZeRO",
                ("training", "offload", name),
                given=f"zero_stage {training.zero_stage}",
                allowed="training.zero_stage " + " or ".join(str(stage) for stage in stages),
            )


def _schedule_free(experiment: Experiment) -> Iterator[Issue]:
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


RULES = (placement, _offload, _schedule_free)
IDLE_KNOBS = (biased_ratio, idle_cuts, unequal_stops, idle_gpus)
