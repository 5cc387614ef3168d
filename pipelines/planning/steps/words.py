"""The time of a step in words, for `rpg plan`."""

from collections.abc import Sequence
from dataclasses import asdict

from pipelines.planning.device import Device
from pipelines.planning.gpu_sharing import planned_on
from pipelines.planning.steps.changes import Placement, changes, placement_keys, placements
from pipelines.planning.steps.parts import MeanLengths, step_parts
from rpg.base.shape import ModelShape
from specs.schema.experiment import Experiment

_MOST_CHANGES = 4


def step_lines(experiment: Experiment, shape: ModelShape, device: Device | None, means: MeanLengths) -> list[str]:
    """Returns a step as a table, and the changes that would save the most."""
    parts = step_parts(planned_on(experiment, shape, device), shape, means)
    lengths = (
        f"responses of {means.response:,} tokens in the mean" if means.response else "all responses at full length"
    )
    together = "; sampling and training at the same time" if parts.overlaps else ""
    gpus = f"{parts.gpus} H100" + ("s" if parts.gpus > 1 else "")
    lines = [f"step    about {parts.step:,.1f} s on {gpus}, {lengths}{together}"]
    shown = {**parts.seconds, "step": parts.step}
    for name, seconds in shown.items():
        rate = f"{parts.rates[name]:>10,.0f} tokens/s/GPU" if name in parts.rates else ""
        lines.append(f"        {name:<11}{seconds:>9,.1f} s {seconds / parts.step:>5.0%} {rate}".rstrip())
    found = changes(experiment, shape, device, means)
    for place, change in enumerate(found[:_MOST_CHANGES]):
        head = "saves" if place == 0 else ""
        lines.append(f"{head:<8}{change.saved:,.1f} s, {change.saved / parts.step:.0%}: {change.what}")
    return lines


def placement_lines(experiment: Experiment, shape: ModelShape, device: Device | None, means: MeanLengths) -> list[str]:
    """Returns the splits of the run's GPUs between training and sampling, the one with the shortest step marked."""
    splits = placements(experiment, shape, device, means)
    if not splits:
        return ["split   --placement compares splits of two GPUs and more of one machine, with rollout.engine: vllm"]
    best = min((split for split in splits if split.fits), key=lambda split: split.parts.step, default=None)
    lines = ["split   training GPUs, engines, max_staleness: seconds of sampling, training and a step"]
    lines += [_split_line(split, is_best=split is best) for split in splits]
    return [*lines, f"        best: {placement_keys(best)}"] if best else [*lines, "        no split fits"]


def _split_line(split: Placement, *, is_best: bool) -> str:
    parts = split.parts
    engines = str(split.engines) if split.engines else "on them"
    sampling, training = parts.sampling + parts.tail, parts.logprobs + parts.update
    note = "  <- best" if is_best else "" if split.fits else "  does not fit"
    seconds = f"{sampling:>9,.1f} {training:>9,.1f} {parts.step:>9,.1f} s"
    return f"        {split.ranks:>3} {engines:>8} {split.max_staleness:>3}  {seconds}{note}"


def step_data(
    experiment: Experiment, shape: ModelShape, device: Device | None, means: MeanLengths
) -> dict[str, object]:
    """Returns the same as plain data."""
    parts = step_parts(planned_on(experiment, shape, device), shape, means)
    found = changes(experiment, shape, device, means)
    splits: Sequence[Placement] = placements(experiment, shape, device, means)
    return {
        "mean_lengths": asdict(means),
        "seconds": {**parts.seconds, "step": parts.step},
        "tokens_per_second_per_gpu": parts.rates,
        "overlaps": parts.overlaps,
        "changes": [{"what": change.what, "saved_seconds": change.saved} for change in found],
        "placements": [
            {
                "ranks": split.ranks,
                "engines": split.engines,
                "max_staleness": split.max_staleness,
                "fits": split.fits,
                "seconds": {**split.parts.seconds, "step": split.parts.step},
            }
            for split in splits
        ],
    }
