"""Values that change over training, in place of a number: schedules and closed loops.

A schedule is `{schedule: [[1, 0.1], [200, 0.3]], between: linear}`, a closed loop `{target: 0.02, of: kl/reverse}`.
"""

import json
import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from typing import Annotated, Any, Literal, Self, TypeVar, assert_never, get_args

from pydantic import Field, GetCoreSchemaHandler, ValidationError, ValidatorFunctionWrapHandler, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, InitErrorDetails, core_schema

from specs.errors import Issue, IssueError, Path
from specs.schema.base import Spec
from specs.schema.fields import SIGNS, describe, nearest, number

SCHEDULABLE = (
    "objective.kl_coef",
    "objective.clip.low",
    "objective.clip.high",
    "objective.clip.dual",
    "objective.max_ratio",
    "objective.parameters.NAME",
    "rollout.temperature",
    "reference.update.every_steps",
    "reference.update.ema_decay",
    "training.entropy_coef",
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
    half a cosine wave, flat at both points."""

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
        """Returns how far the value has moved from one point to the next (0 to 1), after this share of the steps
        between them."""
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


LoopMetric = Literal[
    "kl/reverse",
    "kl/forward",
    "drift/reverse",
    "drift/forward",
    "entropy",
    "clip_fraction/low",
    "clip_fraction/high",
]
"""Metrics that a closed loop can follow. The annotation of a key names those that the key changes."""
FOLLOWING = ("objective.kl_coef", "objective.clip.low", "objective.clip.high", "training.entropy_coef")
"""Fields that accept a closed loop."""
FROM_NOTHING = 1e-3
"""Start value of a loop in a key whose default is 0."""
_RANGE = 1000.0
"""Ratio of a loop's default bounds to its start value."""


class ClosedLoop(Spec):
    """A value that is adjusted after each step so that a metric meets its target: the controller of Ziegler 2019,
    arXiv:1909.08593, section 2.2.

    The value is multiplied by 1 + gain x e, where e is metric / target - 1, clamped to [-0.2, 0.2]; for entropy_coef by
    1 - gain x e. A step without the metric changes nothing. The value is recorded at each step and saved in every
    checkpoint.
    """

    target: float = Field(gt=0)
    """Target of the metric, in the metric's unit."""
    of: LoopMetric
    """Name of the metric. kl_coef can follow kl/reverse, kl/forward, drift/reverse and drift/forward (the last two at
    evaluations); entropy_coef entropy; clip.low clip_fraction/low; clip.high clip_fraction/high."""
    start: float | None = Field(None, gt=0)
    """Value at the first step. If left out, the key's default, or 0.001 if the default is 0."""
    gain: float = Field(0.1, gt=0, le=1)
    """Relative change of the value per relative error. The value changes by at most 0.2 x gain per step."""
    least: float | None = Field(None, gt=0)
    """Smallest value. If left out, a thousandth of the start."""
    most: float | None = Field(None, gt=0)
    """Largest value. If left out, a thousand times the start, and for clip.low at most 0.99."""

    @model_validator(mode="after")
    def _in_range(self) -> Self:
        if self.least is not None and self.most is not None and self.least > self.most:
            raise IssueError(Issue("least is above most", ("least",), number(self.least), f"at most {self.most:g}"))
        if self.start is None:
            return self
        if self.least is not None and self.start < self.least:
            raise IssueError(Issue("start is below least", ("start",), number(self.start), f"{self.least:g} or more"))
        if self.most is not None and self.start > self.most:
            raise IssueError(Issue("start is above most", ("start",), number(self.start), f"at most {self.most:g}"))
        return self

    def __str__(self) -> str:
        start = "" if self.start is None else f", from {self.start:g}"
        return f"follows {self.of} {self.target:g}{start}"


@dataclass(frozen=True, slots=True)
class Schedulable:
    """Annotation of a field that accepts a number, a ValueSchedule or, with `of`, a ClosedLoop. Its bounds apply to the
    number and to every value of the others."""

    gt: float | None = None
    ge: float | None = None
    lt: float | None = None
    of: tuple[LoopMetric, ...] = ()
    """Metrics that a closed loop in the field can follow. Empty if it accepts none."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        kind = next(kind for kind in get_args(source) if kind not in (ValueSchedule, ClosedLoop))
        bounds = {name: bound for name in ("gt", "ge", "lt") if (bound := getattr(self, name)) is not None}

        def check(value: ValueSchedule) -> ValueSchedule:
            points = {("schedule", index, 1): each for index, (_, each) in enumerate(value.schedule)}
            return _checked(value, {place: self._issue(each, kind) for place, each in points.items()})

        def check_loop(loop: ClosedLoop) -> ClosedLoop:
            values = {name: getattr(loop, name) for name in ("start", "least", "most")}
            issues: dict[Path, Issue | None] = {
                (name,): self._issue(each, kind) for name, each in values.items() if each is not None
            }
            if loop.of not in self.of:
                issues[("of",)] = Issue(
                    "the key does not change this metric", given=loop.of, allowed=", ".join(self.of)
                )
            return _checked(loop, issues)

        def form(value: Any) -> str:  # each form is named by a required key
            if not isinstance(value, (dict, ValueSchedule, ClosedLoop)):
                return "number"
            is_loop = isinstance(value, ClosedLoop) or (isinstance(value, dict) and {"target", "of"} & value.keys())
            return "target" if is_loop else "schedule"

        def with_metrics(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
            try:
                return handler(value)
            except ValidationError as error:
                raise _with_allowed(error, "of", ", ".join(self.of)) from None

        def checked(section: type[Spec], check: Any) -> CoreSchema:
            return core_schema.no_info_after_validator_function(check, handler.generate_schema(section))

        forms = {
            "number": handler.generate_schema(Annotated[kind, Field(**bounds)]),
            "schedule": checked(ValueSchedule, check),
        }
        if self.of:
            loop = checked(ClosedLoop, check_loop)
            forms["target"] = core_schema.no_info_wrap_validator_function(with_metrics, loop)
            return core_schema.tagged_union_schema(forms, form)

        def refuse_loop(value: Any) -> Any:
            if isinstance(value, dict) and {"target", "of"} & value.keys():
                hint = f"closed loops are for {', '.join(FOLLOWING)}"
                raise IssueError(Issue("the key cannot follow a target", allowed="a number or a schedule", hint=hint))
            return value

        return core_schema.no_info_before_validator_function(refuse_loop, core_schema.tagged_union_schema(forms, form))

    def _issue(self, value: float, kind: type) -> Issue | None:
        """Returns an issue if one value of a schedule is invalid, worded as for a plain number; else None."""
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


Checked = TypeVar("Checked", bound=Spec)


def _checked(section: Checked, issues: Mapping[Path, Issue | None]) -> Checked:
    """Returns the section if it has no issue; otherwise raises the issues as a ValidationError."""
    errors = [
        InitErrorDetails(type="value_error", loc=place, input=issue.given, ctx={"error": IssueError(issue)})
        for place, issue in issues.items()
        if issue
    ]
    if errors:
        raise ValidationError.from_exception_data(type(section).__name__, errors)
    return section


def _with_allowed(error: ValidationError, key: str, allowed: str) -> ValidationError:
    """Returns the error with these allowed values if the key is missing or has a value that no key allows."""

    def issue(kind: str, given: Any) -> Issue:
        if kind == "missing":
            return Issue("missing", allowed=allowed)
        shown, hint = json.dumps(given, default=str)[:80], nearest(str(given), allowed.split(", "))
        return Issue("not one of the values allowed", given=shown, allowed=allowed, hint=hint)

    details = [
        InitErrorDetails(
            type="value_error",
            loc=(key,),
            input=each["input"],
            ctx={"error": IssueError(issue(each["type"], each["input"]))},
        )
        if each["loc"] == (key,) and each["type"] in ("missing", "literal_error")
        else InitErrorDetails(type=each["type"], loc=each["loc"], input=each["input"], ctx=each.get("ctx", {}))
        for each in error.errors(include_url=False)
    ]
    return ValidationError.from_exception_data(error.title, details)


def value_at(value: float | ValueSchedule, step: int) -> float:
    """Returns the value of a field at a step."""
    return value.at(step) if isinstance(value, ValueSchedule) else value


def largest(value: float | ValueSchedule | ClosedLoop) -> float:
    """Returns the largest value that a field ever has; infinity for a closed loop without `most`."""
    if isinstance(value, ClosedLoop):
        return math.inf if value.most is None else value.most
    return max(point for _, point in value.schedule) if isinstance(value, ValueSchedule) else value


def smallest(value: float | ValueSchedule) -> float:
    """Returns the smallest value that a field ever has."""
    return min(point for _, point in value.schedule) if isinstance(value, ValueSchedule) else value


def constant(value: float | ValueSchedule | ClosedLoop) -> float:
    """Returns the number of a field whose section has gone through `at_step`.

    Raises:
        ValueError: the field still has a schedule or a closed loop.
    """
    if isinstance(value, (ValueSchedule, ClosedLoop)):
        raise ValueError(f"the value changes over training ({value}): take at_step(objective, step)")
    return value


Section = TypeVar("Section", bound=Spec)
Place = tuple[str, ...]
"""Path of a field, relative to a section."""


def at_step(section: Section, step: int, loops: Mapping[Place, float] | None = None, above: Place = ()) -> Section:
    """Returns the section with a number in place of each schedule and closed loop, or the section itself if it has
    none.

    Args:
        loops: values of the closed loops at the step, by path. A missing loop has its start.
        above: path of the section.
    """
    changed: dict[str, Any] = {}
    for name in type(section).model_fields:
        value, place = getattr(section, name), (*above, name)
        if isinstance(value, ValueSchedule):
            changed[name] = value.at(step)
        elif isinstance(value, ClosedLoop):
            changed[name] = (loops or {}).get(place, settled(section, name).start)
        elif isinstance(value, Spec) and (inner := at_step(value, step, loops, place)) is not value:
            changed[name] = inner
        elif isinstance(value, dict) and any(isinstance(item, ValueSchedule) for item in value.values()):
            changed[name] = {
                key: item.at(step) if isinstance(item, ValueSchedule) else item for key, item in value.items()
            }
    return section.model_copy(update=changed) if changed else section


def settled(section: Spec, name: str) -> ClosedLoop:
    """Returns the closed loop of a field, with numbers for its start and its bounds."""
    loop: ClosedLoop = getattr(section, name)
    field = type(section).model_fields[name]
    start = loop.start or max(field.default or FROM_NOTHING, loop.least or 0)
    start = min(start, loop.most or start)
    limit = next((each.lt for each in field.metadata if getattr(each, "lt", None) is not None), math.inf)
    least = loop.least or start / _RANGE
    most = loop.most or max(start, min(start * _RANGE, 0.99 * limit))
    return loop.model_copy(update={"start": start, "least": least, "most": most})


def schedules_in(section: Spec) -> Iterator[tuple[Place, ValueSchedule]]:
    """Yields the path and schedule of each scheduled field of a section and of the sections inside it."""
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, ValueSchedule):
            yield (name,), value
        elif isinstance(value, Spec):
            yield from (((name, *path), schedule) for path, schedule in schedules_in(value))
        elif isinstance(value, dict):
            yield from (((name, key), item) for key, item in value.items() if isinstance(item, ValueSchedule))


def loops_in(section: Spec) -> Iterator[tuple[Place, ClosedLoop]]:
    """Yields the path and the `settled` closed loop of each field that has one."""
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, ClosedLoop):
            yield (name,), settled(section, name)
        elif isinstance(value, Spec):
            yield from (((name, *path), loop) for path, loop in loops_in(value))
