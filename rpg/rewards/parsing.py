"""Parsing of answers that a scorer would evaluate, so that no text of a response runs as code.

`literal` reads lists and other literals, `arithmetic` whole numbers and operators, `formula` also symbols and
elementary functions. Each returns a new text written from the parsed answer; an empty one if parsing failed.
"""

import ast
import cmath
import re
from collections.abc import Callable, Collection
from typing import Any

_LONGEST = 10_000
"""Largest number of characters of an answer that is parsed."""
_DEEPEST = 60
"""Deepest nesting of expressions."""
_LARGEST_SIZE = 8192
"""Largest number of digits, or highest degree, to which an expression may grow."""
_LARGEST_EXPONENT = 256.0
_INTEGER = re.compile(r"[0-9]{1,50}")
_NUMBER = re.compile(r"([0-9]{1,50}\.?[0-9]{0,50}|\.[0-9]{1,50})([eE][+-]?[0-9]{1,2})?")
"""Accepted spellings of numbers."""
_LONGEST_NAME = 32
_CONSTANTS: dict[str, complex] = {"pi": cmath.pi, "E": cmath.e, "I": 1j}
_FUNCTIONS: dict[str, Callable[..., complex]] = {
    **{name: getattr(cmath, name) for name in ("exp", "sqrt", "log", "sin", "cos", "tan", "asin", "acos", "atan")},
    **{name: getattr(cmath, name) for name in ("sinh", "cosh", "tanh", "asinh", "acosh", "atanh")},
    "ln": cmath.log,
    "Abs": abs,
    "sec": lambda value: 1 / cmath.cos(value),
    "csc": lambda value: 1 / cmath.sin(value),
    "cot": lambda value: 1 / cmath.tan(value),
}
"""Functions that a formula may have: SymPy name -> implementation."""
_SIGNS: dict[type[ast.AST], str] = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
    ast.Pow: "**",
    ast.UAdd: "+",
    ast.USub: "-",
}


def literal(answer: str, texts: Collection[str]) -> str:
    """Returns the answer if it is one of these texts. Otherwise reads it as a literal, such as a list of lists, and
    returns that in normal form.

    Example:
        >>> literal("[ [0, 1],  ['a'] ]", []), literal("0 1", ["0 1"]), literal("[print()]", [])
        ("[[0, 1], ['a']]", '0 1', '')
    """
    if answer in texts:
        return answer
    if len(answer) > _LONGEST:
        return ""
    try:
        return repr(ast.literal_eval(answer))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return ""


def arithmetic(answer: str) -> str:
    """Returns the arithmetic of whole numbers in normal form.

    Example:
        >>> arithmetic("(8 - 5)*10-6"), arithmetic("345e0"), arithmetic("pi/pi")
        ('(((8 - 5) * 10) - 6)', '', '')
    """
    return _written(answer, _INTEGER, None)


def formula(answer: str, reserved: Callable[[str], bool]) -> str:
    """Returns the formula in normal form, with numbers, symbols, + - * / ** and elementary functions.

    Args:
        reserved: whether a name is not a symbol, but has another meaning where the text is evaluated.

    Example:
        >>> formula("(1+2) *x**2 + C", lambda name: False), formula("9**9**9", lambda name: False)
        ('(((1 + 2) * (x ** 2)) + C)', '')
    """
    return _written(answer, _NUMBER, reserved)


def _written(answer: str, numbers: re.Pattern[str], reserved: Callable[[str], bool] | None) -> str:
    if len(answer) > _LONGEST:
        return ""
    try:
        tree = ast.parse(answer.strip(), mode="eval")
        return _Formula(answer.strip(), numbers, reserved).read(tree.body, 0)[0]
    except (ValueError, SyntaxError, ArithmeticError, MemoryError, RecursionError):
        return ""


_Read = tuple[str, int, complex | None]
"""An expression's text, the size that it may grow to, and its value (None if it has symbols)."""


