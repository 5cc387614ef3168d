"""Objectives: the equations of each, and one evaluation of them on a batch of tokens.

Each objective's equation stands in `regularized` or `rivals` and registers itself for its class of the schema;
`evaluation` is the way in. Imports torch and the schema, nothing else of ours; any room of `rpg` may import it.
"""

from rpg.objectives.evaluation import ObjectiveEvaluation, evaluate_objective, token_losses
from rpg.objectives.terms import TokenBatch

__all__ = ["ObjectiveEvaluation", "TokenBatch", "evaluate_objective", "token_losses"]
