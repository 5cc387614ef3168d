"""Objectives that a spec writes as formulas, and the parser that turns a formula's text into a checked tree.

`rpg/objectives/formula.py` evaluates the tree.
"""

import ast
import itertools
import keyword
import math
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Discriminator, Field, Tag, ValidationError, model_validator
from pydantic_core import InitErrorDetails

from specs.errors import Issue, IssueError
from specs.schema.base import Spec
from specs.schema.base_objective import (
    Aggregation,
    BaseObjective,
    Claim,
    Direction,
    Divergence,
    Level,
    Parameter,
    RatioOver,
    direction_of,
)
from specs.schema.fields import nearest
from specs.schema.schedule import constant, smallest

SYMBOLS = {
    "w": "π/π_old",
    "r": "π/π_ref",
    "q": "π_ref/π_old",
    "A": "advantage",
    "p": "π of the sampled token",
    "p_old": "π_old of the sampled token",
    "p_engine": "probability of the sampled token by the engine that sampled it",
    "H": "entropy of π at the token, nats, a constant",
    "R": "reward of the response",
    "position": "place of the token among the response's sampled tokens, from 1",
    "length": "number of the response's sampled tokens",
}
"""Symbol -> its meaning. At the levels of whole responses, each symbol is that of the response, and H is a mean."""
FUNCTIONS: dict[str, tuple[int, int]] = {
    **dict.fromkeys(("log", "exp", "abs", "sign", "sqrt", "sg"), (1, 1)),
    **dict.fromkeys(("to_go", "response_mean", "response_sum"), (1, 1)),
    **dict.fromkeys(("min", "max"), (2, 8)),
    **dict.fromkeys(("clip", "where"), (3, 3)),
}
"""Function -> smallest and largest number of arguments that it accepts."""
OVER_TOKENS = ("to_go", "response_mean", "response_sum", "position")
"""Names that are not allowed if an entry is a whole response."""
MAX_TEXT = 2000
"""Largest number of characters of a formula."""
MAX_NODES = 300
MAX_NESTING = 40
_CHARACTERS = re.compile(r"[A-Za-z0-9_+\-*/()., <>=!]")
_INSTEAD = {
    "^": "a power as x**2",
    "&": "`and`",
    "|": "`or`",
    "!": "`not`",
    "=<": "<=",
    "=>": ">=",
    "<>": "!=",
    **dict.fromkeys("\N{MIDDLE DOT}\N{MULTIPLICATION SIGN}", "*"),
    **dict.fromkeys("\N{MINUS SIGN}\N{EN DASH}", "-"),
    "\N{LESS-THAN OR EQUAL TO}": "<=",
    "\N{GREATER-THAN OR EQUAL TO}": ">=",
}
"""Other notation -> what to write in its place."""
_PRODUCT = re.compile(
    r"(?<![\w.])\d[\d.]*(?!e[-+\d])[A-Za-z_(]|"
    r"(?:\)|\b(?!(?:and|or|not)\b)\w+)\s+(?!(?:and|or|if|else|in|is)\b)[\w(]|\)\("
)
"""A product without its sign: `2w`, `w A`."""
_OPERATORS: dict[type[ast.AST], str] = {
    ast.Add: "add",
    ast.Sub: "subtract",
    ast.Mult: "multiply",
    ast.Div: "divide",
    ast.Pow: "power",
    ast.USub: "negate",
    ast.Not: "not",
    ast.And: "and",
    ast.Or: "or",
    ast.Lt: "less",
    ast.LtE: "less_equal",
    ast.Gt: "greater",
    ast.GtE: "greater_equal",
    ast.Eq: "equal",
    ast.NotEq: "not_equal",
}
_OF_TRUTHS = ("not", "and", "or")
_COMPARISONS = ("less", "less_equal", "greater", "greater_equal", "equal", "not_equal")
_KIND_NAMES = {True: "a condition, such as w > 1", False: "a number"}


