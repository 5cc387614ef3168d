"""A study's search space: the values of parameters, and the conditions under which they are searched.

A trial's *params* are its recorded values: path -> value, or for `cases` the case's name. A parameter whose `when` does
not hold has no entry.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from decimal import Decimal
from functools import cache
from typing import Any

from specs.schema.study import Cases, Choice, FloatRange, IntRange, Range, num_steps

Space = Mapping[str, Range]
Params = dict[str, Any]


def names(searched: Choice | Cases) -> list[Any]:
    """Returns the candidates as they appear in params."""
    return list(searched.choice) if isinstance(searched, Choice) else list(searched.cases)


def values_by_name(searched: Choice | Cases) -> list[tuple[Any, Any]]:
    """Returns each candidate as it appears in params, and its value in the experiment."""
    return (
        list(searched.cases.items()) if isinstance(searched, Cases) else [(value, value) for value in searched.choice]
    )


def bounds(searched: FloatRange | IntRange) -> tuple[Any, Any]:
    """Returns the lowest and the highest candidate. The highest is below the upper end if the steps do not reach the
    end."""
    low, high = searched.float if isinstance(searched, FloatRange) else searched.int
    return (low, on_grid(searched, num_candidates(searched) - 1)) if searched.step else (low, high)


def num_candidates(searched: Range) -> int:
    """Returns the number of values of the parameter; 0 for any number between two ends."""
    if isinstance(searched, (Choice, Cases)):
        return len(names(searched))
    if isinstance(searched, IntRange):
        low, high = searched.int
        return (high - low) // searched.step + 1
    return num_steps(*searched.float, searched.step) + 1 if searched.step else 0


def candidates(searched: Range) -> Iterable[Any]:
    """Returns the params of a parameter with a finite range."""
    if isinstance(searched, (Choice, Cases)):
        return names(searched)
    return (on_grid(searched, index) for index in range(num_candidates(searched)))


def holds(searched: Range, value: Any) -> bool:
    """Returns whether a range contains the param."""
    if isinstance(searched, (Choice, Cases)):
        return is_among(value, names(searched))
    if isinstance(value, bool) or not isinstance(value, int if isinstance(searched, IntRange) else (int, float)):
        return False
    low, high = searched.float if isinstance(searched, FloatRange) else searched.int
    if not low <= value <= high:
        return False
    steps = (value - low) / searched.step if searched.step else 0.0
    return abs(steps - round(steps)) < 1e-8


def is_same(value: Any, other: Any) -> bool:
    """Returns whether two params are equal. Numbers are compared by value (1 is 1.0), everything else as written."""
    if all(isinstance(number, (int, float)) and not isinstance(number, bool) for number in (value, other)):
        # A computed step may differ from the written number in the last digit.
        with suppress(OverflowError):
            return math.isclose(value, other, rel_tol=1e-12)
        return bool(value == other)
    return json.dumps(value, sort_keys=True) == json.dumps(other, sort_keys=True)


def is_among(value: Any, params: Iterable[Any]) -> bool:
    """Returns whether the params contain this one."""
    return any(is_same(value, param) for param in params)


def wanted_values(condition: Any) -> list[Any]:
    """Returns the params that an entry of `when` allows. The entry may be a list or one value."""
    return list(condition) if isinstance(condition, (list, tuple)) else [condition]


def is_active(searched: Range, params: Mapping[str, Any]) -> bool:
    """Returns whether the parameter is searched while others have these params."""
    return all(
        path in params and is_among(params[path], wanted_values(condition)) for path, condition in searched.when.items()
    )


def conditions(space: Space, path: str) -> Iterator[tuple[str, str, list[Any]]]:
    """Yields the conditions for searching the parameter, each as the parameter that has the condition, the path in it,
    and the allowed params.

    A parameter that depends on another is searched only while the other is.
    """
    owners = [path]
    for owner in owners:
        for parent, condition in space[owner].when.items():
            yield owner, parent, wanted_values(condition)
            if parent not in owners:
                owners.append(parent)


def allowed_by_conditions(space: Space, path: str) -> dict[str, list[Any]]:
    """Returns the params of other paths with which the parameter is searched; an empty list for contradictory
    conditions."""
    allowed: dict[str, list[Any]] = {}
    for _, parent, params in conditions(space, path):
        allowed[parent] = [value for value in allowed.get(parent, params) if is_among(value, params)]
    return allowed


def in_order(space: Space) -> list[str]:
    """Returns the paths in an order in which each comes after those that its `when` names."""
    ordered: list[str] = []
    while len(ordered) < len(space):
        ready = [path for path in space if path not in ordered and set(space[path].when) <= set(ordered)]
        assert ready, "conditions in a circle are refused when the study is read"
        ordered += ready
    return ordered


def build(space: Space, choose: Callable[[str], Any]) -> Params:
    """Returns a trial's params: `choose(path)` for each parameter whose conditions hold, given the earlier choices."""
    params: Params = {}
    for path in in_order(space):
        if is_active(space[path], params):
            params[path] = choose(path)
    return {path: params[path] for path in space if path in params}


