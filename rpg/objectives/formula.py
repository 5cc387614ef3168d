"""Evaluates users' own objectives: those of packages, and formulas that `specs/schema/formula.py` has parsed.

A formula is compiled once for its parameters: operations on numbers alone are computed then, equal operations only
once.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, reduce
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from rpg.objectives.clipping import Clipped, nothing_clipped
from rpg.objectives.registry import equation
from rpg.objectives.terms import Terms, bounded_exp
from specs.schema.formula import Node, parse_formula
from specs.schema.objective import FormulaObjective, PackagedObjective
from specs.schema.schedule import constant

Value = Tensor | float
"""Values of the entries, or one number for all of them."""


@equation.register
def formula(objective: FormulaObjective, terms: Terms) -> tuple[Tensor, Clipped]:
    """weight: −SG(m) log π; loss: as it is written

    Both are formulas of the spec. If `clipped` holds, the mark is `low` for a ratio below 1, else `dual` if A ≤ 0 and
    `high` if A > 0.
    """
    compiled = program(objective)
    if objective.loss:
        losses, acts = compiled.results(terms)
        return terms.per_token(losses), _marks(acts, terms)
    with torch.no_grad():
        weight, acts = compiled.results(terms)
    return -weight.detach() * terms.logprobs, _marks(acts, terms)


@equation.register
def packaged(objective: PackagedObjective, terms: Terms) -> tuple[Tensor, Clipped]:
    """as the installed package has it"""
    losses, clipped = objective.losses(terms)
    return losses, clipped


def _marks(acts: Tensor, terms: Terms) -> Clipped:
    """Returns the entries for which the condition `clipped` holds, by side of the clip."""
    if acts.dim() == 0:
        return nothing_clipped(terms.ratio)
    low = acts & (terms.ratio < 1)
    above = acts ^ low
    high = above & (terms.advantages > 0)
    return Clipped(low=low, high=high, dual=above ^ high)


def program(objective: FormulaObjective) -> "Program":
    """Returns the compiled formulas of an objective, for its parameters."""
    numbers = tuple((name, constant(value)) for name, value in objective.parameters.items())
    texts = objective.weight or objective.loss, objective.clipped
    return _compiled(*texts, numbers, objective.level in ("sequence", "geometric_mean"))


@dataclass(frozen=True, slots=True)
class Step:
    """An operation of a program, on results of earlier steps."""

    node: Node
    apply: Callable[..., Any]
    arguments: tuple[Any, ...]
    """Arguments of the operation. Each is a place among the steps, or a number."""
    of_terms: bool = False
    """Whether the operation needs the terms, which are then its first argument."""


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of a step in its program."""

    index: int


@dataclass(slots=True)
class Program:
    """The steps of an objective's formulas, in order."""

    steps: list[Step] = field(default_factory=list)
    outcome: Any = 0.0
    """Place of the weight's or loss's value, or a number."""
    clipped: Any = False
    """Place of the condition's value, or whether it holds everywhere."""

    @property
    def steps_of_outcome(self) -> int:
        """Returns the number of steps up to the weight or loss. Later steps compute only the marks of the clip."""
        return self.outcome.index + 1 if isinstance(self.outcome, _Place) else 0

    def values(self, terms: Terms) -> list[Any]:
        """Returns the result of each step."""
        results: list[Any] = []
        for step in self.steps:
            arguments = [results[each.index] if isinstance(each, _Place) else each for each in step.arguments]
            results.append(step.apply(terms, *arguments) if step.of_terms else step.apply(*arguments))
        return results

    def results(self, terms: Terms) -> tuple[Tensor, Tensor]:
        """Returns the weight or loss of each entry, and the marks of the clip, which are a tensor without dimensions if
        the clip never acts."""
        values, ratio = self.values(terms), terms.log_ratio
        outcome = values[self.outcome.index] if isinstance(self.outcome, _Place) else None
        clipped = values[self.clipped.index] if isinstance(self.clipped, _Place) else None
        never = ratio.new_zeros((), dtype=torch.bool)
        return (
            torch.full_like(ratio, self.outcome) if outcome is None else outcome,
            (torch.ones_like(ratio, dtype=torch.bool) if self.clipped else never) if clipped is None else clipped,
        )


