"""Where a vLLM engine lives: in this process, or in one of its own with GPUs of its own."""

import os
from dataclasses import replace

import torch

from rpg.processes.gpu_slots import gpus_of_run
from rpg.samplers.base import Sampler
from rpg.samplers.vllm.engine import EngineSettings, Transfer
from specs.errors import Issue, SpecError
from specs.schema.rollout import VllmRollout


def open_vllm(rollout: VllmRollout, settings: EngineSettings, device: torch.device) -> Sampler:
    """The engine of this rank.

    Args:
        rollout: says where.
        settings: how weights come to it is still open.
        device: this rank's.
    Raises:
        SpecError: vLLM does not start so, or there is no GPU for it.
    """
    if rollout.sleep and device.type == "cpu":
        raise SpecError(
            Issue("vLLM cannot sleep on a CPU", path=("rollout", "sleep"), given="true", hint="leave sleep out")
        )
    if rollout.placement == "colocated":
        from rpg.samplers.vllm.sampler import VllmSampler

        return VllmSampler(settings)
    from rpg.samplers.vllm.dedicated import DedicatedSampler

    if device.type == "cpu":
        return DedicatedSampler(settings)
    gpus = engine_gpus(rollout)
    transfer: Transfer = "ipc" if gpus == (rank_gpu(device),) else "nccl"
    return DedicatedSampler(replace(settings, transfer=transfer), gpus=gpus)


def engine_gpus(rollout: VllmRollout) -> tuple[str, ...]:
    """Those of this rank's engine, as CUDA_VISIBLE_DEVICES is to name them.

    Raises:
        SpecError: fewer are named than this machine's ranks need.
    """
    rank, ranks = int(os.environ.get("LOCAL_RANK", "0")), _local_ranks()
    size = rollout.tensor_parallel_size
    named = rollout.engine_gpus or tuple(range(ranks, ranks * (1 + size)))
    if len(named) < ranks * size:
        raise SpecError(
            Issue(
                "too few GPUs for the engines",
                path=("rollout", "engine_gpus"),
                given=f"{len(named)} for {ranks} engines of {size}",
                allowed=f"{ranks * size}",
            )
        )
    return tuple(_name(place) for place in named[rank * size : (rank + 1) * size])


def rank_gpu(device: torch.device) -> str:
    """This rank's, as CUDA_VISIBLE_DEVICES is to name it."""
    return _name(device.index or 0)


def _name(place: int) -> str:
    """Of a GPU of this run. One beyond those that are known stands for itself: the ranks were started by hand."""
    known = gpus_of_run()
    return known[place] if place < len(known) else str(place)


def _local_ranks() -> int:
    for name in ("LOCAL_SIZE", "LOCAL_WORLD_SIZE", "WORLD_SIZE"):
        if name in os.environ:
            return int(os.environ[name])
    return 1