@dataclass(frozen=True, slots=True)
class Node:
    """A number, name or operation of a formula. Nodes compare equal wherever they occur."""

    operation: str
    """`number`, `symbol`, `parameter`, an arithmetic or logical operator, or a function."""
    arguments: tuple["Node", ...] = ()
    name: str = ""
    """Name of a symbol or parameter."""
    value: float = 0.0
    """Value of a number."""
    column: int = field(default=0, compare=False)
    """Column of the node's first character in the text, from 1."""

    @property
    def is_condition(self) -> bool:
        """Whether the node's value is true or false, and not a number."""
        return self.operation in _OF_TRUTHS or self.operation in _COMPARISONS

    def names(self) -> Iterator[str]:
        """Yields the node's symbols and parameters, once per occurrence."""
        if self.name:
            yield self.name
        for argument in self.arguments:
            yield from argument.names()


class FormulaError(Exception):
    """Error for a formula that cannot be read. Its `issue` has the place within the text."""

    def __init__(self, issue: Issue) -> None:
        super().__init__(issue.message)
        self.issue = issue


@lru_cache(maxsize=512)
def parse_formula(
    text: str, parameters: tuple[str, ...] = (), *, condition: bool = False, of_responses: bool = False
) -> Node:
    """Returns the tree of a formula.

    Args:
        parameters: names it may use in addition to SYMBOLS.
        condition: the formula must be true or false; otherwise a number.
        of_responses: an entry is a whole response.
    Raises:
        FormulaError: it is not a formula.
    Example:
        >>> parse_formula("w*A").operation, sorted(parse_formula("min(w, 1 + high)", ("high",)).names())
        ('multiply', ['high', 'w'])
    """
    return _Reader(" ".join(text.split("\n")), parameters, of_responses).read(condition)