@lru_cache(maxsize=256)  # a replay holds a hundred objectives at once
def _compiled(text: str, clipped: str, numbers: tuple[tuple[str, float], ...], of_responses: bool) -> Program:
    made, known, places = Program(), dict(numbers), dict[Node, Any]()

    def place(node: Node) -> Any:
        """Returns the place of a node's value: the index of its step, or the number itself."""
        if node not in places:
            places[node] = number_or_step(node)
        return places[node]

    def number_or_step(node: Node) -> Any:
        match node:
            case Node(operation="number"):
                return node.value
            case Node(operation="parameter"):
                return known[node.name]
            case Node(operation="symbol"):
                return step(node, _SYMBOLS[node.name], (), of_terms=True)
            case Node(operation="log", arguments=(Node(operation="symbol", name=name),)) if name in _LOGARITHMS:
                return step(node, _LOGARITHMS[name], (), of_terms=True)
        if node.operation == "where" and isinstance(decided := place(node.arguments[0]), bool):
            return place(node.arguments[1 if decided else 2])
        arguments = tuple(map(place, node.arguments))
        if node.operation in _OF_TERMS:
            return step(node, _OF_TERMS[node.operation], arguments, of_terms=True)
        if any(isinstance(each, _Place) for each in arguments):
            return step(node, _OPERATIONS[node.operation], arguments)
        return _OPERATIONS[node.operation](*(torch.tensor(each, dtype=_exact(each)) for each in arguments)).item()

    def step(node: Node, apply: Callable[..., Any], arguments: tuple[Any, ...], *, of_terms: bool = False) -> _Place:
        made.steps.append(Step(node, apply, arguments, of_terms))
        return _Place(len(made.steps) - 1)

    names = tuple(known)
    made.outcome = place(parse_formula(text, names, of_responses=of_responses))
    if clipped:
        made.clipped = place(parse_formula(clipped, names, condition=True, of_responses=of_responses))
    return made


def _exact(value: float | bool) -> torch.dtype:
    return torch.bool if isinstance(value, bool) else torch.float64


def _given(values: Tensor | None, symbol: str, argument: str) -> Tensor:
    if values is None:
        raise ValueError(f"the formula reads {symbol}: give `{argument}`")
    return values


def _log_old(terms: Terms) -> Tensor:
    return (terms.log_policy - terms.log_ratio).detach()


def _log_engine(terms: Terms) -> Tensor:
    return _given(terms.log_engine, "p_engine", "rollout_logprobs")


def _ratio(terms: Terms) -> Tensor:
    return bounded_exp(terms.log_ratio) if torch.is_grad_enabled() else terms.ratio


_LOGARITHMS: Mapping[str, Callable[[Terms], Tensor]] = MappingProxyType(
    {
        "w": lambda terms: terms.log_ratio,
        "r": lambda terms: terms.log_ref_ratio,
        "q": lambda terms: terms.log_reference,
        "p": lambda terms: terms.log_policy,
        "p_old": _log_old,
        "p_engine": _log_engine,
    }
)
"""Symbol -> its logarithm. It is never computed as the log of an exponential."""
_SYMBOLS: Mapping[str, Callable[[Terms], Tensor]] = MappingProxyType(
    {
        "w": _ratio,
        "r": lambda terms: bounded_exp(terms.log_ref_ratio),
        "q": lambda terms: bounded_exp(terms.log_reference),
        "p": lambda terms: torch.exp(terms.log_policy),
        "p_old": lambda terms: torch.exp(_log_old(terms)),
        "p_engine": lambda terms: torch.exp(_log_engine(terms)),
        "A": lambda terms: terms.advantages,
        "H": lambda terms: _given(terms.entropy, "H", "entropy"),
        "R": lambda terms: _given(terms.rewards, "R", "rewards"),
        "position": lambda terms: terms.response_mask.cumsum(-1).clamp(min=1).to(terms.logprobs),
        "length": lambda terms: terms.lengths.to(terms.logprobs),
    }
)


