"""Issues of a study's search space alone: conditions, and candidates given twice."""

from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from typing import Any

from specs.bounds import MAX_CANDIDATES, MAX_PARAMETERS
from specs.errors import Issue, Path
from specs.reading.validate import show
from specs.schema.fields import nearest
from specs.schema.study import Cases, Choice, FloatRange, IntRange, Range
from specs.study_space import (
    Space,
    allowed_by_conditions,
    bounds,
    conditions,
    holds,
    is_among,
    is_same,
    names,
    values_by_name,
    wanted_values,
)


def issues_of(space: Space) -> list[Issue]:
    """Returns every issue, each at its place."""
    if len(space) > MAX_PARAMETERS:
        return [Issue("too many parameters", ("parameters",), str(len(space)), f"at most {MAX_PARAMETERS}")]
    if long := list(_long_lists(space)):
        return long
    issues = [issue for path in space for issue in (*_repeated(path, space[path]), *_conditions(path, space))]
    return issues or list(_circle(space)) or list(_contradictions(space))


def _long_lists(space: Space) -> Iterator[Issue]:
    for path, searched in space.items():
        if isinstance(searched, (Choice, Cases)) and len(names(searched)) > MAX_CANDIDATES:
            given, allowed = str(len(names(searched))), f"at most {MAX_CANDIDATES}"
            yield Issue("too many candidates", ("parameters", path), given, allowed, "search a range instead")


def warnings_of(space: Space) -> Iterator[Issue]:
    """Yields warnings for upper ends that the steps do not reach."""
    for path, searched in space.items():
        if isinstance(searched, (FloatRange, IntRange)):
            end = searched.float[1] if isinstance(searched, FloatRange) else searched.int[1]
            _, highest = bounds(searched)
            if not is_same(highest, end):
                given = f"{show(end)}, in steps of {show(searched.step)} from {show(bounds(searched)[0])}"
                hint = f"the highest candidate is {show(highest)}"
                yield Issue("the upper end is never tried", ("parameters", path), given, hint=hint)


def describe(searched: Range) -> str:
    """Describes the values of a parameter: `0.05 to 0.5`, `2 to 16 in steps of 2`, `reverse, forward`."""
    if isinstance(searched, (Choice, Cases)):
        return ", ".join(map(shown, names(searched)))
    low, high = bounds(searched)
    stepwise = searched.step if isinstance(searched, FloatRange) else searched.step != 1
    return f"{show(low)} to {show(high)}" + (f" in steps of {show(searched.step)}" if stepwise else "")


def place_of(path: str, searched: Range, param: Any) -> Path:
    """Returns the path in the file of one of a parameter's params."""
    if isinstance(searched, Choice):
        index = next(index for index, value in enumerate(searched.choice) if is_among(param, [value]))
        return ("parameters", path, "choice", index)
    return ("parameters", path, "cases", param) if isinstance(searched, Cases) else ("parameters", path)


def shown(value: Any) -> str:
    """Returns a value as a file may write it."""
    return value if isinstance(value, str) else show(value)


def _repeated(path: str, searched: Range) -> Iterator[Issue]:
    if not isinstance(searched, (Choice, Cases)):
        return
    earlier: list[Any] = []
    for index, (name, value) in enumerate(values_by_name(searched)):
        if is_among(value, earlier):
            key: tuple[str, str | int] = ("cases", name) if isinstance(searched, Cases) else ("choice", index)
            yield Issue("the candidate is given twice", ("parameters", path, *key), show(value))
        earlier.append(value)


def _conditions(path: str, space: Space) -> Iterator[Issue]:
    """Yields the issues of each condition of a parameter."""
    others = [other for other in space if other != path]
    for parent, condition in space[path].when.items():
        place = ("parameters", path, "when", parent)
        if parent == path:
            yield Issue("depends on itself", place, allowed=", ".join(others))
        elif parent not in space:
            hint = nearest(parent, others) or "a condition must name another parameter of the study"
            yield Issue("is not searched", place, allowed=", ".join(others), hint=hint)
        elif condition == []:
            yield Issue("can never hold", place, "[]", describe(space[parent]))
        else:
            for index, value in enumerate(wanted_values(condition)):
                if issue := _never_has(parent, space[parent], value):
                    message, hint = issue
                    at = (*place, index) if isinstance(condition, (list, tuple)) else place
                    yield Issue(message, at, show(value), describe(space[parent]), hint)


def _never_has(parent: str, searched: Range, value: Any) -> tuple[str, str] | None:
    """Returns message and hint if a parameter cannot have a value that a condition names; else None."""
    if isinstance(searched, FloatRange) and not searched.step:
        return (
            f"{parent} can be any number, so it is almost never this one",
            f"give {parent} a step, or make it a choice",
        )
    if holds(searched, value):
        return None
    hint = nearest(str(value), map(str, names(searched))) if isinstance(searched, (Choice, Cases)) else ""
    if isinstance(searched, Cases):
        hint = hint or "a condition on `cases` lists names of cases"
    if isinstance(searched, IntRange) and isinstance(value, (list, dict)):
        hint = "several values are written as one list"
    return f"{parent} cannot be this", hint


def _circle(space: Space) -> Iterator[Issue]:
    """Yields an issue with conditions that depend on each other."""
    try:
        TopologicalSorter({path: searched.when for path, searched in space.items()}).prepare()
    except CycleError as error:
        circle: list[str] = error.args[1][:0:-1]  # each has a condition on the next, the last on the first
        start = min(range(len(circle)), key=lambda index: list(space).index(circle[index]))
        path, parent = circle[start], [*circle, *circle][start + 1]
        given = " on ".join([*circle[start:], *circle[:start], path])
        hint = "leave one of these conditions out"
        yield Issue("conditions in a circle", ("parameters", path, "when", parent), given, hint=hint)


def _contradictions(space: Space) -> Iterator[Issue]:
    """Yields conditions that contradict those of the parameters they depend on."""
    for path, searched in space.items():
        for ancestor, allowed in allowed_by_conditions(space, path).items():
            if allowed or any(not allowed_by_conditions(space, parent).get(ancestor, [0]) for parent in searched.when):
                continue  # a contradiction further up is reported there
            given = ", ".join(
                f"{' or '.join(map(shown, params))} {'here' if owner == path else f'for {owner}'}"
                for owner, on, params in conditions(space, path)
                if on == ancestor
            )
            message = f"no value of {ancestor} fits all conditions"
            hint = "a parameter is searched only while those that it depends on are"
            yield Issue(message, ("parameters", path, "when"), given, describe(space[ancestor]), hint)
