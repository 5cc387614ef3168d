"""Every objective that `rpg certify` shows when it is given no file, under the headings it shows them by."""

from itertools import product
from typing import Any, get_args

from pydantic import TypeAdapter

from specs.schema.objective import Divergence, Objective

ESTIMATORS = ("reinforce", "differentiable")
LEVELS = ("token", "sequence")
RIVALS = (
    {"type": "ppo"},
    {"type": "grpo"},
    {"type": "grpo", "kl_weighted": True},
    {"type": "dapo"},
    {"type": "dr_grpo"},
    {"type": "gspo"},
    {"type": "cispo"},
    {"type": "rloo"},
    {"type": "reinforce_plus_plus"},
    {"type": "reinforce_plus_plus_baseline"},
)
"""With their published defaults, and GRPO with its penalty weighted."""


def catalogue() -> dict[str, list[Objective]]:
    """Heading -> objectives."""
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
        "Rivals as published": [objective(values) for values in RIVALS],
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


def regularized(
    clip: dict[str, Any],
    *,
    divergences: tuple[str, ...] = get_args(Divergence),
    estimators: tuple[str, ...] = ESTIMATORS,
) -> list[Objective]:
    """RPG at both levels with these divergences and estimators."""
    return [
        objective({"type": "rpg", "divergence": divergence, "estimator": estimator, "level": level, "clip": clip})
        for estimator, level, divergence in product(estimators, LEVELS, divergences)
    ]


def objective(values: dict[str, Any]) -> Objective:
    """Validated as a spec would be."""
    adapter: TypeAdapter[Objective] = TypeAdapter(Objective)
    return adapter.validate_python(values)


def label(objective: Objective) -> str:
    """An objective in a few words, without what its heading or its defaults say; k3 reward: taken off the reward."""
    values = objective.model_dump(mode="json")
    if values["type"] == "rpg":
        return f"{values['divergence']} {values['estimator']} {values['level']}"
    if not objective.needs_reference:
        return str(values["type"])
    where = " reward" if values["kl_in"] == "reward" else " weighted" if values["kl_weighted"] else ""
    return f"{values['type']} {values['kl_estimator']}{where}"
