"""A study's search space as Optuna sees it: suggestions, the file's own values, and what may change between calls.

Optuna keeps plain values only and compares a choice by position, so a choice travels as its JSON text.
"""

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from specs.errors import Issue
from specs.schema.study import Choice, FloatRange, IntRange

if TYPE_CHECKING:
    from optuna.trial import Trial

Space = Mapping[str, FloatRange | IntRange | Choice]


def suggest(trial: "Trial", space: Space) -> dict[str, Any]:
    """The trial's value of each parameter; one that it has already stays as it is."""
    values: dict[str, Any] = {}
    for path, searched in space.items():
        if isinstance(searched, FloatRange):
            values[path] = trial.suggest_float(path, *searched.float, log=searched.log)
        elif isinstance(searched, IntRange):
            values[path] = trial.suggest_int(path, *searched.int, step=searched.step, log=searched.log)
        else:
            values[path] = json.loads(trial.suggest_categorical(path, [_text(value) for value in searched.choice]))
    return values


def stored(path: str, value: Any, space: Space) -> Any:
    """A value as Optuna keeps it."""
    return _text(value) if isinstance(space[path], Choice) else value


def restored(path: str, value: Any, space: Space) -> Any:
    """What `stored` made of a value, undone."""
    return json.loads(value) if isinstance(space.get(path), Choice) else value


def own_values(experiment: Mapping[str, Any], space: Space) -> dict[str, Any] | None:
    """The experiment's own values of the parameters, if the space holds them all: the baseline of the study.

    Args:
        experiment: as plain data.
    """
    values = {path: _at(experiment, path) for path in space}
    return values if all(_holds(space[path], value) for path, value in values.items()) else None


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
    kind: Iterable[str] = ("choice",) if "choice" in searched else ("log",)
    return {"type": next(key for key in ("float", "int", "choice") if key in searched)} | {
        key: list(searched[key]) if key == "choice" else searched[key] for key in kind
    }


def _holds(searched: FloatRange | IntRange | Choice, value: Any) -> bool:
    if isinstance(searched, Choice):
        return _text(value) in [_text(choice) for choice in searched.choice]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    if isinstance(searched, FloatRange):
        return searched.float[0] <= value <= searched.float[1]
    low, high = searched.int
    return isinstance(value, int) and low <= value <= high and (value - low) % searched.step == 0


def _at(tree: Any, path: str) -> Any:
    for part in path.split("."):
        if not isinstance(tree, Mapping) or part not in tree:
            return None
        tree = tree[part]
    return tree


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)