def combinations(space: Space) -> Iterator[Params]:
    """Yields every combination of the params once, the last path fastest. Every range must be finite."""
    for params in _extended({}, in_order(space), space):
        yield {path: params[path] for path in space if path in params}


def num_combinations(space: Space) -> int:
    """Returns the number of `combinations`, without enumerating them."""
    ordered = in_order(space)
    dependents = {path: frozenset(other for other in space if path in space[other].when) for path in space}
    losses = {path: _losses(space, path, dependents[path]) for path in space}

    @cache
    def count(index: int, inactive: frozenset[str]) -> int:
        """Returns the number of combinations of this and all later parameters, given the parameters that can no longer
        be searched."""
        if index == len(ordered):
            return 1
        path = ordered[index]
        if path in inactive:
            return count(index + 1, inactive - {path} | dependents[path])
        return sum(number * count(index + 1, inactive | lost) for lost, number in losses[path].items())

    return count(0, frozenset())


def _losses(space: Space, path: str, dependents: frozenset[str]) -> Counter[frozenset[str]]:
    """Returns, for each set of other parameters, the number of this parameter's values that make the set inactive."""
    named = [value for value in _values_in_conditions(space, path) if holds(space[path], value)]
    others = num_candidates(space[path]) - len(named)  # with them no condition on it holds
    losses = Counter({dependents: others})
    for value in named:
        losses[
            frozenset(other for other in dependents if not is_among(value, wanted_values(space[other].when[path])))
        ] += 1
    return losses


def settings(params: Mapping[str, Any], space: Space) -> dict[str, Any]:
    """Returns the experiment's settings that the params stand for: path -> value."""
    return {
        path: searched.cases[value] if isinstance(searched := space[path], Cases) else value
        for path, value in params.items()
    }


def _values_in_conditions(space: Space, path: str) -> list[Any]:
    """Returns the params of a parameter that others' conditions name, each once."""
    named: list[Any] = []
    for searched in space.values():
        for value in wanted_values(searched.when.get(path, [])):
            if not is_among(value, named):
                named.append(value)
    return named


def _extended(params: Params, rest: list[str], space: Space) -> Iterator[Params]:
    if not rest:
        yield params
        return
    path, *later = rest
    if not is_active(space[path], params):
        yield from _extended(params, later, space)
        return
    for value in candidates(space[path]):
        yield from _extended({**params, path: value}, later, space)


def on_grid(searched: FloatRange | IntRange, index: int) -> Any:
    """Returns the candidate that is `index` steps above the lowest, in a range with steps."""
    if isinstance(searched, IntRange):
        return searched.int[0] + index * searched.step
    return float(Decimal(str(searched.float[0])) + index * Decimal(str(searched.step)))