class _Reader:
    """Translator of one text's Python syntax tree."""

    def __init__(self, text: str, parameters: tuple[str, ...], of_responses: bool) -> None:
        self._text = text
        self._parameters = parameters
        self._of_responses = of_responses
        self._nodes = 0

    def read(self, condition: bool) -> Node:
        text = self._text
        if len(text) > MAX_TEXT:
            raise self._error("the formula is too long", 1, f"{len(text)} characters", f"at most {MAX_TEXT}")
        if not text.strip():
            raise self._error("the formula is empty", 1, allowed="an expression such as w*A")
        for place, character in enumerate(text, 1):
            if not _CHARACTERS.fullmatch(character):
                allowed = "letters, digits and + - * / ** ( ) , . < > = !"
                hint = f"write {_INSTEAD[character]}" if character in _INSTEAD else ""
                hint = hint or ("write its name, as in beta" if character.isalpha() else "")
                raise self._error("a character that is not part of a formula", place, character, allowed, hint)
        begin = len(text) - len(text.lstrip())
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a warning would name no file
                tree = ast.parse(text.strip(), mode="eval").body
        except SyntaxError as error:
            # Python reports offset 0 if the text ends too early.
            place = min(begin + (error.offset or len(text.strip())), len(text))
            if "too many nested" in error.msg:
                raise self._too_large(place) from None
            hint = _meant(text)
            if found := re.search("=<|=>|<>|!(?!=)", text):
                place, hint = found.start() + 1, f"write {_INSTEAD[found.group()]}"
            given = text[place - 1 : place + 20].strip()
            raise self._error("not an expression", place, given, "an expression such as w*A", hint) from None
        except (ValueError, RecursionError, MemoryError):
            raise self._error("not an expression", 1, hint="write a simpler formula") from None
        for node in ast.walk(tree):
            if hasattr(node, "col_offset"):
                node.col_offset += begin
        return self._checked(self._node(tree, 0), condition)

    def _error(self, message: str, column: int, given: str = "", allowed: str = "", hint: str = "") -> FormulaError:
        return FormulaError(Issue(message, (), given, allowed, hint, within=self._text, column=column))

    def _too_large(self, column: int) -> FormulaError:
        allowed = f"at most {MAX_NODES} operations and names, nested at most {MAX_NESTING} deep"
        return self._error("the formula is too large", column, allowed=allowed)

    def _checked(self, node: Node, condition: bool) -> Node:
        if node.is_condition != condition:
            given = _KIND_NAMES[node.is_condition]
            raise self._error(f"must be {_KIND_NAMES[condition]}", node.column, given, hint=_instead(condition))
        return node

    def _node(self, node: ast.expr, depth: int) -> Node:
        column = node.col_offset + 1
        self._nodes += 1
        if self._nodes > MAX_NODES or depth > MAX_NESTING:
            raise self._too_large(column)

        def number(part: ast.expr) -> Node:
            return self._checked(self._node(part, depth + 1), False)

        def condition(part: ast.expr) -> Node:
            return self._checked(self._node(part, depth + 1), True)

        match node:
            case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
                return self._number(value, column)
            case ast.Name(id=name):
                return self._name(name, column)
            case ast.UnaryOp(op=ast.UAdd(), operand=operand):
                return number(operand)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return Node("negate", (number(operand),), column=column)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return Node("not", (condition(operand),), column=column)
            case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _OPERATORS:
                return Node(_OPERATORS[type(operator)], (number(left), number(right)), column=column)
            case ast.BoolOp(op=operator, values=values):
                return Node(_OPERATORS[type(operator)], tuple(map(condition, values)), column=column)
            case ast.Compare(left=left, ops=operators, comparators=others):
                sides = itertools.pairwise((left, *others))
                return self._comparison([(number(one), number(other)) for one, other in sides], operators, column)
            case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]):
                self._takes(name, len(arguments), column)
                first = condition if name == "where" else number
                return Node(name, (first(arguments[0]), *map(number, arguments[1:])), column=column)
        hint = ""
        match node:
            case ast.IfExp():
                hint = "write where(condition, a, b)"
            case ast.Call(keywords=[_, *_]):
                hint = "arguments have no names, as in clip(w, 0.8, 1.2)"
            case ast.Call():
                hint = "only a function takes arguments; a product is written with *"
        given = ast.get_source_segment(self._text, node) or ""
        raise self._error(
            "not part of a formula", column, given[:40], "numbers, symbols, operators and functions", hint
        )

    def _number(self, value: float, column: int) -> Node:
        try:
            finite = math.isfinite(plain := float(value))
        except OverflowError:
            finite = False
        if not finite:
            raise self._error("the number is too large", column, allowed="a finite number")
        return Node("number", value=plain, column=column)

    def _name(self, name: str, column: int) -> Node:
        if self._of_responses and name in OVER_TOKENS:
            raise self._of_tokens(name, column)
        if name in SYMBOLS:
            return Node("symbol", name=name, column=column)
        if name in self._parameters:
            return Node("parameter", name=name, column=column)
        known = (*SYMBOLS, *self._parameters)
        hint = _nearest(name, known) or "define a number of your own under `parameters`"
        if name in FUNCTIONS:
            hint = f"`{name}` is a function: write {name}(...)"
        raise self._error("unknown symbol", column, name, ", ".join(known), hint)

    def _of_tokens(self, name: str, column: int) -> FormulaError:
        hint = "use level token or to_go, which have an entry for each token"
        return self._error(f"`{name}` has no meaning at the level of whole responses", column, name, hint=hint)

    def _comparison(self, sides: list[tuple[Node, Node]], operators: list[ast.cmpop], column: int) -> Node:
        """Returns a < b < c as a < b and b < c. The shared side is read, and counted, in each pair."""
        pairs = []
        for pair, operator in zip(sides, operators, strict=True):
            name = _OPERATORS.get(type(operator))
            if name is None:
                raise self._error("not part of a formula", column, type(operator).__name__.lower(), "< <= > >= == !=")
            pairs.append(Node(name, pair, column=pair[0].column))
        return pairs[0] if len(pairs) == 1 else Node("and", tuple(pairs), column=column)

    def _takes(self, name: str, number: int, column: int) -> None:
        if name not in FUNCTIONS:
            is_symbol = name in SYMBOLS or name in self._parameters
            hint = "a product is written with *" if is_symbol else _nearest(name, FUNCTIONS)
            raise self._error("unknown function", column, name, ", ".join(FUNCTIONS), hint)
        if self._of_responses and name in OVER_TOKENS:
            raise self._of_tokens(name, column)
        least, most = FUNCTIONS[name]
        if not least <= number <= most:
            allowed = f"{least}" if least == most else f"{least} to {most}"
            raise self._error(f"`{name}` takes another number of arguments", column, str(number), allowed)


