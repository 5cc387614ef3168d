"""Rules of the training section: requirements of ZeRO and the optimizer, and settings that are probably mistakes."""

from collections.abc import Iterator

from specs.errors import Issue
from specs.schema.experiment import Experiment
from specs.schema.schedule import ValueSchedule


def offload(experiment: Experiment) -> Iterator[Issue]:
    """Yields issues with offloading. ZeRO moves only state that it shards to the host."""
    training = experiment.training
    for name, stages in (("optimizer", (2, 3)), ("parameters", (3,))):
        if getattr(training.offload, name) and training.zero_stage not in stages:
            yield Issue(
                "needs ZeRO",
                ("training", "offload", name),
                given=f"zero_stage {training.zero_stage}",
                allowed="training.zero_stage " + " or ".join(str(stage) for stage in stages),
            )


def offload_while_sampling(experiment: Experiment) -> Iterator[Issue]:
    """Yields issues with offloading while sampling. The state must be on the GPU, and the sampler must not keep its
    memory during updates."""
    offload, rollout = experiment.training.offload, experiment.rollout
    if not offload.leaves_while_sampling:
        return
    path = ("training", "offload", "while_sampling")
    for name in ("optimizer", "parameters"):
        if getattr(offload, name):
            yield Issue(
                "state that is always in host memory cannot leave the GPU",
                path,
                given=f"true with {name}: true",
                hint=f"leave one of the two out; with {name}: true alone the GPU never holds it",
            )
    if rollout.max_staleness:
        yield Issue(
            "rollouts are sampled during updates",
            path,
            given=f"true with rollout.max_staleness {rollout.max_staleness}",
            hint="leave one of the two out",
        )
    elif rollout.memory_share and not rollout.sleeps:
        yield Issue(
            "the engine keeps its memory during updates, or has its own GPU",
            path,
            given="true with an engine that does not sleep",
            hint="write rollout.sleep: true with placement: colocated, or leave while_sampling out",
        )


def best_by_accuracy(experiment: Experiment) -> Iterator[Issue]:
    """Yields issues with accuracy_on. The set must be evaluated during training, at steps that have a checkpoint."""
    saved, every = experiment.training.checkpoint, experiment.evaluation.every_steps
    dataset = saved.keep_best.accuracy_on if saved.keep_best else ""
    if not dataset:
        return
    sets = [each for each in experiment.data.evaluation if each.answered or "accuracy" in each.measures]
    chosen = experiment.evaluation.datasets
    known = [each.name for each in sets if each.name and (not chosen or each.name in chosen)]
    where = ("training", "checkpoint", "keep_best", "accuracy_on")
    if dataset not in known:
        allowed = ", ".join(known) or "none: data.evaluation is empty"
        yield Issue("no set of that name is evaluated", where, given=dataset, allowed=allowed)
    elif not every:
        hint = f"write evaluation.every_steps, e.g. {saved.every_steps}"
        yield Issue("nothing is evaluated during training", where, given=dataset, hint=hint)
    elif every % saved.every_steps:
        yield Issue(
            "not every evaluated step has a checkpoint",
            ("evaluation", "every_steps"),
            given=f"{every}, with a checkpoint every {saved.every_steps} steps",
            allowed=f"a multiple of {saved.every_steps}",
            hint="or change training.checkpoint.every_steps",
        )


def ranks(experiment: Experiment) -> Iterator[Issue]:
    """Yields an issue if there are more ranks than prompts, because each rank samples its own prompts."""
    training = experiment.training
    if training.ranks > training.prompts_per_step:
        yield Issue(
            "more ranks than prompts in a step",
            ("training", "ranks"),
            given=str(training.ranks),
            allowed=f"at most {training.prompts_per_step}",
            hint="lower ranks, or raise training.prompts_per_step",
        )


def sequence_parallel(experiment: Experiment) -> Iterator[Issue]:
    """Yields issues with sequence parallelism. Ranks share packed rows, in groups of equal size."""
    training = experiment.training
    size, path = training.sequence_parallel_size, ("training", "sequence_parallel_size")
    if training.ranks % size:
        yield Issue(
            "the ranks cannot be grouped evenly",
            path,
            given=f"{size} of {training.ranks} ranks",
            allowed=", ".join(
                str(number) for number in range(1, min(training.ranks, 1024) + 1) if training.ranks % number == 0
            ),
            hint="sequence_parallel_size must divide training.ranks",
        )
    if size > 1 and not training.packing:
        yield Issue(
            "ranks can share only packed rows", path, given=f"{size} with packing: false", hint="leave packing out"
        )


def kernels(experiment: Experiment) -> Iterator[Issue]:
    """Yields an issue for Liger's kernels on a CPU."""
    if experiment.training.kernels == "liger" and experiment.resources.device == "cpu":
        yield Issue(
            "Liger's kernels run on GPUs",
            ("training", "kernels"),
            given="liger with resources.device cpu",
            hint="leave kernels out",
        )


def schedule_free(experiment: Experiment) -> Iterator[Issue]:
    """Yields issues with the settings of schedule-free AdamW."""
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
    if isinstance(training.optimizer.learning_rate, ValueSchedule):
        yield Issue(
            "schedule_free_adamw weights each iterate by its rate, and supports one peak",
            ("training", "optimizer", "learning_rate"),
            given=str(training.optimizer.learning_rate),
            allowed="a number",
        )
    if training.optimizer.betas[0] == 0:
        yield Issue(
            "schedule_free_adamw divides by it",
            ("training", "optimizer", "betas", 0),
            given="0",
            allowed="a number in (0, 1)",
        )


RULES = (ranks, offload, offload_while_sampling, best_by_accuracy, sequence_parallel, kernels, schedule_free)