def _over_tokens(terms: Terms, values: Value) -> Tensor:
    """Returns values of the tokens, with 0 on padding."""
    return torch.where(terms.response_mask, values, torch.zeros_like(terms.log_ratio))


def _to_go(terms: Terms, values: Value) -> Tensor:
    return _over_tokens(terms, values).flip(-1).cumsum(-1).flip(-1)


def _response_sum(terms: Terms, values: Value) -> Tensor:
    return _over_tokens(terms, values).sum(-1, keepdim=True)


def _response_mean(terms: Terms, values: Value) -> Tensor:
    return _response_sum(terms, values) / terms.lengths


def _where(terms: Terms, condition: Tensor, one: Value, other: Value) -> Tensor:
    if not isinstance(one, Tensor) and not isinstance(other, Tensor):  # torch would use float32
        one = terms.log_ratio.new_full((), one)
    return torch.where(condition, one, other)


_OF_TERMS: Mapping[str, Callable[..., Tensor]] = MappingProxyType(
    {"to_go": _to_go, "response_sum": _response_sum, "response_mean": _response_mean, "where": _where}
)


def _least(*values: Value) -> Value:
    return reduce(lambda one, other: _paired(torch.minimum, "max", one, other), values)


def _greatest(*values: Value) -> Value:
    return reduce(lambda one, other: _paired(torch.maximum, "min", one, other), values)


def _paired(of_tensors: Callable[[Tensor, Tensor], Tensor], bound: str, one: Value, other: Value) -> Value:
    """Returns the lesser or greater of two values. One of them may be a number."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return of_tensors(one, other)
    if isinstance(other, Tensor):
        one, other = other, one
    if not isinstance(one, Tensor):
        return min(one, other) if bound == "max" else max(one, other)
    return one.clamp(max=other) if bound == "max" else one.clamp(min=other)


def _clip(value: Value, low: Value, high: Value) -> Value:
    if isinstance(value, Tensor) and not isinstance(low, Tensor) and not isinstance(high, Tensor):
        return value.clamp(low, high)
    return _least(_greatest(value, low), high)


def _all(*conditions: Any) -> Any:
    return reduce(torch.logical_and, _tensors(conditions))


def _any(*conditions: Any) -> Any:
    return reduce(torch.logical_or, _tensors(conditions))


def _tensors(conditions: Sequence[Any]) -> list[Tensor]:
    """Returns the conditions as tensors; constant ones are on the device of the others."""
    one = next(each for each in conditions if isinstance(each, Tensor))
    return [each if isinstance(each, Tensor) else one.new_full((), each) for each in conditions]


_OPERATIONS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "add": lambda one, other: one + other,
        "subtract": lambda one, other: one - other,
        "multiply": lambda one, other: one * other,
        "divide": lambda one, other: one / other,
        "power": lambda one, other: one**other,
        "negate": lambda one: -one,
        "less": lambda one, other: one < other,
        "less_equal": lambda one, other: one <= other,
        "greater": lambda one, other: one > other,
        "greater_equal": lambda one, other: one >= other,
        "equal": lambda one, other: one == other,
        "not_equal": lambda one, other: one != other,
        "not": torch.logical_not,
        "and": _all,
        "or": _any,
        "log": torch.log,
        "exp": bounded_exp,
        "abs": torch.abs,
        "sign": torch.sign,
        "sqrt": torch.sqrt,
        "sg": lambda value: value.detach(),
        "min": _least,
        "max": _greatest,
        "clip": _clip,
    }
)