def _meant(text: str) -> str:
    """Returns a hint for a common mistake; an empty text if the text has none."""
    if re.search(r"(?<![<>=!])=(?!=)", text):
        return "a comparison is written =="
    if text.count("(") != text.count(")"):
        return "the parentheses do not match"
    if _PRODUCT.search(text):
        return "a product is written with *, as in 2*w"
    return ""


def _instead(condition: bool) -> str:
    return "compare it, as in w > 1" if condition else "where(condition, a, b) turns it into a number"


def _nearest(name: str, known: Iterable[str]) -> str:
    """Returns a hint that names the closest known name; most known names have one letter."""
    names = list(known)
    letters = {name, *name.split("_"), *(name[:1] if len(set(name)) == 1 else "")}
    alike = [each for each in names if each in letters] or [each for each in names if each.lower() == name.lower()]
    return f"did you mean `{alike[0]}`?" if alike else nearest(name, names, cutoff=0.5)


class GradientClaim(Spec):
    """The claim that a formula's expected gradient is that of the expected reward minus a divergence."""

    divergence: Divergence = "none"
    """Divergence from the reference policy. none: the gradient is that of the expected reward alone."""
    kl_coef: Annotated[float, Field(ge=0)] | str = 0.0
    """Weight of the divergence: a number, or the name of a parameter."""
    exact: Literal["always", "on_policy"]
    """When the claim holds. on_policy: while the policy is the sampling policy. always: also off policy."""

    @model_validator(mode="after")
    def _weighs(self) -> Self:
        if self.divergence == "none" and self.kl_coef != 0:
            raise IssueError(Issue("kl_coef has no effect", ("kl_coef",), f"{self.kl_coef}, with divergence none"))
        if self.divergence != "none" and self.kl_coef == 0:
            hint = "name the parameter that weighs it, or write its number"
            raise IssueError(Issue("the divergence has no weight", ("kl_coef",), "0", hint=hint))
        return self


ClaimOrNone = Annotated[
    Annotated[GradientClaim, Tag("exact")] | Annotated[Literal["none"], Tag("none")],
    Discriminator(lambda value: "exact" if isinstance(value, (Mapping, GradientClaim)) else "none"),
]


