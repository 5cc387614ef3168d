"""Values that change over training, such as `{schedule: [[1, 0.1], [200, 0.3]], between: linear}` in place of a
number."""

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from operator import itemgetter
from typing import Annotated, Any, Literal, Self, TypeVar, assert_never, get_args

from pydantic import Field, GetCoreSchemaHandler, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, InitErrorDetails, core_schema

from specs.errors import Issue, IssueError
from specs.schema.base import Spec
from specs.schema.fields import SIGNS, describe, number

SCHEDULABLE = (
    "objective.kl_coef",
    "objective.clip.low",
    "objective.clip.high",
    "objective.parameters.NAME",
    "reference.update.every_steps",
    "training.optimizer.learning_rate",
)
"""Fields that accept a schedule; NAME is any key. The value at a step applies from that step on, not earlier."""


def schedulable_field(path: str) -> str:
    """Returns the schedulable field at or above a path; an empty text if the path has none.

    Example:
        >>> schedulable_field("objective.clip.low.schedule.0.1"), schedulable_field("objective.parameters.beta")
        ('objective.clip.low', 'objective.parameters.beta')
    """
    parts = path.split(".")
    for field in SCHEDULABLE:
        own = field.split(".")
        if len(parts) >= len(own) and all(name in ("NAME", part) for name, part in zip(own, parts, strict=False)):
            return ".".join(parts[: len(own)])
    return ""


class ValueSchedule(Spec):
    """A value that changes over training. It depends only on the step, so that a resumed run continues unchanged."""

    schedule: tuple[tuple[Annotated[int, Field(ge=0)], float], ...] = Field(min_length=1)
    """Points of [step, value], with increasing steps. Steps count from 1, as in every record. Before the first point
    the value is the first point's, after the last point the last point's."""
    between: Literal["step", "linear", "cosine"] = "step"
    """Interpolation between points. step: a point's value holds until the next point. linear: a straight line. cosine:
    half a wave, level at both points."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        for index, ((step, _), (following, _)) in enumerate(pairwise(self.schedule), 1):
            if following <= step:
                raise IssueError(Issue("steps must increase", ("schedule", index, 0), f"{following} after {step}"))
        return self

    def at(self, step: int) -> float:
        """Returns the value at a step.

        Example: half-way up a ramp.
            >>> ValueSchedule(schedule=((1, 0.25), (201, 0.75)), between="linear").at(101)
            0.5
        """
        after = bisect_right(self.schedule, step, key=itemgetter(0))
        if after in (0, len(self.schedule)):
            return self.schedule[max(after - 1, 0)][1]
        (start, value), (end, following) = self.schedule[after - 1 : after + 1]
        return value + self._share((step - start) / (end - start)) * (following - value)

    def _share(self, progress: float) -> float:
        """Returns the share of the way from one value to the next, after this share of the steps between them."""
        match self.between:
            case "step":
                return 0.0
            case "linear":
                return progress
            case "cosine":
                return (1 - math.cos(math.pi * progress)) / 2
            case never:
                assert_never(never)

    def phases(self) -> set[int]:
        """Returns the steps of the points and the middle step of each ramp."""
        points = [max(1, step) for step, _ in self.schedule]
        ramps = pairwise(points) if self.between != "step" else ()
        return {*points, *((start + end) // 2 for start, end in ramps)}

    def __str__(self) -> str:
        values, steps = zip(*((f"{value:g}", str(step)) for step, value in self.schedule), strict=True)
        if len(values) == 1:
            return f"{values[0]}"
        way = "held" if self.between == "step" else self.between
        return f"{' -> '.join(values)} ({way}, steps {', '.join(steps)})"


@dataclass(frozen=True, slots=True)
class Schedulable:
    """Annotation of a field that accepts a number or a ValueSchedule, with bounds for the number and for every value of
    the schedule."""

    gt: float | None = None
    ge: float | None = None
    lt: float | None = None

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        kind = next(kind for kind in get_args(source) if kind is not ValueSchedule)
        bounds = {name: bound for name, bound in asdict(self).items() if bound is not None}

        def check(schedule: ValueSchedule) -> ValueSchedule:
            errors = [
                InitErrorDetails(
                    type="value_error", loc=("schedule", index, 1), input=value, ctx={"error": IssueError(issue)}
                )
                for index, (_, value) in enumerate(schedule.schedule)
                if (issue := self._issue(value, kind))
            ]
            if errors:
                raise ValidationError.from_exception_data("schedule", errors)
            return schedule

        scheduled = core_schema.no_info_after_validator_function(check, handler.generate_schema(ValueSchedule))
        return core_schema.tagged_union_schema(
            {"number": handler.generate_schema(Annotated[kind, Field(**bounds)]), "schedule": scheduled},
            lambda value: "schedule" if isinstance(value, (dict, ValueSchedule)) else "number",
        )

    def _issue(self, value: float, kind: type) -> Issue | None:
        """Returns the issue with one value of a schedule, worded as for a plain number, or None."""
        message = ""
        if kind is int and not value.is_integer():
            message = "must be a whole number"
        for name, holds in (("gt", value.__gt__), ("ge", value.__ge__), ("lt", value.__lt__)):
            bound = getattr(self, name)
            if bound is not None and not holds(bound):
                message = message or f"must be {SIGNS[name]} {number(bound)}"
        bounded: Any = Annotated[kind, self]
        allowed = describe(kind, FieldInfo.from_annotation(bounded))
        return Issue(message, given=number(value), allowed=allowed) if message else None


def value_at(value: float | ValueSchedule, step: int) -> float:
    """Returns the value of a field at a step."""
    return value.at(step) if isinstance(value, ValueSchedule) else value


def largest(value: float | ValueSchedule) -> float:
    """Returns the largest value that a field ever has."""
    return max(point for _, point in value.schedule) if isinstance(value, ValueSchedule) else value


def smallest(value: float | ValueSchedule) -> float:
    """Returns the smallest value that a field ever has."""
    return min(point for _, point in value.schedule) if isinstance(value, ValueSchedule) else value


def constant(value: float | ValueSchedule) -> float:
    """Returns the number of a field whose section has gone through `at_step`.

    Raises:
        ValueError: the field still has a schedule.
    """
    if isinstance(value, ValueSchedule):
        raise ValueError(f"the value changes over training ({value}): take at_step(objective, step)")
    return value


Section = TypeVar("Section", bound=Spec)


def at_step(section: Section, step: int) -> Section:
    """Returns the section with a number in place of each schedule; the section itself if it has no schedule."""
    changed: dict[str, Any] = {}
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, ValueSchedule):
            changed[name] = value.at(step)
        elif isinstance(value, Spec) and (inner := at_step(value, step)) is not value:
            changed[name] = inner
        elif isinstance(value, dict) and any(isinstance(item, ValueSchedule) for item in value.values()):
            changed[name] = {
                key: item.at(step) if isinstance(item, ValueSchedule) else item for key, item in value.items()
            }
    return section.model_copy(update=changed) if changed else section


def schedules_in(section: Spec) -> Iterator[tuple[tuple[str, ...], ValueSchedule]]:
    """Yields the path and schedule of each scheduled field of a section and of the sections inside it."""
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, ValueSchedule):
            yield (name,), value
        elif isinstance(value, Spec):
            yield from (((name, *path), schedule) for path, schedule in schedules_in(value))
        elif isinstance(value, dict):
            yield from (((name, key), item) for key, item in value.items() if isinstance(item, ValueSchedule))
