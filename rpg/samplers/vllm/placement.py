"""Where a rank's vLLM engine lives: in this process, or in one of its own with GPUs of its own."""

import os
from dataclasses import replace

import torch

from rpg.processes.gpu_slots import gpus_of_run
from rpg.samplers.base import Sampler, SamplerSettings, special_tokens
from rpg.samplers.out_of_memory import memory_of_sampler
from rpg.samplers.vllm.dedicated import DedicatedSampler
from rpg.samplers.vllm.engine import EngineSettings, Transfer
from rpg.samplers.vllm.sampler import VllmSampler
from specs.errors import Issue, SpecError
from specs.schema.rollout import VllmRollout


def open_sampler(rollout: VllmRollout, settings: SamplerSettings) -> Sampler:
    """The engine of this rank.

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
        if device.type == "cpu":
            return DedicatedSampler(engine)
        gpus = engine_gpus(rollout)
        transfer: Transfer = "ipc" if gpus == (rank_gpu(device),) else "nccl"
        return DedicatedSampler(replace(engine, transfer=transfer), gpus=gpus)


def engine_gpus(rollout: VllmRollout) -> tuple[str, ...]:
    """The GPUs of this rank's engine, as CUDA_VISIBLE_DEVICES is to name them.

    Raises:
        SpecError: fewer are named than this machine's ranks need.
    """
    rank, ranks = int(os.environ.get("LOCAL_RANK", "0")), _local_ranks()
    size = rollout.tensor_parallel_size
    places = rollout.engine_gpus or tuple(range(ranks, ranks * (1 + size)))
    if len(places) < ranks * size:
        raise SpecError(
            Issue(
                "too few GPUs for the engines",
                path=("rollout", "engine_gpus"),
                given=f"{len(places)} for {ranks} engines of {size}",
                allowed=f"{ranks * size}",
            )
        )
    return tuple(_name(place) for place in places[rank * size : (rank + 1) * size])


def rank_gpu(device: torch.device) -> str:
    """This rank's GPU, as CUDA_VISIBLE_DEVICES is to name it."""
    return _name(device.index or 0)


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
