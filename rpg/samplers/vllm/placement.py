"""Placement of a rank's vLLM engine: in this process, or in a separate one, which other ranks may share and which may
be on another machine."""

import os
from collections.abc import Sequence
from dataclasses import replace

from rpg.pretrained import special_tokens
from rpg.processes import ranks
from rpg.samplers.base import Sampler, SamplerSettings
from rpg.samplers.out_of_memory import memory_of_sampler
from rpg.samplers.sampling_ranks import has_sampler
from rpg.samplers.vllm.child_engine import ChildEngine
from rpg.samplers.vllm.dedicated import DedicatedSampler, EngineProcess
from rpg.samplers.vllm.engine import EngineSettings, Transfer
from rpg.samplers.vllm.remote_engine import RemoteEngine
from rpg.samplers.vllm.sampler import VllmSampler
from rpg.samplers.vllm.sharing import GuestSampler, HostSampler, opened_on_all_ranks
from specs.errors import Issue, SpecError
from specs.machine.gpu_slots import gpu_at, gpus_of_run
from specs.machine.launch import engines_elsewhere
from specs.schema.rollout import VllmRollout


def open_sampler(rollout: VllmRollout, settings: SamplerSettings) -> Sampler:
    """Opens the engine of this rank, or shares that of another rank.

    Raises:
        SpecError: vLLM does not start with these settings, or has no GPU.
        SamplerOutOfMemoryError: the engine does not fit.
    """
    device = settings.device
    engine = EngineSettings(
        weights_dir=settings.weights_dir,
        eos_ids=special_tokens(settings.weights_dir).eos_ids,
        device_type=device.type,
        max_length=settings.max_length,
        max_concurrent=rollout.max_concurrent,
        memory_fraction=rollout.memory_share,
        cpu_cache_gib=rollout.cpu_cache_gib,
        seed=settings.seed,
        kv_cache=rollout.kv_cache,
        prefix_caching=rollout.enable_prefix_caching,
        tensor_parallel_size=rollout.tensor_parallel_size,
        sleeps=rollout.sleeps and settings.beside_learner,
        returns_experts=rollout.replay_routing,
    )
    if rollout.sleeps and device.type == "cpu":
        raise SpecError(
            Issue("vLLM cannot sleep on a CPU", path=("rollout", "sleep"), given="true", hint="leave sleep out")
        )
    if rollout.kv_cache == "fp8" and device.type == "cpu":
        raise SpecError(
            Issue("a cache of eight bits needs a GPU", ("rollout", "kv_cache"), given="fp8", hint="leave kv_cache out")
        )
    if rollout.replay_routing and device.type == "cpu":
        hint = "leave replay_routing out, or take engine: transformers"
        raise SpecError(
            Issue("vLLM tells the experts of a token on a GPU alone", ("rollout", "replay_routing"), "true", hint=hint)
        )
    with memory_of_sampler(rollout, device):
        if rollout.placement == "colocated":
            return VllmSampler(engine)
        on_gpu = device.type == "cuda"
        if on_gpu:
            engine = replace(engine, transfer=transfer_to_engines(rollout))
        gpus = engine_gpus(rollout) if on_gpu and not engines_elsewhere() else ()
        if rollout.ranks_per_engine == 1:
            return DedicatedSampler(engine, _process(rollout, gpus))
        return opened_on_all_ranks(
            lambda: HostSampler(engine, _process(rollout, gpus)) if has_sampler(rollout) else GuestSampler(engine)
        )


def _process(rollout: VllmRollout, gpus: Sequence[str]) -> EngineProcess:
    """Returns the process of the engine that this rank holds. `gpus` are the engine's GPUs, if it is on this
    machine."""
    return RemoteEngine(ranks.rank() // rollout.ranks_per_engine) if engines_elsewhere() else ChildEngine(gpus)


def engine_gpus(rollout: VllmRollout) -> tuple[str, ...]:
    """Returns the GPUs of the engine that serves this rank, in the form of CUDA_VISIBLE_DEVICES. All ranks call it.

    Raises:
        SpecError: the engines of a machine cannot be on the GPUs that the spec names. All ranks raise it, since they
            would wait forever for a single rank that did.
    """
    if issues := list(rollout.placement_issues(ranks.gather(_local_ranks()))):
        raise SpecError(*issues)
    places = rollout.engine_places(_local_ranks())[ranks.local_rank() // rollout.ranks_per_engine]
    return tuple(gpu_at(gpus_of_run(), place) for place in places)


def transfer_to_engines(rollout: VllmRollout) -> Transfer:
    """Returns how weights reach the engines: ipc if they are on GPUs of the ranks that they serve, nccl if they are on
    others; the same way in the whole run. A GPU cannot be in nccl's group twice, as rank and as engine; and with ipc
    all ranks take part."""
    shared = not engines_elsewhere() and rollout.share_gpus([_local_ranks()]) == {True}
    return "ipc" if shared else "nccl"


def _local_ranks() -> int:
    """Returns the number of ranks of this machine."""
    for name in ("LOCAL_SIZE", "LOCAL_WORLD_SIZE", "WORLD_SIZE"):
        if name in os.environ:
            return int(os.environ[name])
    return 1
