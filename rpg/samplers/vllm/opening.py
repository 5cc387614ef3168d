"""Opening of a rank's vLLM engine: in the rank's process, or in its own processes."""

from dataclasses import replace

from rpg.pretrained import special_tokens
from rpg.processes import ranks
from rpg.samplers.base import Sampler, SamplerSettings
from rpg.samplers.out_of_memory import memory_of_sampler
from rpg.samplers.vllm.engine import EngineSettings, Transfer
from rpg.samplers.vllm.placement import open_engines
from rpg.samplers.vllm.sampler import VllmSampler
from specs.errors import Issue, SpecError
from specs.machine.launch import engines_elsewhere
from specs.schema.rollout import VllmRollout


def open_sampler(rollout: VllmRollout, settings: SamplerSettings) -> Sampler:
    """Opens the engine of this rank, or a share of another rank's engine.

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
            Issue("an 8-bit cache needs a GPU", ("rollout", "kv_cache"), given="fp8", hint="leave kv_cache out")
        )
    if rollout.replay_routing and device.type == "cpu":
        hint = "leave replay_routing out, or take engine: transformers"
        raise SpecError(
            Issue("vLLM reports the experts of a token only on a GPU", ("rollout", "replay_routing"), "true", hint=hint)
        )
    with memory_of_sampler(rollout, device):
        if rollout.placement == "colocated":
            return VllmSampler(engine)
        if device.type == "cuda":
            engine = replace(engine, transfer=transfer_to_engines(rollout))
        return open_engines(rollout, engine)


def transfer_to_engines(rollout: VllmRollout) -> Transfer:
    """Returns how weights reach the engines: ipc if engines are on GPUs of the ranks that they serve, nccl if they are
    on other GPUs. The whole run uses the same way, because a GPU cannot be in nccl's group twice, as rank and as
    engine, and because with ipc all ranks take part."""
    shared = not engines_elsewhere() and rollout.share_gpus([ranks.on_this_machine()]) == {True}
    return "ipc" if shared else "nccl"
