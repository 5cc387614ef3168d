"""Changes to a spec that make the calculated step shorter: keys, and the split of the GPUs."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pipelines.planning.device import Device
from pipelines.planning.gpu_sharing import LEVELS, planned_on
from pipelines.planning.memory import GIB, memory_estimate
from pipelines.planning.steps.parts import MeanLengths, StepParts, step_parts
from rpg.base.shape import ModelShape
from specs.rules import issues_of
from specs.schema.experiment import Experiment
from specs.schema.rollout import VllmRollout

_LEAST_GAIN = 0.01
"""Share of a step below which a change is not proposed, because the calculation is not that exact."""


@dataclass(frozen=True, slots=True)
class Change:
    """A change and the seconds that it saves."""

    what: str
    """Keys with their values, and a condition if there is one."""
    saved: float
    """Seconds of a step."""


@dataclass(frozen=True, slots=True)
class Placement:
    """One split of the GPUs between training and sampling."""

    ranks: int
    engines: int
    """Number of engines with their own GPUs. 0: colocated, an engine on the GPU of each rank."""
    max_staleness: int
    fits: bool
    """Whether the estimate of a rank's memory fits the device."""
    parts: StepParts


def changes(experiment: Experiment, shape: ModelShape, device: Device | None, means: MeanLengths) -> list[Change]:
    """Returns the changes that save more than a hundredth of a step, the largest gain first."""
    now = step_parts(planned_on(experiment, shape, device), shape, means).step
    found = []
    for what, changed in _variants(experiment):
        planned = planned_on(changed, shape, device)
        if not any(issues_of(changed)) and _fits(planned, shape, device):
            saved = now - step_parts(planned, shape, means).step
            found.append(Change(what, saved))
    splits = [each for each in placements(experiment, shape, device, means) if each.fits]
    if splits:
        best = min(splits, key=lambda split: split.parts.step)
        found.append(Change(f"{placement_keys(best)} (rpg plan --placement)", now - best.parts.step))
    return sorted((each for each in found if each.saved > _LEAST_GAIN * now), key=lambda each: -each.saved)


def placement_keys(split: Placement) -> str:
    """Returns the keys of a split, as in a spec."""
    where = f"placement: dedicated, rollout.engines: {split.engines}" if split.engines else "placement: colocated"
    return f"training.ranks: {split.ranks}, rollout.{where}, rollout.max_staleness: {split.max_staleness}"


def placements(experiment: Experiment, shape: ModelShape, device: Device | None, means: MeanLengths) -> list[Placement]:
    """Returns the splits of one machine's GPUs between ranks and vLLM's engines: first the one in which both use all
    GPUs in turn, then the others in order of increasing ranks. Empty for other samplers, for one GPU and for several
    machines.

    The batch of a step stays the same. Splits run with `max_staleness` 1 at least, so that both work at once.
    """
    rollout, total = experiment.rollout, experiment.gpus
    machines = len(experiment.launcher.ranks_of_machines(experiment.training.ranks))
    if not isinstance(rollout, VllmRollout) or total == 1 or machines > 1 or experiment.launcher.engines_key:
        return []
    size = rollout.tensor_parallel_size
    splits: list[tuple[int, dict[str, Any]]] = [(total, {"placement": "colocated", "engines": 0})] if size == 1 else []
    splits += [
        (ranks, {"placement": "dedicated", "engines": (total - ranks) // size})
        for ranks in range(1, total)
        if not (total - ranks) % size
    ]
    return list(_tried(experiment, splits, shape, device, means))


def _tried(
    experiment: Experiment,
    splits: list[tuple[int, dict[str, Any]]],
    shape: ModelShape,
    device: Device | None,
    means: MeanLengths,
) -> Iterator[Placement]:
    for ranks, keys in splits:
        staleness = max(1, experiment.rollout.max_staleness) if keys["engines"] else experiment.rollout.max_staleness
        own = {"engine_gpus": (), "ranks_per_engine": 1, "max_staleness": staleness}
        sleep = {} if keys["engines"] == 0 else {"sleep": "auto", "memory_fraction": None}
        changed = _with(experiment, {"ranks": ranks}, {**keys, **own, **sleep})
        if any(issues_of(changed)):
            continue
        planned = planned_on(changed, shape, device)
        parts = step_parts(planned, shape, means)
        yield Placement(ranks, keys["engines"], staleness, _fits(planned, shape, device), parts)


def _variants(experiment: Experiment) -> Iterator[tuple[str, Experiment]]:
    """Yields changes of keys that may make a step shorter, each with its description."""
    rollout, training = experiment.rollout, experiment.training
    if isinstance(rollout, VllmRollout) and rollout.kv_cache == "auto":
        correction = {} if rollout.correction.type != "none" else {"correction": {"type": "truncate"}}
        changed = {"kv_cache": "fp8", "trust_logprobs": False, **correction}
        yield "rollout.kv_cache: fp8 with rollout.correction", _with(experiment, {}, changed)
    if not rollout.gives_old_logprobs:
        changed = {"trust_logprobs": True, "correction": {"type": "none"}}
        changed |= {"kv_cache": "auto"} if isinstance(rollout, VllmRollout) else {}
        condition = "if kl/rollout of a run is small; without correction and fp8"
        yield f"rollout.trust_logprobs: true ({condition})", _with(experiment, {}, changed)
    if training.gradient_checkpointing in LEVELS:
        for level in LEVELS[: LEVELS.index(training.gradient_checkpointing)]:
            yield (
                f"training.gradient_checkpointing: {str(level).lower()}",
                _with(experiment, {"gradient_checkpointing": level}, {}),
            )


def _with(experiment: Experiment, training: Mapping[str, Any], rollout: Mapping[str, Any]) -> Experiment:
    """Returns the experiment with other values in two sections, checked as if they were written."""
    sections = {"training": training, "rollout": rollout}
    return experiment.model_copy(
        update={
            name: type(old := getattr(experiment, name)).model_validate(
                {**{key: getattr(old, key) for key in old.model_fields_set}, **changed}
            )
            for name, changed in sections.items()
        }
    )


def _fits(planned: Experiment, shape: ModelShape, device: Device | None) -> bool:
    return device is None or memory_estimate(planned, shape).total <= device.memory_gib * GIB
