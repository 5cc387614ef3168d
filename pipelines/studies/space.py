"""A study's search space: distributions, suggestions, the experiment's own values, what may change between calls.

A trial's *params* are what is recorded of it: path -> value, of `cases` the case's name; a parameter whose `when` does
not hold has none. Optuna keeps plain values only and compares a choice by position, so there a choice is JSON text.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from typing import TYPE_CHECKING, Any

from specs.errors import Issue, SpecError
from specs.schema.study import Cases, Choice, FloatRange, IntRange
from specs.study_document import StudyDocument

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.trial import Trial

Range = FloatRange | IntRange | Choice | Cases
Space = Mapping[str, Range]
Params = dict[str, Any]


def distribution(searched: Range) -> "BaseDistribution":
    """The range as Optuna has it."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if isinstance(searched, FloatRange):
        return FloatDistribution(*searched.float, log=searched.log, step=searched.step or None)
    if isinstance(searched, IntRange):
        return IntDistribution(*searched.int, log=searched.log, step=searched.step)
    return CategoricalDistribution([stored(name, searched) for name in names(searched)])


def names(searched: Choice | Cases) -> list[Any]:
    """The candidates as params have them."""
    return list(searched.choice) if isinstance(searched, Choice) else list(searched.cases)


def stored(value: Any, searched: Range) -> Any:
    """A param as Optuna keeps it."""
    return _text(value) if isinstance(searched, Choice) else value


def restored(value: Any, searched: Range) -> Any:
    """What `stored` made of a param, undone."""
    return json.loads(value) if isinstance(searched, Choice) else value


def in_order(space: Space) -> list[str]:
    """The paths, each after those that its `when` names."""
    ordered: list[str] = []
    while len(ordered) < len(space):
        ready = [path for path in space if path not in ordered and set(space[path].when) <= set(ordered)]
        assert ready, "conditions in a circle are refused when the study is read"
        ordered += ready
    return ordered


def is_active(searched: Range, params: Mapping[str, Any]) -> bool:
    """Whether the parameter is searched where others have these params."""
    return all(
        path in params and _text(params[path]) in [_text(value) for value in _several(wanted)]
        for path, wanted in searched.when.items()
    )


def suggest(trial: "Trial", space: Space) -> Params:
    """The params that a trial's sampler proposes."""
    params: Params = {}
    for path in in_order(space):
        if is_active(space[path], params):
            value = trial._suggest(path, distribution(space[path]))
            params[path] = restored(value, space[path])
    return {path: params[path] for path in space if path in params}


def combinations(space: Space) -> Iterator[Params]:
    """Every combination of the params once, the last path fastest. Every range is finite."""
    seen: set[str] = set()
    for row in product(*(_candidates(searched) for searched in space.values())):
        every = dict(zip(space, row, strict=True))
        params: Params = {}
        for path in in_order(space):
            if is_active(space[path], params):
                params[path] = every[path]
        params = {path: params[path] for path in space if path in params}
        if (text := _text(params)) not in seen:
            seen.add(text)
            yield params


def settings(params: Mapping[str, Any], space: Space) -> dict[str, Any]:
    """What the params set in the experiment: path -> value."""
    return {
        path: searched.cases[value] if isinstance(searched := space[path], Cases) else value
        for path, value in params.items()
    }


def own_params(document: StudyDocument) -> tuple[Params, list[str]]:
    """The params that give the experiment as it is, and the paths whose own value the space does not hold."""
    space = document.study.parameters
    experiment = document.experiment.experiment.model_dump(mode="json")
    params: Params = {}
    outside: list[str] = []
    for path in in_order(space):
        searched = space[path]
        if not is_active(searched, params):
            continue
        own = _at(experiment, path)
        if isinstance(searched, (Choice, Cases)):
            values = {_text(name): (name, setting) for name, setting in _settings_of(searched)}
            held = [name for name, value in values.values() if value == own or _changes_nothing(document, path, value)]
        else:
            held = [own] if holds(searched, own) else []
        if held:
            params[path] = held[0]
        else:
            outside.append(path)
    return {path: params[path] for path in space if path in params}, outside


def holds(searched: Range, value: Any) -> bool:
    """Whether a range has the param."""
    if isinstance(searched, (Choice, Cases)):
        return _text(value) in [_text(name) for name in names(searched)]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    if isinstance(searched, FloatRange):
        low, high = searched.float
        steps = (value - low) / searched.step if searched.step else 0.0
        return low <= value <= high and abs(steps - round(steps)) < 1e-8
    low, high = searched.int
    return isinstance(value, int) and low <= value <= high and (value - low) % searched.step == 0


def changes(before: Mapping[str, Any], space: Space) -> list[Issue]:
    """Why a stored study cannot go on with this space. Numeric ranges may move, all else may not.

    Args:
        before: the stored study's parameters, see `plain`.
    """
    now = plain(space)
    problems = [
        Issue("is searched by the stored study and no longer here", ("parameters",), given=path, hint=_HINT)
        for path in before
        if path not in now
    ]
    for path, searched in now.items():
        kept = before.get(path)
        if kept is None:
            problems.append(Issue("is not searched by the stored study", ("parameters", path), hint=_HINT))
        elif _fixed(kept) != _fixed(searched):
            given, allowed = json.dumps(_fixed(searched)), json.dumps(_fixed(kept))
            problems.append(
                Issue("differs from the stored study", ("parameters", path), given=given, allowed=allowed, hint=_HINT)
            )
    return problems


def plain(space: Space) -> dict[str, Any]:
    """The space as JSON data."""
    return {path: searched.model_dump(mode="json") for path, searched in space.items()}


def overrides(values: Mapping[str, Any]) -> list[str]:
    """The values as `path=value`, as `--set` takes them."""
    return [f"{path}={_text(value)}" for path, value in values.items()]


_HINT = "give the study another name: values found in different spaces do not compare"


def _fixed(searched: Mapping[str, Any]) -> dict[str, Any]:
    """What may not change of one range."""
    kind = next(key for key in ("float", "int", "choice", "cases") if key in searched)
    fixed = {"type": kind, kind: searched[kind]} if kind in ("choice", "cases") else {"type": kind}
    if "log" in searched:
        fixed["log"] = searched["log"]
    return fixed | ({"when": searched["when"]} if searched.get("when") else {})


def _candidates(searched: Range) -> list[Any]:
    if isinstance(searched, (Choice, Cases)):
        return names(searched)
    if isinstance(searched, IntRange):
        return list(range(searched.int[0], searched.int[1] + 1, searched.step))
    low, high = searched.float
    return [low + index * searched.step for index in range(int((high - low) / searched.step + 1e-9) + 1)]


def _settings_of(searched: Choice | Cases) -> Iterable[tuple[Any, Any]]:
    return searched.cases.items() if isinstance(searched, Cases) else ((value, value) for value in searched.choice)


def _changes_nothing(document: StudyDocument, path: str, value: Any) -> bool:
    """Whether a section written otherwise says the same: with the defaults that it leaves out."""
    if not isinstance(value, dict):
        return False
    try:
        return document.trial({path: value}).experiment == document.experiment.experiment
    except SpecError:
        return False


def _several(wanted: Any) -> list[Any]:
    return list(wanted) if isinstance(wanted, (list, tuple)) else [wanted]


def _at(tree: Any, path: str) -> Any:
    for part in path.split("."):
        if isinstance(tree, list) and part.isdecimal() and int(part) < len(tree):
            tree = tree[int(part)]
        elif isinstance(tree, Mapping) and part in tree:
            tree = tree[part]
        else:
            return None
    return tree


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)
