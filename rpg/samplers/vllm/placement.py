"""Placement of a rank's engines in their own processes, which other ranks may share and which may be on other
machines."""

from contextlib import ExitStack

from rpg.processes import ranks
from rpg.samplers.sampling_ranks import own_samplers, ranks_together
from rpg.samplers.vllm.child_engine import ChildEngine
from rpg.samplers.vllm.dedicated import DedicatedSampler, EngineProcess
from rpg.samplers.vllm.engine import AnyEngineSettings
from rpg.samplers.vllm.remote_engine import RemoteEngine
from rpg.samplers.vllm.sharing import GuestSampler, HostSampler, opened_on_all_ranks
from specs.errors import SpecError
from specs.machine.gpu_slots import gpu_at, gpus_of_run
from specs.machine.launch import engines_elsewhere
from specs.schema.rollout import Rollout


def open_engines(rollout: Rollout, settings: AnyEngineSettings) -> DedicatedSampler | GuestSampler:
    """Opens this rank's engines in their own processes, or a share of another rank's engine. All ranks call it.

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