class _Formula:
    """A reader of the expressions of a formula. It raises ValueError for an expression of an unknown kind."""

    def __init__(self, text: str, numbers: re.Pattern[str], reserved: Callable[[str], bool] | None) -> None:
        """Takes the text and the accepted numbers. `reserved`: see `formula`; None means that no names are allowed."""
        self._lines = text.encode().splitlines(keepends=True)
        self._numbers, self._reserved = numbers, reserved

    def read(self, node: ast.expr, depth: int) -> _Read:
        """Returns the expression, parsed."""
        if depth > _DEEPEST:
            raise ValueError("too deep")
        found = self._read(node, depth + 1)
        if found[1] > _LARGEST_SIZE:
            raise ValueError("too large")
        return found

    def _read(self, node: ast.expr, depth: int) -> _Read:
        match node:
            case ast.Constant():
                return self._number(node)
            case ast.Name(id=name) if self._reserved is not None and name in _CONSTANTS:
                return name, 1, _CONSTANTS[name]
            case ast.Name(id=name) if self._is_symbol(name):
                return name, 1, None
            case ast.UnaryOp(op=ast.UAdd() | ast.USub() as sign, operand=operand):
                text, size, value = self.read(operand, depth)
                if isinstance(sign, ast.USub) and value is not None:
                    value = -value
                return f"({_SIGNS[type(sign)]}{text})", size, value
            case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _SIGNS:
                return _joined(self.read(left, depth), type(sign), self.read(right, depth))
            case ast.Call(func=ast.Name(id=name), args=[_, *more] as given, keywords=[]) if name in _FUNCTIONS:
                if self._reserved is None:
                    raise ValueError("no functions here")
                if more and (name != "log" or len(more) > 1):
                    raise ValueError("too many arguments")
                return _applied(name, [self.read(each, depth) for each in given])
        raise ValueError(f"unknown: {type(node).__name__}")

    def _is_symbol(self, name: str) -> bool:
        if self._reserved is None or len(name) > _LONGEST_NAME or "__" in name:
            return False
        return not self._reserved(name)

    def _number(self, node: ast.Constant) -> _Read:
        """Returns a number as it is written."""
        line = self._lines[node.lineno - 1]
        text = line[node.col_offset : node.end_col_offset].decode()
        if node.lineno != node.end_lineno or not self._numbers.fullmatch(text):
            raise ValueError("no plain number")
        return text, 2 * len(text), complex(float(text))


def _joined(left: _Read, sign: type[ast.AST], right: _Read) -> _Read:
    text = f"({left[0]} {_SIGNS[sign]} {right[0]})"
    size = left[1] + right[1]
    if sign is ast.Pow:
        size *= _power(right[2])
    if left[2] is None or right[2] is None:
        return text, size, None
    values: dict[type[ast.AST], Callable[[Any, Any], complex]] = {
        ast.Add: lambda one, other: one + other,
        ast.Sub: lambda one, other: one - other,
        ast.Mult: lambda one, other: one * other,
        ast.Div: lambda one, other: one / other,
        ast.Pow: lambda one, other: one**other,
    }
    return text, size, values[sign](left[2], right[2])


def _applied(name: str, given: list[_Read]) -> _Read:
    text = f"{name}({', '.join(each[0] for each in given)})"
    values = [each[2] for each in given]
    size = 1 + sum(each[1] for each in given)
    if name == "exp":  # a power, under another name
        size *= _power(values[0])
    known = [value for value in values if value is not None]
    return text, size, _FUNCTIONS[name](*known) if len(known) == len(values) else None


def _power(exponent: complex | None) -> int:
    """Returns how many times larger a power is than its base. Raises ValueError if the exponent is too large."""
    if exponent is None:
        return 1
    if not abs(exponent) <= _LARGEST_EXPONENT:
        raise ValueError("too large an exponent")
    return 1 + int(abs(exponent))
