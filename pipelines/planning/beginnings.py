"""Trainings with the same first steps: with values that change over the steps, two specs may be equal up to a step."""

from collections.abc import Mapping
from typing import Any

from pipelines.planning.fingerprint import Identity
from specs.schema.schedule import ValueSchedule, largest, schedulable_field


def shared_steps(one: Identity, other: Identity, steps: int) -> int:
    """Returns the number of steps, from the first on, that two trainings with this many steps have in common.

    They may differ in fields that have a schedule in both. If a field has a schedule in only one of them, that run
    records the field at each step and the other does not, so the two share no step.

    Example: the second one differs from the first after two steps.
        >>> field = "objective.kl_coef"
        >>> first = {f"{field}.schedule.0.0": 1, f"{field}.schedule.0.1": 0.1, f"{field}.between": "step"}
        >>> second = first | {f"{field}.schedule.1.0": 3, f"{field}.schedule.1.1": 0.2}
        >>> shared_steps(first, second, 6), shared_steps(first, {field: 0.1}, 6)
        (2, 0)
    """
    changed = {path for path in one.keys() | other.keys() if one.get(path, ...) != other.get(path, ...)}
    fields = {schedulable_field(path) for path in changed}
    if "" in fields:
        return 0
    pairs = [(_schedule(one, field), _schedule(other, field)) for field in fields]
    if any(first is None or second is None or _acts(first) != _acts(second) for first, second in pairs):
        return 0
    parting = (
        step
        for step in range(1, steps + 1)
        if any(first.at(step) != second.at(step) for first, second in pairs if first and second)
    )
    shared = next(parting, steps + 1) - 1
    # A checkpoint holds the batches that are sampled ahead, at the temperatures of later steps.
    ahead = int(one.get("rollout.max_staleness", 0)) if "rollout.temperature" in fields else 0
    return max(0, shared - ahead)


def _acts(value: ValueSchedule) -> bool:
    """Returns whether the value is ever above 0: then a reference policy is kept from the first step on."""
    return largest(value) > 0


def _schedule(identity: Mapping[str, Any], field: str) -> ValueSchedule | None:
    """Returns the schedule of a field in a flat identity. None if it has none."""
    points: dict[int, dict[str, Any]] = {}
    for path, value in identity.items():
        if path.startswith(f"{field}.schedule."):
            index, place = path.removeprefix(f"{field}.schedule.").split(".")
            points.setdefault(int(index), {})[place] = value
    if not points:
        return None
    ordered = tuple((int(points[index]["0"]), float(points[index]["1"])) for index in sorted(points))
    return ValueSchedule(schedule=ordered, between=identity[f"{field}.between"])
