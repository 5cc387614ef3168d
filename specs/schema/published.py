"""What a spec leaves out of its advantage and reference: the setting that its objective was published with."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from specs.schema.fields import choose
from specs.schema.objective import Objective


def with_published(data: Mapping[str, Any]) -> dict[str, Any]:
    """The experiment's data with each section of its objective's `published` laid under what is there.

    A section that takes another `source` than the published one stands alone: a schedule belongs to its source. Without
    a divergence no reference policy is held.
    """
    result = dict(data)
    for section, setting in _published(data.get("objective")).items():
        if section == "reference" and _without_divergence(data["objective"]):
            continue
        given = result.get(section)
        if given is None and section in result:
            continue  # `reference: null` is a mistake for the schema to report
        if isinstance(given, BaseModel):
            continue
        if given is None or (isinstance(given, dict) and _same_source(setting, given)):
            result[section] = {**setting, **(given or {})}
    return result


def _without_divergence(objective: Any) -> bool:
    if isinstance(objective, BaseModel):
        return not getattr(objective, "needs_reference", True)
    kl_coef = objective.get("kl_coef")
    if isinstance(kl_coef, Mapping):
        points = kl_coef.get("schedule")
        return isinstance(points, list) and all(isinstance(point, list) and point[1:] == [0] for point in points)
    return isinstance(kl_coef, (int, float)) and kl_coef == 0


def _same_source(setting: Mapping[str, Any], given: Mapping[str, Any]) -> bool:
    return "source" not in given or given["source"] == setting.get("source")


def _published(objective: Any) -> Mapping[str, Mapping[str, Any]]:
    if isinstance(objective, BaseModel):
        return getattr(type(objective), "published", {})
    if not isinstance(objective, dict):
        return {}
    tag = objective.get("type", "rpg")
    model = choose(Objective, tag) if isinstance(tag, str) else None
    return getattr(model, "published", {})
