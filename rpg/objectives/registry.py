"""Which equation belongs to which class of the schema. Each registers itself where it is written."""

from functools import singledispatch

from torch import Tensor

from rpg.objectives.clipping import Clipped
from rpg.objectives.terms import Terms
from specs.schema.objective import BaseObjective


@singledispatch
def equation(objective: BaseObjective, terms: Terms) -> tuple[Tensor, Clipped]:
    """The loss of each token, and where the objective's clip acts; `@equation.register` names the class it is for.

    A class takes the equation of the class that it inherits from, unless it has its own.

    Args:
        objective: knobs.
        terms: of what the objective's `ratio_over` says.
    Returns:
        Losses to minimise [B, T], reward units, not masked, differentiable by `terms.logprobs`; and marks that
        broadcast to them. The first line of its docstring is the loss, as docs/objectives.md shows it.
    """
    raise NotImplementedError(f"no equation is registered for {type(objective).__name__}: see {__name__}")
