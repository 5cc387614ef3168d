"""Choice of the learner's and the sampler's shares of a GPU's memory, if the spec leaves them open.

The keys are `rollout.sleep` and `rollout.memory_fraction` of a colocated vLLM engine,
`training.offload.while_sampling`, and `training.gradient_checkpointing`.

Sampling is fast if the cache of all responses in flight fits. The choice with the
fewest moves that achieves this wins: both side by side; else they take turns; else the memory that only updates need
leaves the GPU as well. Activations are recomputed as little as fits.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pipelines.planning.device import Device, device_of, on_device, smallest_gpu
from pipelines.planning.memory import GIB, MemoryEstimate, in_flight, memory_estimate, wanted_cache
from pipelines.planning.model_shape import model_shape
from rpg.base.shape import ModelShape
from specs.schema.experiment import Experiment
from specs.schema.rollout import VllmRollout

USABLE = 0.92
"""Share of a GPU's memory that the plan uses. Estimates are accurate to a tenth, and CUDA takes about 1 GiB."""
ENGINE_FIXED = GIB
"""Bytes of an engine beside weights, cache and passes: CUDA's graphs and workspaces."""
LEVELS: tuple[bool | str, ...] = (False, "selective", True)
"""Values of `training.gradient_checkpointing`, from the least arithmetic to the least memory."""
SAMPLING_COPIES = 5
"""Number of arrays as large as the float32 logits that vLLM 0.32 uses to sample: logits, logits filtered by top_p,
logprobs, probabilities, noise."""


Choice = bool | float | str


@dataclass(frozen=True, slots=True)
class GpuSharing:
    """One choice of the keys that the spec leaves open."""

    keys: Mapping[str, Choice]
    """Values by their names in `rollout`, `training.offload` and `training`."""
    reason: str

    def __str__(self) -> str:
        """Returns keys and reason in one line."""
        places = {
            "while_sampling": "training.offload.while_sampling",
            "gradient_checkpointing": "training.gradient_checkpointing",
        }
        given = {places.get(key, f"rollout.{key}"): value for key, value in self.keys.items()}
        chosen = ", ".join(
            f"{key} {f'{value:g}' if isinstance(value, float) else str(value).lower()}" for key, value in given.items()
        )
        return f"{chosen}: {self.reason}"


@dataclass(frozen=True, slots=True)
class _Turns:
    """One way to share a GPU."""

    sleep: bool
    away: bool
    room: float
    """Bytes that are left for the engine."""


def planned_on(experiment: Experiment, shape: ModelShape, device: Device | None) -> Experiment:
    """Returns the experiment as it runs on a device: with its memory, and the choices that follow from it."""
    sharing = gpu_sharing(experiment, shape, device)
    return on_device(experiment.sharing_memory(sharing.keys) if sharing else experiment, device)


def with_recomputation(experiment: Experiment, shape: ModelShape) -> Experiment:
    """Returns the experiment with `gradient_checkpointing` as it runs on its device."""
    level = planned_on(experiment, shape, device_of(experiment, shape)).training.gradient_checkpointing
    return experiment.sharing_memory({"gradient_checkpointing": level})


def sharing_inputs(experiment: Experiment) -> dict[str, Mapping[str, Choice]]:
    """Returns the choice as an input of the trainer; empty if the spec leaves nothing open."""
    shape = model_shape(experiment) if knows_gpu(experiment) else None
    sharing = gpu_sharing(experiment, shape, device_of(experiment, shape)) if shape else None
    keys = dict(sharing.keys) if sharing else {}
    if experiment.training.gradient_checkpointing == "auto":
        is_unknown_gpu = experiment.resources.device == "cuda" or experiment.launcher.type != "local"
        keys = {"gradient_checkpointing": is_unknown_gpu and experiment.resources.device != "cpu"} | keys
    return {"sharing": keys} if keys else {}


def knows_gpu(experiment: Experiment) -> bool:
    """Returns whether the run has a GPU whose memory is known.

    Either the spec asks for a GPU and gives its memory, or the run uses this machine's GPU, whose memory the spec may
    give. An option of sbatch asks for one too.
    """
    resources = experiment.resources
    if resources.memory_gib and (
        resources.device == "cuda" or (resources.device == "auto" and experiment.launcher.asks_for_gpus)
    ):
        return True
    return resources.device != "cpu" and experiment.launcher.type == "local" and smallest_gpu() is not None


def gpu_sharing(experiment: Experiment, shape: ModelShape, device: Device | None) -> GpuSharing | None:
    """Returns the choice of the open keys. None if no key is open, or if no choice makes the run fit."""
    if experiment.training.gradient_checkpointing != "auto":
        return _of_memory(experiment, shape, device)
    if device is None:
        return None
    for level in LEVELS:
        tried = experiment.sharing_memory({"gradient_checkpointing": level})
        sharing = _of_memory(tried, shape, device)
        keys = sharing.keys if sharing else {}
        needed = memory_estimate(on_device(tried.sharing_memory(keys), device), shape).total
        if needed <= USABLE * device.memory_gib * GIB or level is LEVELS[-1]:
            break
    reason = f"the estimate is then {needed / GIB:.0f} of {device.memory_gib:g} GiB"
    return GpuSharing({"gradient_checkpointing": level, **keys}, f"{sharing.reason}; {reason}" if sharing else reason)


