"""Placement of a rank's engines: in this process, or in separate ones, which other ranks may share and which may be on
other machines."""

from contextlib import ExitStack
from dataclasses import replace

from rpg.pretrained import special_tokens
from rpg.processes import ranks
from rpg.samplers.base import Sampler, SamplerSettings
from rpg.samplers.out_of_memory import memory_of_sampler
from rpg.samplers.sampling_ranks import own_samplers, ranks_together
from rpg.samplers.vllm.child_engine import ChildEngine
from rpg.samplers.vllm.dedicated import DedicatedSampler, EngineProcess
from rpg.samplers.vllm.engine import AnyEngineSettings, EngineSettings, Transfer
from rpg.samplers.vllm.remote_engine import RemoteEngine
from rpg.samplers.vllm.sampler import VllmSampler
from rpg.samplers.vllm.sharing import GuestSampler, HostSampler, opened_on_all_ranks
from specs.errors import Issue, SpecError
from specs.machine.gpu_slots import gpu_at, gpus_of_run
from specs.machine.launch import engines_elsewhere
from specs.schema.rollout import Rollout, VllmRollout


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
        if device.type == "cuda":
            engine = replace(engine, transfer=transfer_to_engines(rollout))
        return open_engines(rollout, engine)


def open_engines(rollout: Rollout, settings: AnyEngineSettings) -> DedicatedSampler | GuestSampler:
    """Opens this rank's engines in processes of their own, or shares that of another rank. All ranks call it.

    Args:
        rollout: the section as a machine has it, see `Experiment.sampling`.
        settings: settings of each engine.
    Raises:
        SpecError: an engine does not start, or has no GPU.
    """
    numbers, elsewhere = own_samplers(rollout), engines_elsewhere()
    places = engine_gpus(rollout) if settings.device_type == "cuda" and not elsewhere else {}
    is_shared = rollout.samplers(ranks_together()) < ranks_together()

    def processes() -> list[EngineProcess]:
        with ExitStack() as opened:
            made: list[EngineProcess] = []
            for number in numbers:
                made.append(RemoteEngine(number) if elsewhere else ChildEngine(places.get(number, ())))
                opened.callback(made[-1].close)
            opened.pop_all()
            return made

    if not is_shared:
        return DedicatedSampler(settings, processes())
    return opened_on_all_ranks(lambda: HostSampler(settings, processes()) if numbers else GuestSampler(settings))


def engine_gpus(rollout: Rollout) -> dict[int, tuple[str, ...]]:
    """Returns the GPUs of each of this rank's engines, in the form of CUDA_VISIBLE_DEVICES. All ranks call it.

    Raises:
        SpecError: the engines of a machine cannot be on the GPUs that the spec names. All ranks raise it, since they
            would wait forever for a single rank that did.
    """
    local_ranks = ranks.on_this_machine()
    if issues := list(rollout.placement_issues(ranks.gather(local_ranks))):
        raise SpecError(*issues)
    places, known = rollout.engine_places(local_ranks), gpus_of_run()
    return {number: tuple(gpu_at(known, place) for place in places[number]) for number in own_samplers(rollout)}


def transfer_to_engines(rollout: VllmRollout) -> Transfer:
    """Returns how weights reach the engines: ipc if they are on GPUs of the ranks that they serve, nccl if they are on
    others; the same way in the whole run. A GPU cannot be in nccl's group twice, as rank and as engine; and with ipc
    all ranks take part."""
    shared = not engines_elsewhere() and rollout.share_gpus([ranks.on_this_machine()]) == {True}
    return "ipc" if shared else "nccl"
