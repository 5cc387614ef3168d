"""Where the vLLM engine of a rank lives: in this process, or in one of its own, which other ranks may share."""

import os
from dataclasses import replace

from rpg.processes import ranks
from rpg.processes.gpu_slots import gpus_of_run
from rpg.samplers.base import Sampler, SamplerSettings, special_tokens
from rpg.samplers.out_of_memory import memory_of_sampler
from rpg.samplers.sampling_ranks import has_sampler
from rpg.samplers.vllm.dedicated import DedicatedSampler
from rpg.samplers.vllm.engine import EngineSettings, Transfer
from rpg.samplers.vllm.sampler import VllmSampler
from rpg.samplers.vllm.sharing import GuestSampler, HostSampler, opened_on_all_ranks
from specs.errors import Issue, SpecError
from specs.schema.rollout import VllmRollout


def open_sampler(rollout: VllmRollout, settings: SamplerSettings) -> Sampler:
    """The engine of this rank, or that of another rank which it shares.

    Raises:
        SpecError: vLLM does not start so, or there is no GPU for it.
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
        prefix_caching=rollout.enable_prefix_caching,
        tensor_parallel_size=rollout.tensor_parallel_size,
        sleeps=rollout.sleep and settings.beside_learner,
    )
    if rollout.sleep and device.type == "cpu":
        raise SpecError(
            Issue("vLLM cannot sleep on a CPU", path=("rollout", "sleep"), given="true", hint="leave sleep out")
        )
    with memory_of_sampler(rollout, device):
        if rollout.placement == "colocated":
            return VllmSampler(engine)
        gpus: tuple[str, ...] = ()
        if device.type == "cuda":
            gpus, engine = engine_gpus(rollout), replace(engine, transfer=transfer_to_engines(rollout))
        if rollout.ranks_per_engine == 1:
            return DedicatedSampler(engine, gpus=gpus)
        return opened_on_all_ranks(
            lambda: HostSampler(engine, gpus=gpus) if has_sampler(rollout) else GuestSampler(engine)
        )


def engine_gpus(rollout: VllmRollout) -> tuple[str, ...]:
    """The GPUs of the engine that serves this rank, as CUDA_VISIBLE_DEVICES is to name them. All ranks call it.

    Raises:
        SpecError: the engines of a machine cannot be on the GPUs that the spec names. All ranks raise it: they would
            wait in vain for one that did alone.
    """
    if issues := list(rollout.placement_issues(ranks.gather(_local_ranks()))):
        raise SpecError(*issues)
    places = rollout.engine_places(_local_ranks())[ranks.local_rank() // rollout.ranks_per_engine]
    return tuple(_name(place) for place in places)


def transfer_to_engines(rollout: VllmRollout) -> Transfer:
    """How weights reach the engines: ipc where they are on GPUs of the ranks that they serve, nccl where they are on
    others, on all machines the same. A GPU cannot be in nccl's group twice, as rank and as engine; and with ipc all
    ranks take part."""
    return "ipc" if rollout.share_gpus([_local_ranks()]) == {True} else "nccl"


def _name(place: int) -> str:
    """The name of the run's GPU at this place. A place beyond the known GPUs, as in a run of ranks that were started by
    hand, is itself the name."""
    known = gpus_of_run()
    return known[place] if place < len(known) else str(place)


def _local_ranks() -> int:
    """Ranks of this machine."""
    for name in ("LOCAL_SIZE", "LOCAL_WORLD_SIZE", "WORLD_SIZE"):
        if name in os.environ:
            return int(os.environ[name])
    return 1
