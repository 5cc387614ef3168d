"""Rules of vLLM's own keys: where its engines can run, and when they can sleep."""

from collections.abc import Iterator

from specs.bounds import repeats
from specs.errors import Issue
from specs.schema.experiment import Experiment
from specs.schema.rollout import VllmRollout


def placement(experiment: Experiment) -> Iterator[Issue]:
    """An engine cannot be where the spec puts it."""
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
    if colocated and rollout.ranks_per_engine > 1:
        yield Issue(
            "an engine in the trainer's process serves that process alone",
            ("rollout", "ranks_per_engine"),
            given=f"{rollout.ranks_per_engine} with placement colocated",
            hint="write placement: dedicated; rollout.engine_gpus may name the ranks' own GPUs",
        )
    if colocated and rollout.engines:
        yield Issue(
            "an engine in the trainer's process is no process of its own",
            ("rollout", "engines"),
            given=f"{rollout.engines} with placement colocated",
            hint="write placement: dedicated, or leave engines out: each rank has one",
        )
    if rollout.engines and rollout.ranks_per_engine > 1:
        yield Issue(
            "rollout.engines tells how many ranks share one",
            ("rollout", "ranks_per_engine"),
            given=f"{rollout.ranks_per_engine} with engines {rollout.engines}",
            hint="leave one of them out",
        )
    if rollout.sleeps and not colocated:
        yield Issue(
            "a dedicated engine shares its memory with nobody",
            ("rollout", "sleep"),
            given="true with placement dedicated",
            hint="leave sleep out, or write placement: colocated",
        )
    if rollout.sleeps and experiment.resources.device == "cpu":
        yield Issue(
            "vLLM cannot sleep on a CPU",
            ("rollout", "sleep"),
            given="true with resources.device cpu",
            hint="leave sleep out",
        )
    if rollout.kv_cache == "fp8" and experiment.resources.device == "cpu":
        yield Issue(
            "a cache of eight bits needs a GPU",
            ("rollout", "kv_cache"),
            given="fp8 with resources.device cpu",
            hint="leave kv_cache out",
        )
    if rollout.replay_routing and experiment.resources.device == "cpu":
        yield Issue(
            "vLLM tells the experts of a token on a GPU alone",
            ("rollout", "replay_routing"),
            given="true with resources.device cpu",
            hint="leave replay_routing out",
        )
    if rollout.replay_routing and not rollout.enable_prefix_caching:
        yield Issue(
            "vLLM tells experts with prefix caching alone",
            ("rollout", "replay_routing"),
            given="true with enable_prefix_caching: false",
            hint="leave one of the two out",
        )
    for index in repeats(rollout.engine_gpus):
        given = str(rollout.engine_gpus[index])
        yield Issue("the GPU is given twice", ("rollout", "engine_gpus", index), given=given)
    if len(rollout.engine_gpus) % size:
        yield Issue(
            "the GPUs cannot be dealt out evenly",
            ("rollout", "engine_gpus"),
            given=f"{len(rollout.engine_gpus)} GPUs for engines of {size}",
            hint="a multiple of rollout.tensor_parallel_size",
        )


def engines_gpus(experiment: Experiment) -> Iterator[Issue]:
    """Engines cannot be on the GPUs that the spec names. Where the device is auto that shows on a machine with GPUs."""
    launcher, training = experiment.launcher, experiment.training
    if experiment.resources.device == "cuda" and not any(launcher.issues(training)):
        yield from experiment.sampling.placement_issues(launcher.ranks_of_machines(training.ranks))


def idle_gpus(experiment: Experiment) -> Iterator[Issue]:
    """Yields an issue if the spec names more GPUs than the engines take, whose number follows from the ranks."""
    launcher, rollout, training = experiment.launcher, experiment.sampling, experiment.training
    if not isinstance(rollout, VllmRollout) or rollout.placement == "colocated":
        return
    if experiment.resources.device == "cpu" or any(launcher.issues(training)):
        return
    engines, size = rollout.samplers(max(launcher.ranks_of_machines(training.ranks))), rollout.tensor_parallel_size
    is_faulty = any(placement(experiment)) or bool(launcher.engines_key)  # of which the other rules tell
    if not is_faulty and (idle := rollout.engine_gpus[engines * size :]):
        yield Issue(
            "more GPUs than the engines take",
            ("rollout", "engine_gpus"),
            given=f"{len(rollout.engine_gpus)} for {engines} engines of {size}",
            allowed=str(engines * size),
            hint=f"{'GPU' if len(idle) == 1 else 'GPUs'} {', '.join(map(str, idle))} would be idle: write "
            f"rollout.engines: {_engines_for(experiment, rollout)}, raise rollout.tensor_parallel_size, or leave them "
            "out",
        )


def _engines_for(experiment: Experiment, rollout: VllmRollout) -> int:
    """Returns how many engines the named GPUs are enough for, on all machines."""
    return len(rollout.engine_gpus) // rollout.tensor_parallel_size * experiment.launcher.engine_machines


def engine_machines(experiment: Experiment) -> Iterator[Issue]:
    """Engines cannot be on the machines that the launcher has for them."""
    launcher, rollout = experiment.launcher, experiment.rollout
    if not launcher.engines_key:
        return
    if not isinstance(rollout, VllmRollout) or rollout.placement == "colocated":
        placement = ", placement colocated" if isinstance(rollout, VllmRollout) else ""
        yield Issue(
            "only dedicated engines of vLLM can be on machines without ranks",
            ("launcher", launcher.engines_key),
            given=f"rollout.engine {rollout.engine}{placement}",
            hint="write rollout: {engine: vllm, placement: dedicated}, or leave it out",
        )
        return
    if rollout.engine_gpus:
        yield Issue(
            "it names GPUs of the ranks' machines, and the engines are on others",
            ("rollout", "engine_gpus"),
            given=", ".join(map(str, rollout.engine_gpus)),
            hint=f"leave it out, or launcher.{launcher.engines_key}",
        )
    yield from launcher.engine_issues(experiment.samplers)


def sleeping(experiment: Experiment) -> Iterator[Issue]:
    """An engine cannot sample and give its memory away at once."""
    rollout = experiment.rollout
    if isinstance(rollout, VllmRollout) and rollout.sleeps and rollout.max_staleness:
        yield Issue(
            "an engine that samples while the learner trains cannot sleep then",
            ("rollout", "sleep"),
            given=f"true with max_staleness {rollout.max_staleness}",
            hint="leave sleep out, or max_staleness",
        )


RULES = (sleeping, placement, engines_gpus, idle_gpus, engine_machines)