def _of_memory(experiment: Experiment, shape: ModelShape, device: Device | None) -> GpuSharing | None:
    """Returns the choice of the keys that share memory."""
    rollout = experiment.rollout
    if (
        device is None
        or not knows_gpu(experiment)
        or rollout.max_staleness
        or experiment.gpus > experiment.training.ranks
    ):
        return None
    if not isinstance(rollout, VllmRollout):
        return _of_transformers(experiment, shape, device)
    if rollout.placement == "dedicated":
        return None
    return _of_engine(experiment, rollout, shape, device)


def engine_work(experiment: Experiment, shape: ModelShape, device: Device) -> int:
    """Returns the bytes that an engine needs beside weights and cache, which vLLM measures when it starts.

    Its largest pass has as many tokens as vLLM batches by default. Then all responses under way are sampled.
    """
    tokens = 16384 if device.memory_gib >= 70 else 8192
    size = 2 if experiment.training.precision == "bfloat16" else 4
    attention = 2 * (shape.attention_size + shape.key_value_size)
    mlp = (3 if shape.is_gated else 2) * shape.intermediate_size + shape.experts_per_token * shape.hidden_size
    layer = 3 * shape.hidden_size + max(attention, mlp)  # input, residual and norm; then the wider half
    sampling = in_flight(experiment) * shape.vocab_size * 4 * SAMPLING_COPIES
    return ENGINE_FIXED + max(tokens * layer * size, sampling)


def _of_transformers(experiment: Experiment, shape: ModelShape, device: Device) -> GpuSharing | None:
    """Returns the choice for a sampler in the trainer's process. Such a sampler always takes turns with training."""
    stays, leaves = (
        memory_estimate(on_device(experiment.sharing_memory({"while_sampling": away}), device), shape).total
        for away in (False, True)
    )
    usable = device.memory_gib * GIB
    if not _may_leave(experiment) or stays <= usable or leaves > usable:
        return None
    cache = wanted_cache(experiment, shape)
    return GpuSharing({"while_sampling": True}, f"{_responses(experiment)} have a cache of {cache / GIB:.0f} GiB")


def _of_engine(experiment: Experiment, rollout: VllmRollout, shape: ModelShape, device: Device) -> GpuSharing | None:
    fraction = rollout.memory_fraction
    cache, size = wanted_cache(experiment, shape), 2 if experiment.training.precision == "bfloat16" else 4
    weights = shape.parameters * size + engine_work(experiment, shape, device)
    memory = device.memory_gib * GIB
    wanted = fraction * memory if fraction else weights + cache
    ways = list(_ways(experiment, rollout, memory_estimate(on_device(experiment, device), shape), USABLE * memory))
    enough = [way for way in ways if way.room >= wanted]
    best = enough[0] if enough else max(ways, key=lambda way: way.room, default=None)
    if best is None or best.room < (wanted if fraction else weights + cache / in_flight(experiment)):
        return None
    keys: dict[str, Choice] = {}
    if rollout.sleep == "auto":
        keys["sleep"] = best.sleep
    if fraction is None:
        keys["memory_fraction"] = int(100 * min(wanted, best.room) / memory) / 100
    if experiment.training.offload.while_sampling == "auto":
        keys["while_sampling"] = best.away
    return GpuSharing(keys, _reason(experiment, best, cache, best.room - weights)) if keys else None


def _ways(experiment: Experiment, rollout: VllmRollout, estimate: MemoryEstimate, usable: float) -> Iterator[_Turns]:
    """Yields the ways to share the GPU that the spec leaves open and that give an update enough memory. Those that move
    the least come first."""
    resident = estimate.weights + estimate.only_for_updates + estimate.reference + estimate.scoring
    learner = resident + estimate.for_passes
    leaving = experiment.training.offload.while_sampling
    if learner > usable:
        return
    if not rollout.sleeps:
        yield _Turns(sleep=False, away=False, room=usable - learner)
    if rollout.sleep is False:
        return
    if leaving != True:  # noqa: E712  # "auto" is open
        yield _Turns(sleep=True, away=False, room=usable - resident)
    if leaving is True or (leaving == "auto" and _may_leave(experiment)):
        yield _Turns(sleep=True, away=True, room=usable - resident + estimate.only_for_updates)


def _may_leave(experiment: Experiment) -> bool:
    """Returns whether the plan may move the memory that only updates need: the key is open, and the memory is not on
    the host already."""
    offload = experiment.training.offload
    return offload.while_sampling == "auto" and not offload.optimizer and not offload.parameters


def _responses(experiment: Experiment) -> str:
    return f"{in_flight(experiment)} responses under way"


def _reason(experiment: Experiment, way: _Turns, cache: float, room: float) -> str:
    turns = "the engine sleeps while the learner trains" if way.sleep else "engine and learner have room side by side"
    leaves = ", and the update's state is in host memory meanwhile" if way.away else ""
    lacks = f", of which {max(0.0, room) / GIB:.0f} fit" if room < cache else ""
    return f"{_responses(experiment)} need a cache of {cache / GIB:.0f} GiB{lacks}; {turns}{leaves}"
