"""A study's search space in the forms of Optuna and of the record, and the changes to it that are permitted between
calls.

Optuna keeps plain values only and compares a choice by position, so there a choice is JSON text.
"""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pipelines.studies.samplers import optuna_inside
from specs.errors import Issue
from specs.schema.study import Choice, FloatRange, IntRange, Range
from specs.study_space import Params, Space, bounds, build, names

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.trial import Trial


def distribution(searched: Range) -> "BaseDistribution":
    """Returns the range as an Optuna distribution."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if isinstance(searched, FloatRange):
        return FloatDistribution(*bounds(searched), log=searched.log, step=searched.step or None)
    if isinstance(searched, IntRange):
        return IntDistribution(*bounds(searched), log=searched.log, step=searched.step)
    return CategoricalDistribution([stored(name, searched) for name in names(searched)])


def stored(value: Any, searched: Range) -> Any:
    """Returns a param in Optuna's form."""
    return text_of(value) if isinstance(searched, Choice) else value


def restored(value: Any, searched: Range) -> Any:
    """Returns the param that `stored` turned into this value."""
    return json.loads(value) if isinstance(searched, Choice) else value


def suggest(trial: "Trial", space: Space) -> Params:
    """Returns the params that a trial's sampler proposes."""
    return build(
        space, lambda path: restored(optuna_inside.suggest(trial, path, distribution(space[path])), space[path])
    )


def changes(before: Mapping[str, Any], space: Space) -> list[Issue]:
    """Returns the reasons why a stored study cannot continue with this space. Only numeric ranges may move.

    Args:
        before: the stored study's parameters, see `plain`.
    """
    now = plain(space)
    problems = [
        Issue("is searched by the stored study but no longer by this one", ("parameters",), given=path, hint=_HINT)
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
    """Returns the space as JSON data."""
    return {path: searched.model_dump(mode="json") for path, searched in space.items()}


_HINT = "give the study another name: values found in different spaces do not compare"


def _fixed(searched: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the properties of one range that may not change."""
    kind = next(key for key in ("float", "int", "choice", "cases") if key in searched)
    fixed = {"type": kind, kind: searched[kind]} if kind in ("choice", "cases") else {"type": kind}
    if "log" in searched:
        fixed["log"] = searched["log"]
    return fixed | ({"when": searched["when"]} if searched.get("when") else {})


def text_of(value: Any) -> str:
    """Returns a text that is unique to the value; in Python 1 and True are equal."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False)
