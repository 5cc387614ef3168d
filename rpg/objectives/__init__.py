"""Objectives: the equations of each, and one evaluation of them on a batch of tokens.

Each objective's equation stands in `regularized` or `rivals` and registers itself for its class of the schema;
`formula` computes what a spec writes as a formula; `evaluation` is the way in. Imports torch and the schema, nothing
else of ours; any room of `rpg` may import it. An installed package derives its objectives from `PackagedObjective`.
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
