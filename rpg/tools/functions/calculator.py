"""Arithmetic on numbers."""

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from rpg.tools.tool import Tool, ToolSession, one_text, only_text
from rpg.tools.tool_error import ToolError

Number = int | float
_LONGEST = 200
"""Largest number of characters of an expression."""
_LARGEST = 10**60
"""Largest allowed number. A power may have more digits than fit into memory."""
_OPERATIONS: dict[type[ast.operator], Callable[[Any, Any], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_LARGEST_POWER = 200


class Calculator(Tool):
    """Arithmetic: + - * / // % ** and brackets."""

    immediate: ClassVar[bool] = True

    def describe(self) -> dict[str, Any]:
        """See Tool."""
        meaning = "what to compute, with + - * / // % ** and brackets, such as (12 + 3) * 45"
        return one_text("calculator", "Computes an arithmetic expression exactly.", "expression", meaning)

    def open(self) -> ToolSession:
        """See Tool. The session keeps nothing from call to call."""
        return self

    def call(self, arguments: Mapping[str, Any]) -> str:
        """See ToolSession.

        Example:
            >>> Calculator(type="calculator").call({"expression": "(12 + 3) * 45"})
            '675'
        """
        expression = only_text(arguments, "expression").strip()
        if len(expression) > _LONGEST:
            raise ToolError(f"longer than {_LONGEST} characters")
        try:
            value = _value(ast.parse(expression, mode="eval").body)
        except ZeroDivisionError:
            raise ToolError("division by zero") from None
        except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError):
            raise ToolError("no arithmetic expression") from None
        return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)

    def close(self) -> None:
        """Does nothing, because nothing is held."""


def _value(node: ast.expr) -> Number:
    """Returns the value of an expression. Raises ValueError if it is not arithmetic, or too large."""
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            found: Number = value
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=operand):
            found = -_value(operand) if isinstance(sign, ast.USub) else _value(operand)
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in _OPERATIONS:
            first, second = _value(left), _value(right)
            if isinstance(operation, ast.Pow) and abs(second) > _LARGEST_POWER:
                raise ValueError("a power too large")
            found = _OPERATIONS[type(operation)](first, second)
        case _:
            raise ValueError("no arithmetic")
    if isinstance(found, complex) or not abs(found) <= _LARGEST:
        raise ValueError("no number that is shown")
    return found
