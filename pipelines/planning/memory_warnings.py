"""Warnings about runs that do not fit their device or the disk, with remedies."""

from collections.abc import Iterable
from dataclasses import replace

from pipelines.planning.device import KNOWN_GPUS, NAMED_BY_SPEC, Device, device_of
from pipelines.planning.gpu_sharing import planned_on
from pipelines.planning.memory import GIB, MemoryEstimate, batch_algebra, memory_estimate
from pipelines.planning.model_shape import model_shape
from rpg.base.shape import ModelShape
from specs.errors import Issue
from specs.schema.experiment import Experiment
from specs.schema.rollout import Rollout

_SHARE_OF_DISK = 0.2
"""Share of the free disk that recorded tokens may take without a warning."""


def disk_warnings(experiments: Iterable[Experiment], free: int) -> list[Issue]:
    """Returns a warning if the token rows of the runs may take more than a fifth of the free disk.

    Args:
        experiments: experiments of the unfinished runs.
        free: bytes.
    """
    each = [(batch_algebra(experiment).recorded_bytes, experiment.record.tokens) for experiment in experiments]
    needed = sum(size for size, _ in each)
    if needed <= _SHARE_OF_DISK * free:
        return []
    _, tokens = max(each)
    fewer = (
        "record.tokens: sampled keeps a tenth of them"
        if tokens == "all"
        else "a lower record.sampled_share keeps fewer"
    )
    return [
        Issue(
            f"token rows take {needed / GIB:.1f} GiB, if every response has its full length; {free / GIB:.1f} are free",
            path=("record", "tokens"),
            given=tokens,
            hint=f"{fewer} (`rpg replay` needs all), record.keep_days lets `rpg gc` delete old ones; or set RPG_HOME "
            "to a directory on another disk",
        )
    ]


def memory_warnings(experiment: Experiment) -> list[Issue]:
    """Warns if the estimate exceeds the memory of the device (`device_of`)."""
    shape = model_shape(experiment)
    device = device_of(experiment, shape) if shape else None
    if shape is None or device is None or _fits(experiment, shape, device) or memory_errors(experiment):
        return []
    estimate = memory_estimate(planned_on(experiment, shape, device), shape)
    largest = f"largest part: {_largest_part(estimate, experiment.rollout)}{_gain_while_sampling(estimate, experiment)}"
    if device.name == NAMED_BY_SPEC:
        on, hint = "the given memory", largest
    else:
        fitting = [gpu.name for gpu in KNOWN_GPUS if _fits(experiment, shape, gpu)]
        on = device.name
        hint = f"{largest}; it fits {' and '.join(fitting) or 'no GPU that is known here'}"
        hint += "; set resources.memory_gib to the memory of your GPUs"
    return [
        Issue(
            f"the estimated {estimate.total / GIB:.1f} GiB per rank do not fit {on}",
            path=("resources", "memory_gib"),
            given=f"{device.memory_gib:g}",
            hint=hint,
        )
    ]


def memory_errors(experiment: Experiment) -> list[Issue]:
    """Returns an error if a run would fit its device without a divergence that is summed over the vocabulary, and does
    not fit with it."""
    if experiment.objective.summed_over == "sampled":
        return []
    shape = model_shape(experiment)
    device = device_of(experiment, shape) if shape else None
    sampled = experiment.objective.model_copy(update={"kl": "sampled", "divergence": "reverse"})
    alone = experiment.model_copy(update={"objective": sampled})
    if shape is None or device is None or _fits(experiment, shape, device) or not _fits(alone, shape, device):
        return []
    estimate = memory_estimate(planned_on(experiment, shape, device), shape)
    given = f"{experiment.objective.summed_over}: {estimate.total / GIB:.1f} GiB a rank, with {device.memory_gib:g}"
    smaller = "kl: top_k keeps fewer numbers a token, " if experiment.objective.summed_over == "full" else ""
    return [
        Issue(
            f"the reference's distributions do not fit: {estimate.distributions / GIB:.1f} GiB",
            path=("objective", "kl"),
            given=given,
            hint=f"{smaller}more ranks keep fewer tokens each, kl: sampled keeps nothing; set resources.memory_gib "
            "to the memory of your GPUs",
        )
    ]


def _fits(experiment: Experiment, shape: ModelShape, device: Device) -> bool:
    return memory_estimate(planned_on(experiment, shape, device), shape).total <= device.memory_gib * GIB


def _largest_part(estimate: MemoryEstimate, rollout: Rollout) -> str:
    remedies = {
        "weights": "training.zero_stage: 3 divides them among the ranks",
        "gradients": "training.zero_stage: 2 divides them among the ranks",
        "buckets": "training.zero_stage: 0 adds them up in place",
        "optimizer": "training.zero_stage: 1 divides it, training.offload.optimizer moves it to the host",
        "reference": "reference.source: behaviour needs no second model, training.zero_stage: 3 divides it",
        "sampler": "below training.zero_stage: 3, with rollout.max_staleness: 0, sampling needs no second model",
        "scoring": "a smaller memory_fraction of the judge, or its model behind an `endpoint`",
        "gathered": "below training.zero_stage: 3 nothing is gathered",
        "activations": "a smaller training.microbatch_tokens, training.gradient_checkpointing: selective or true, or "
        "training.sequence_parallel_size: 2 and more, by which ranks share a sequence",
        "logits": "a smaller vocabulary",
        "distributions": "objective.kl: top_k or sampled",
        "kv_cache": rollout.smaller_cache,
    }
    name = max(remedies, key=lambda part: getattr(estimate, part))
    return f"{name} with {getattr(estimate, name) / GIB:.1f} GiB; {remedies[name]}"


def _gain_while_sampling(estimate: MemoryEstimate, experiment: Experiment) -> str:
    """Returns a further remedy if sampling needs more memory than training; empty if the remedy gains almost
    nothing."""
    gain = estimate.total - replace(estimate, away=estimate.only_for_updates).total
    offload = experiment.training.offload
    if gain < GIB / 10 or offload.optimizer or offload.parameters or experiment.resources.device == "cpu":
        return ""
    return f"; training.offload.while_sampling: true takes {gain / GIB:.1f} GiB off"
