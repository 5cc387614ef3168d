"""The objectives that `rpg certify` shows when called without a file, under their headings."""

from itertools import product
from typing import Any, get_args

from pydantic import TypeAdapter

from specs.schema.fields import members
from specs.schema.objective import Divergence, FormulaObjective, Objective, PublishedObjective, RegularizedObjective

ESTIMATORS = ("reinforce", "differentiable")
LEVELS = ("token", "to_go", "sequence")
SUMMED = tuple(divergence for divergence in get_args(Divergence) if divergence != "none")
"""Divergences that may be summed over the vocabulary."""
SAMPLED = tuple(divergence for divergence in get_args(Divergence) if divergence != "jensen_shannon")
"""Divergences that are estimated from the sampled token, and none."""


def certified_objectives() -> dict[str, list[Objective]]:
    """Returns heading -> objectives: the catalogue, and RPG with a divergence that is summed over the vocabulary or its
    likeliest tokens."""
    sums = {
        "RPG, kl full: summed over the vocabulary": summed("full"),
        "RPG, kl top_k: summed over the reference's likeliest tokens": summed("top_k"),
    }
    return {**catalogue(), **sums}


def catalogue() -> dict[str, list[Objective]]:
    """Returns heading -> objectives that need only values of the sampled tokens."""
    rivals = [kind for kind in members(Objective) if issubclass(kind, PublishedObjective)]
    return {
        "RPG without a clip": regularized({"type": "none"}),
        "RPG, dual clip": regularized({"type": "dual"}),
        "RPG, dual clip, clipped tokens keep the divergence": regularized(
            {"type": "dual", "keep_divergence": True}, estimators=("reinforce",)
        ),
        "RPG, dual clip, regularized branch (Algorithms 2 and 1)": [
            *regularized({"type": "dual", "branch": "regularized"}, estimators=("reinforce",)),
            *regularized(
                {"type": "dual", "branch": "regularized"},
                divergences=("reverse", "unnormalized_reverse", "none"),
                estimators=("differentiable",),
            ),
        ],
        "RPG, truncated ratio": regularized({"type": "truncate"}, estimators=("reinforce",)),
        "RPG, clipped value (eq. 4.1)": regularized({"type": "value"}, estimators=("reinforce",)),
        "Rivals as published": [kind(**settings) for kind in rivals for settings in kind.certified],
        "Divergence estimators with PPO's clip": [
            *(
                objective({"type": "ppo", "kl_coef": 1.0, "kl_estimator": estimator, "kl_weighted": weighted})
                for weighted, estimator in product((False, True), ("k1", "k2", "k3"))
            ),
            *(
                objective({"type": "ppo", "kl_coef": 1.0, "kl_estimator": estimator, "kl_in": "reward"})
                for estimator in ("k1", "k2", "k3")
            ),
        ],
    }


def alike(objective: Objective) -> list[tuple[str, Objective]]:
    """Returns (name, objective) for the built-in objectives, with their default settings, that claim the same as a
    formula.

    They have the same direction, of tokens or of whole responses, or no divergence if the formula names none."""
    asked = (objective.claims_divergence, objective.claims_divergence and objective.claim_divergence)
    found = {
        f"{getattr(each, 'divergence', '')} {heading}".strip() if each.type == "rpg" else label(each): each
        for heading, objectives in catalogue().items()
        for each in objectives
        if (each.claims_divergence, each.claims_divergence and each.claim_divergence) == asked
        and each.claim_level == objective.claim_level
        and each.exact != "never"
        and heading in ("RPG without a clip", "RPG, dual clip", "RPG, clipped value (eq. 4.1)", "Rivals as published")
        and getattr(each, "estimator", "reinforce") == "reinforce"
    }
    return list(found.items())


def regularized(
    clip: dict[str, Any],
    *,
    divergences: tuple[str, ...] = SAMPLED,
    estimators: tuple[str, ...] = ESTIMATORS,
    levels: tuple[str, ...] = LEVELS,
    kl: str = "sampled",
) -> list[Objective]:
    """Returns RPG objectives with these divergences, estimators and levels."""
    return [
        objective(
            {"type": "rpg", "divergence": divergence, "estimator": estimator, "level": level, "clip": clip, "kl": kl}
        )
        for estimator, level, divergence in product(estimators, levels, divergences)
    ]


def summed(kl: str) -> list[Objective]:
    """Returns RPG objectives without a clip whose divergence is summed over the vocabulary."""
    return regularized({"type": "none"}, divergences=SUMMED, levels=("token", "to_go"), kl=kl)


def objective(values: dict[str, Any]) -> Objective:
    """Returns the objective, validated as in a spec."""
    adapter: TypeAdapter[Objective] = TypeAdapter(Objective)
    return adapter.validate_python(values)


def label(objective: Objective) -> str:
    """Returns a short label of an objective, without its heading and defaults. "k3 reward" means that the k3 estimate
    is subtracted from the reward."""
    if isinstance(objective, RegularizedObjective):
        kl = "" if objective.kl == "sampled" else f" kl {objective.kl}"
        return f"{objective.divergence} {objective.estimator} {objective.level}{kl}"
    if isinstance(objective, FormulaObjective):
        return f"formula {objective.level}"
    if not isinstance(objective, PublishedObjective) or not objective.needs_reference:
        return objective.type
    where = " reward" if objective.kl_in == "reward" else " weighted" if objective.kl_weighted else ""
    return f"{objective.type} {objective.kl_estimator}{where}"
