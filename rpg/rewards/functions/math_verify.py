"""Mathematical equality: exact where both sides are numbers, else by the math-verify library.

It may loop or exhaust memory: in a worker process only. What it evaluates has digits and operators alone, no name of
Python; it is sealed all the same, where that is possible.
"""

import logging
import re
import unicodedata
from typing import Any, ClassVar, Literal

from rpg.rewards.score import Score, without_answer
from rpg.types import Problem
from specs.errors import Issue
from specs.schema.reward import Reward

_SPELLINGS = (
    (re.compile(r"\\fbox(?=\s*\{)"), r"\\boxed"),
    (re.compile(r"(?<![\w.\\])(\d+(?:\.\d+)?)[eE]([+-]?\d+)(?![\w.])"), r"\1 \\times 10^{\2}"),
    (re.compile(r"√\s*\(([^()]*)\)"), r"\\sqrt{\1}"),
    (re.compile(r"√\s*(\w+|\{[^{}]*\})"), r"\\sqrt{\1}"),
    (re.compile(r"(?<![\\A-Za-z])pi(?![A-Za-z])|π"), r"\\pi "),
    (re.compile(r"°"), r"^\\circ "),
)
"""Spellings that the library does not read -> those that it does."""
_BOXED = re.compile(r"\\boxed\s*\{\s*(?:\\text\s*\{)?\s*\(?([A-Za-z])\)?\s*\}?\s*\}")
_LETTER = re.compile(r"\(?([A-Z])\)?")
_NAMED = re.compile(r"(?i:answer|option|choice)(?i:\s+is)?\s*:?\s*\**\(?([A-Z])\)?(?![\w'])")
_DIGITS = 50
"""Digits to which irrational numbers are compared."""


class MathVerify(Reward):
    """1 where the response's last expression equals the gold answer as mathematics, else 0. Numbers are compared
    exactly: 0.333333 is not 1/3. Where the gold answer is a letter, the response's last choice must be that letter."""

    libraries: ClassVar[tuple[str, ...]] = ("math-verify", "latex2sympy2-extended", "sympy")
    largest: ClassVar[float] = 1.0
    sealed: ClassVar[Literal["if possible"]] = "if possible"

    def prepare(self) -> None:
        """See Reward."""
        import math_verify  # noqa: F401

        # It logs each expression it cannot compare, with a traceback.
        logging.getLogger("math_verify").setLevel(logging.CRITICAL)

    def objects_to(self, problem: Problem) -> Issue | None:
        """See Reward."""
        return without_answer(problem, self.type)

    def score(self, problem: Problem, response: str) -> Score:
        """See Reward; the extracted answer is the last expression.

        The library's own time limits are off: they come in whole seconds, turn into a silent "unequal", and need the
        signal that the worker uses itself.
        """
        from math_verify import parse, verify

        if letter := _LETTER.fullmatch(problem.answer.strip()):
            chosen = _choice(response)
            return Score.of(float(chosen == letter[1]), chosen)
        expressions = parse(_spelled(response), parsing_timeout=None, raise_on_error=True)
        if not expressions:
            return Score.of(0.0, None)
        gold = parse(f"\\boxed{{{_spelled(problem.answer)}}}", parsing_timeout=None, raise_on_error=True)
        if not gold:
            raise ValueError(
                f"the gold answer of problem {problem.problem_id} is no mathematical expression: {problem.answer!r}"
            )
        equal = None if "%" in problem.answer + response else _are_equal(gold[0], expressions[0])
        if equal is None:
            equal = verify(gold, expressions, timeout_seconds=None, raise_on_error=True)
        return Score.of(1.0 if equal else 0.0, str(expressions[0]))


def _spelled(text: str) -> str:
    r"""Returns a text with full-width characters, roots, pi, degrees and powers of ten as the library reads them.

    Example:
        >>> _spelled("√(1/3) + pi/2"), _spelled("6.02e23")
        ('\\sqrt{1/3} + \\pi /2', '6.02 \\times 10^{23}')
    """
    text = "".join(unicodedata.normalize("NFKC", each) if "\uff01" <= each <= "\uff5e" else each for each in text)
    for pattern, spelling in _SPELLINGS:
        text = pattern.sub(spelling, text)
    return text


def _choice(response: str) -> str | None:
    r"""Returns the letter that a response chooses: in its last box, behind its last `answer is`, or all that it says.

    Example:
        >>> _choice(r"B looks right, but \boxed{C}"), _choice("The answer is (D)."), _choice("A"), _choice("A or B")
        ('C', 'D', 'A', None)
    """
    if found := _BOXED.findall(response) or _NAMED.findall(response):
        return str(found[-1]).upper()
    alone = _LETTER.fullmatch(response.strip().rstrip("."))
    return alone[1] if alone else None


def _are_equal(gold: Any, found: Any) -> bool | None:
    """Whether two expressions are the same number; None if one of them is no number. Decimals are exact.

    The library rounds to a few digits behind the point, where all small numbers are 0.
    """
    import sympy

    if not all(isinstance(each, sympy.Expr) and each.is_number for each in (gold, found)):
        return None
    one, other = (
        each.replace(lambda part: part.is_Float, lambda part: sympy.Rational(str(part))) for each in (gold, found)
    )
    values = [each.evalf(_DIGITS) for each in (one, other)]
    if not all(value.is_finite for value in values):
        return bool(one == other)
    largest = max(map(abs, values))
    if abs(values[0] - values[1]) > largest * sympy.Float(10) ** (10 - _DIGITS):
        return False
    one, other = one.doit(), other.doit()
    return bool(one == other) if one.is_Rational and other.is_Rational else True
