"""Registry of equations by class of the schema. Each equation registers itself at its definition."""

from functools import singledispatch

from torch import Tensor

from rpg.objectives.clipping import Clipped
from rpg.objectives.terms import Terms
from specs.schema.objective import BaseObjective


@singledispatch
def equation(objective: BaseObjective, terms: Terms) -> tuple[Tensor, Clipped]:
    """Returns the loss of each token and the marks of the objective's clip. `@equation.register`
    registers an equation for the class of its first argument.

    An objective's class without an equation of its own inherits that of its base class.

    Args:
        objective: parameters.
        terms: terms of the unit that the objective's `ratio_over` names.
    Returns:
        Losses to minimise [B, T], reward units, not masked, differentiable by `terms.logprobs`; and marks that
        broadcast to them. The first line of an equation's docstring is the loss, as docs/objectives.md shows it.
    """
    raise NotImplementedError(f"no equation is registered for {type(objective).__name__}: see {__name__}")
