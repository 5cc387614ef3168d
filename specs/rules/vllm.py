"""Rules of vLLM's own keys: the GPUs of its engines, and when they can sleep."""

from collections.abc import Iterator

from specs.bounds import repeats
from specs.errors import Issue
from specs.schema.experiment import Experiment
from specs.schema.rollout import VllmRollout


def placement(experiment: Experiment) -> Iterator[Issue]:
    """Yields issues with the placement of engines."""
    rollout = experiment.rollout
    if not isinstance(rollout, VllmRollout):
        return
    colocated, size = rollout.placement == "colocated", rollout.tensor_parallel_size
    if colocated and size > 1:
        yield Issue(
            "an engine in the trainer's process has only the rank's GPU",
            ("rollout", "tensor_parallel_size"),
            given=f"{size} with placement colocated",
            hint="write placement: dedicated, and rollout.engine_gpus",
        )
    if colocated and rollout.ranks_per_engine > 1:
        yield Issue(
            "an engine in the trainer's process serves only that process",
            ("rollout", "ranks_per_engine"),
            given=f"{rollout.ranks_per_engine} with placement colocated",
            hint="write placement: dedicated; rollout.engine_gpus may name the ranks' own GPUs",
        )
    if colocated and rollout.engines:
        yield Issue(
            "an engine in the trainer's process is not a separate process",
            ("rollout", "engines"),
            given=f"{rollout.engines} with placement colocated",
            hint="write placement: dedicated, or leave engines out: each rank has one",
        )
    if rollout.engines and rollout.ranks_per_engine > 1:
        yield Issue(
            "rollout.engines already determines how many ranks share an engine",
            ("rollout", "ranks_per_engine"),
            given=f"{rollout.ranks_per_engine} with engines {rollout.engines}",
            hint="leave one of them out",
        )
    if rollout.sleeps and not colocated:
        yield Issue(
            "a dedicated engine does not share its memory",
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
            "an 8-bit cache needs a GPU",
            ("rollout", "kv_cache"),
            given="fp8 with resources.device cpu",
            hint="leave kv_cache out",
        )
    if rollout.replay_routing and experiment.resources.device == "cpu":
        yield Issue(
            "vLLM reports a token's experts only on a GPU",
            ("rollout", "replay_routing"),
            given="true with resources.device cpu",
            hint="leave replay_routing out",
        )
    if rollout.replay_routing and not rollout.enable_prefix_caching:
        yield Issue(
            "vLLM reports experts only with prefix caching",
            ("rollout", "replay_routing"),
            given="true with enable_prefix_caching: false",
            hint="leave one of the two out",
        )
    for index in repeats(rollout.engine_gpus):
        given = str(rollout.engine_gpus[index])
        yield Issue("the GPU is given twice", ("rollout", "engine_gpus", index), given=given)
    if len(rollout.engine_gpus) % size:
        yield Issue(
            "the GPUs do not divide evenly among the engines",
            ("rollout", "engine_gpus"),
            given=f"{len(rollout.engine_gpus)} GPUs for engines of {size}",
            hint="a multiple of rollout.tensor_parallel_size",
        )


def engines_gpus(experiment: Experiment) -> Iterator[Issue]:
    """Yields issues with the engines' GPUs. With device auto they appear only on a machine with GPUs."""
    launcher, training = experiment.launcher, experiment.training
    if experiment.resources.device == "cuda" and not any(launcher.issues(training)):
        yield from experiment.sampling.placement_issues(launcher.ranks_of_machines(training.ranks))


def idle_gpus(experiment: Experiment) -> Iterator[Issue]:
    """Yields an issue if the spec names more GPUs than the engines use."""
    launcher, rollout, training = experiment.launcher, experiment.sampling, experiment.training
    if not isinstance(rollout, VllmRollout) or rollout.placement == "colocated":
        return
    if experiment.resources.device == "cpu" or any(launcher.issues(training)):
        return
    engines, size = rollout.samplers(max(launcher.ranks_of_machines(training.ranks))), rollout.tensor_parallel_size
    is_faulty = any(placement(experiment)) or bool(launcher.engines_key)  # the other rules report these
    if not is_faulty and (idle := rollout.engine_gpus[engines * size :]):
        yield Issue(
            "more GPUs than the engines use",
            ("rollout", "engine_gpus"),
            given=f"{len(rollout.engine_gpus)} GPUs for {engines} engines of {size}",
            allowed=str(engines * size),
            hint=f"{'GPU' if len(idle) == 1 else 'GPUs'} {', '.join(map(str, idle))} would be idle: write "
            f"rollout.engines: {_engines_for(experiment, rollout)}, raise rollout.tensor_parallel_size, or leave them "
            "out",
        )


def _engines_for(experiment: Experiment, rollout: VllmRollout) -> int:
    """Returns the number of engines, over all machines, for which the named GPUs suffice."""
    return len(rollout.engine_gpus) // rollout.tensor_parallel_size * experiment.launcher.engine_machines


def engine_machines(experiment: Experiment) -> Iterator[Issue]:
    """Yields issues with engines on the launcher's machines for engines."""
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
            "it names GPUs of the ranks' machines, but the engines are on other machines",
            ("rollout", "engine_gpus"),
            given=", ".join(map(str, rollout.engine_gpus)),
            hint=f"leave it out, or launcher.{launcher.engines_key}",
        )
    yield from launcher.engine_issues(experiment.samplers)


def sleeping(experiment: Experiment) -> Iterator[Issue]:
    """Yields an issue for an engine that must sample and sleep at the same time."""
    rollout = experiment.rollout
    if isinstance(rollout, VllmRollout) and rollout.sleeps and rollout.max_staleness:
        yield Issue(
            "an engine that samples during training cannot sleep",
            ("rollout", "sleep"),
            given=f"true with max_staleness {rollout.max_staleness}",
            hint="leave sleep out, or max_staleness",
        )


RULES = (sleeping, placement, engines_gpus, idle_gpus, engine_machines)