class FormulaObjective(BaseObjective):
    """Your own objective, written as a formula: docs/objectives.md lists the symbols. It is certified before it
    trains."""

    published: ClassVar[dict[str, dict[str, Any]]] = {
        "advantage": {"baseline": "group_mean", "scale": "none"},
        "reference": {"source": "behaviour"},
    }

    type: Literal["formula"] = "formula"
    level: Literal["token", "to_go", "sequence", "geometric_mean"] = "token"
    """Scope of the symbols: a token, a whole response, or a response's geometric mean. to_go: also a token, but the
    claimed divergence is that of the whole response."""
    parameters: dict[str, Parameter] = Field(default_factory=dict)
    """Name in the formulas -> number or schedule."""
    weight: str = ""
    """The weight m of the loss -SG(m) log pi. Give either this or `loss`."""
    loss: str = ""
    """The loss of a token or of a whole response, differentiated as written."""
    clipped: str = ""
    """Condition under which the clip acts, for the metrics of clipping. Empty means it never acts."""
    claim: ClaimOrNone
    """Claim about the gradient, checked by exact enumeration before training; a false claim is an error. none makes no
    claim."""
    aggregation: Aggregation = "token_mean"
    """How token losses become the loss of an update."""

    @model_validator(mode="after")
    def _readable(self) -> Self:
        if issues := [*self._issues()]:
            errors = [
                InitErrorDetails(type="value_error", loc=(), input=issue.given, ctx={"error": IssueError(issue)})
                for issue in issues
            ]
            raise ValidationError.from_exception_data("formula", errors)
        return self

    def _issues(self) -> Iterator[Issue]:
        for name in self.parameters:
            if not name.isascii() or not name.isidentifier() or keyword.iskeyword(name):
                allowed = "letters, digits and _, a letter first, and no word such as and"
                yield Issue("not a name", ("parameters", name), name, allowed)
            elif name in SYMBOLS or name in FUNCTIONS:
                yield Issue("the name is taken by a symbol or a function", ("parameters", name), name)
        if bool(self.weight) == bool(self.loss):
            given = "both" if self.weight else "neither"
            hint = "`weight` is the m of the loss -SG(m) log pi; `loss` is differentiated as it is written"
            yield Issue("give either weight or loss", ("weight",) if self.weight else (), given, hint=hint)
        for key in ("weight", "loss", "clipped"):
            try:
                self.tree(key)
            except FormulaError as error:
                yield replace(error.issue, path=(key,))
        weighing = 0.0 if self.claim == "none" else self.claim.kl_coef
        if isinstance(weighing, str):
            if weighing not in self.parameters:
                known = ", ".join(self.parameters) or "a number: there are no parameters"
                yield Issue("no such parameter", ("claim", "kl_coef"), weighing, known)
            elif smallest(self.parameters[weighing]) < 0:
                yield Issue(
                    "must be at least 0", ("parameters", weighing), hint="it is the weight of the claim's divergence"
                )

    def tree(self, key: Literal["weight", "loss", "clipped"]) -> Node | None:
        """Returns the tree of the formula under a key; None if the key has no formula."""
        text = getattr(self, key)
        of_responses = self.level in ("sequence", "geometric_mean")
        return (
            parse_formula(text, (*self.parameters,), condition=key == "clipped", of_responses=of_responses)
            if text
            else None
        )

    @property
    def symbols(self) -> frozenset[str]:
        """Symbols that occur in the formulas."""
        return frozenset(name for name in self.names() if name in SYMBOLS)

    def names(self) -> Iterator[str]:
        """Yields the symbols and parameters in the formulas, once per occurrence."""
        for tree in (self.tree("weight"), self.tree("loss"), self.tree("clipped")):
            yield from tree.names() if tree else ()

    @property
    def needs_reference(self) -> bool:
        """Whether a formula reads r or q."""
        return bool(self.symbols & {"r", "q"})

    @property
    def without_advantage(self) -> bool:
        """True, since a formula may have a gradient at A = 0."""
        return True

    @property
    def ratio_over(self) -> RatioOver:
        """Scope of the symbols."""
        return "token" if self.level == "to_go" else self.level

    @property
    def exact(self) -> Claim:
        """The claim's `exact`; `never` without a claim."""
        return "never" if self.claim == "none" else self.claim.exact

    @property
    def claim_level(self) -> Level:
        """Whose divergence is claimed: `token` at level token, else `sequence`."""
        return "token" if self.level == "token" else "sequence"

    @property
    def claims_divergence(self) -> bool:
        """Whether `claim` names a divergence."""
        return self.claim != "none" and self.claim.divergence != "none"

    @property
    def claim_divergence(self) -> Direction:
        """Direction of the divergence that `claim` names."""
        return direction_of("none" if self.claim == "none" else self.claim.divergence)

    @property
    def claimed_kl_coef(self) -> float:
        """Weight of the divergence that `claim` names."""
        weight = 0.0 if self.claim == "none" else self.claim.kl_coef
        return constant(self.parameters[weight]) if isinstance(weight, str) else weight

    def with_kl_coef(self, kl_coef: float) -> Self:
        """Returns the objective with another value of the parameter that weights the divergence; itself if no parameter
        does."""
        if self.claim == "none" or not isinstance(name := self.claim.kl_coef, str):
            return self
        return self.model_copy(update={"parameters": {**self.parameters, name: kl_coef}})
