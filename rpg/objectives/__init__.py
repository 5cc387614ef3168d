"""Objectives: the equation of each, and its evaluation on a batch of tokens.

Each objective's equation is in `regularized` or `rivals` and registers itself for its class of the schema; `formula`
computes a formula from a spec; `evaluation` is the entry point. Imports only torch and the schema; any package of `rpg`
may import it. An installed package derives its objectives from `PackagedObjective`.
"""

from rpg.objectives.clipping import Clipped
from rpg.objectives.evaluation import ObjectiveEvaluation, evaluate_objective, token_losses
from rpg.objectives.terms import Terms, TokenBatch
from specs.schema.base_objective import PackagedObjective

__all__ = [
    "Clipped",
    "ObjectiveEvaluation",
    "PackagedObjective",
    "Terms",
    "TokenBatch",
    "evaluate_objective",
    "token_losses",
]
