"""Mathematical equality: exact if both sides are numbers, otherwise by the math-verify library.

The library may loop or exhaust memory, so it runs only in a worker process. It evaluates only digits and operators, no
names of Python; the worker is sandboxed all the same, if the machine can do that.
"""

import logging
import re
import unicodedata
from decimal import Decimal
from functools import cache, lru_cache
from typing import Any, ClassVar, Literal

from rpg.rewards.score import Score, odd, without_answer
from rpg.types import Problem
from specs.errors import Issue
from specs.schema.reward import Reward

_SPELLINGS = (
    (re.compile(r"(?<=\d)(?:\\[,;! ]|[~\u00a0\u2009\u202f])(?=\d{3}(?!\d))"), ""),
    (re.compile(r"([\u2070-\u2079\u207b\u00b2\u00b3\u00b9]+)"), lambda match: f"^{{{_ascii(match[1])}}}"),
    (re.compile(r"([\u2080-\u2089]+)"), lambda match: f"_{{{_ascii(match[1])}}}"),
    (
        re.compile(r"([\u00bc-\u00be\u2150-\u215e])"),
        lambda match: "\\frac{{{}}}{{{}}}".format(*_ascii(match[1]).split("/")),
    ),
    (re.compile(r"(?<![^\s{(=,$\[:])[\u2010-\u2013](?=\s?[\d.\\(])"), "-"),
    (re.compile(r"[^\x00-\x7f]"), lambda match: _ascii(match[0])),
    (re.compile(r"(?<![\w.\\])(\d+(?:\.\d+)?)[eE]([+-]?\d{1,3})(?![\w.])"), lambda match: f"{Decimal(match[0]):f}"),
    (
        re.compile(r"(?<![\w.])(\d*\.\d*)\\(?:overline|bar|dot)\s*\{?(\d+)\}?"),
        lambda match: _repeating(*match.groups()),
    ),
    (re.compile(r"\\(?:text)?color\s*\{[^{}]*\}|\\\\\s*(?=\})|(?<=[\d)])\.(?=\s*\})|[€£¥]"), ""),
    (re.compile(r"\\\$(?=\s*[\d.])"), ""),
    (re.compile(r"~"), " "),
    (re.compile(r"(?<![\w.,/^])(\d{1,3}(?: \d{3})+)(?!\d|\s*/)"), lambda match: match[1].replace(" ", "")),
    (re.compile(r"(?<=\d)\s*\\[,;! ]\s*(?=\d+/\d)"), " "),
    (
        re.compile(r"(?<![\w.,/^])(\d+)\s+(\d+)/(\d+)(?![\w/^]|\.\d)"),  # a mixed number: 3 1/2
        lambda match: f"{int(match[1]) * int(match[3]) + int(match[2])}/{match[3]}",
    ),
    (re.compile(r"(?:(?<=[\d)])|(?<=\b[A-Za-z]))\*\*(-?\w+|\([^()]*\))(?![\w*])"), r"^{\1}"),
    (re.compile(r"(?<![\\A-Za-z])sqrt\s*(\d+)"), r"\\sqrt{\1}"),
    (re.compile(r"√\s*\(((?:[^()]|\([^()]*\))*)\)"), r"\\sqrt{\1}"),
    (re.compile(r"√\s*(\w+|\{[^{}]*\})"), r"\\sqrt{\1}"),
    (re.compile(r"∛\s*(\w+|\{[^{}]*\}|\([^()]*\))"), r"\\sqrt[3]{\1}"),
    (re.compile(r"(?<![\\A-Za-z])pi(?![A-Za-z])|π"), r"\\pi "),
    (re.compile(r"∞"), r"\\infty "),
    (re.compile(r"\\sqrt\s*\[\s*(\d*[13579])\s*\]\s*\{\s*-"), r"-\\sqrt[\1]{"),
    (re.compile(r"\\varnothing(?![A-Za-z])"), r"\\emptyset "),
    (re.compile(r"°|\\degree(?![A-Za-z])"), r"^\\circ "),
    (  # the library takes 30 degrees for the number 30
        re.compile(
            r"(\\(?:sin|cos|tan|cot|sec|csc)\s*(?:\^\s*(?:\d|\{\d+\})\s*)?(?:\\left\s*)?[({]?\s*)"
            r"(-?\d+(?:\.\d+)?)\s*\^\s*(?:\\circ(?![A-Za-z])|\{\s*\\circ\s*\})"
        ),
        r"\1\\frac{\2\\pi}{180}",
    ),
)
"""Spellings that the library does not read -> spellings that it reads."""
_SIGNS = str.maketrans("\u2212\u207b\u00d7\u00b7\u22c5\u00f7\u2044", "--***//")
"""Characters for minus, times and division -> ASCII."""
_OTHER_BOX = re.compile(r"\\(?:fbox|framebox)(?=\s*\{)")
_BETWEEN = r"(?:\s|\$|\\[()\[\],;]|\\q?quad\b|\\text\s*\{|\}|[A-Za-z]\w{0,3}\s*=)*"
_JOINED_BOX = re.compile(
    r"(\\boxed\s*\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\})"
    + _BETWEEN
    + r"(?:[,;]\s*(?:and\b|or\b)?|and\b|or\b)"
    + _BETWEEN
)
"""Pattern of a box and a separator that joins the next box to it as another part of the same answer."""
_LONGEST = 200
"""Largest number of characters of a formula that stands alone."""
_LAST_STOP = re.compile(r"(?<!\.)\.\s*\Z")
"""Pattern of a full stop that ends a gold answer: `5.`"""
_SAID = re.compile(r"(?i)answer(?:\s+is)?[ \t:*]*([^\n]*)")
_UNREAD = re.compile(r"pi|sqrt|[\w)]\*\*[\w(]|[^\x00-\x7f]|[A-Za-z)]\s*\^|[A-Za-z)]\s*[-+]\s*\w|\d\s*[-+]\s*[A-Za-z]")
_QUANTITY = re.compile(r"[-+]?[\d.,/]+\s+[A-Za-z]\s*(?:\^\s*\d)?")
"""Pattern of a number with a unit, which is not a formula: 12 m^2."""
_FORMULA = re.compile(r"(?:[^A-Za-z\\$]|(?<![A-Za-z])(?:[A-Za-z]|pi|sqrt)(?![A-Za-z]))+")
_TAGGED = re.compile(r"(?:[^A-Za-z\\$]|\\[A-Za-z]+|(?<![A-Za-z])[A-Za-z](?![A-Za-z]))+")
"""Pattern of a formula between tags, which may be LaTeX without dollars."""
_WORDING = r"(?:\\(?:text|textbf|textrm|mathrm|mathbf)\s*\{|[\s:$*_>])*"
"""Pattern of text that may come before a letter: emphasis, spaces, colons."""
_BOXED = re.compile(rf"\\boxed\s*\{{{_WORDING}(?i:option|choice)?\s*\(?([A-Za-z])(?=[).:]|[\s}}$*]*\}})")
_ALONE = re.compile(rf"{_WORDING}\(?([A-Z])(?:[.:)][^\n]*|[\s}}$*.]*)")
_NAMED = tuple(
    re.compile(
        rf"(?i:{name})(?i:\s+is)?{_WORDING}(?i:option\s|choice\s)?\(?([A-Z])(?![\w'])(?!\s*(?:or|and|/)\s*\(?[A-Z]\b)"
    )
    for name in ("answer", "option|choice")
)
_SMALL = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_UNITS = {
    **{word: number for number, word in enumerate(_SMALL)},
    **{word: 10 * number for number, word in enumerate(_TENS, 2)},
}
_SCALES = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9}
_WORDS_BOXED = re.compile(r"(\\boxed\s*\{(?:\s*\\text\s*\{)?)\s*([A-Za-z][A-Za-z\s-]*?)\s*(?=\})")
_DIGITS = 50
"""Number of digits of irrational numbers that are compared."""


class MathVerify(Reward):
    """1 if the response's last expression equals the gold answer mathematically, else 0. Numbers are compared exactly,
    in sets, intervals, equations and matrices too: 0.333333 is not 1/3. If the gold answer is a letter, the response's
    last choice must be that letter."""

    libraries: ClassVar[tuple[str, ...]] = ("math-verify", "latex2sympy2-extended", "sympy")
    largest: ClassVar[float] = 1.0
    sealed: ClassVar[Literal["if possible"]] = "if possible"

    def prepare(self) -> None:
        """See Reward."""
        import math_verify  # noqa: F401

        # The library logs each expression it cannot compare, with a traceback.
        logging.getLogger("math_verify").setLevel(logging.CRITICAL)

    def objects_to(self, problem: Problem) -> Issue | None:
        """See Reward."""
        return without_answer(problem, self.type)

    def doubts(self, answer: str) -> str:
        """See Reward."""
        return odd(answer)

    def score(self, problem: Problem, response: str) -> Score:
        """See Reward. The extracted answer is the last expression.

        The library's own time limits are off: they are whole seconds, end in a silent "unequal", and need the signal
        that the worker uses itself.
        """
        if letter := _ALONE.fullmatch(problem.answer.strip()):
            chosen = _choice(response)
            return Score.of(float(chosen == letter[1]), chosen)
        import sympy
        from math_verify import parse, verify

        _compare_exactly()
        expressions = parse(_spelled(_what_counts(response)), parsing_timeout=None, raise_on_error=True)
        if not expressions:
            return Score.of(0.0, None)
        if not (gold := _gold(problem.answer)):
            raise ValueError(
                f"the gold answer of problem {problem.problem_id} is not a mathematical expression: {problem.answer!r}"
            )
        if gold[0] in (sympy.nan, sympy.zoo):  # the library raises
            return Score.of(float(gold[1:] == expressions[1:]), str(expressions[0]))
        found = [*map(_exact, expressions)]
        sides = gold, [*map(_solutions, found)] if isinstance(gold[0], (sympy.Interval, sympy.Union)) else found
        equal = verify(*sides, timeout_seconds=None, raise_on_error=True)
        if not equal and (positive := _positive(sides[0][0], sides[1][0])):
            equal = verify(*positive, timeout_seconds=None, raise_on_error=True)
        return Score.of(1.0 if equal else 0.0, str(expressions[0]))


@lru_cache(maxsize=4096)
def _gold(answer: str) -> list[Any]:
    """Returns the expressions of a gold answer. They are cached, because all responses to a problem have the same gold
    answer."""
    from math_verify import parse

    answer = _digits(_LAST_STOP.sub("", answer))
    found = parse(f"\\boxed{{{_spelled(answer)}}}", parsing_timeout=None, raise_on_error=True)
    return [*map(_exact, found)]


def _what_counts(response: str) -> str:
    r"""Returns the part of a response from its last box on, including boxes before it that a comma, `and` or `or` joins
    to it.

    In a response without a box, the content of the last `<answer>` counts, if there is one. If that names its answer,
    or is one, dollars are put around an answer that the library would not read.

    Example:
        >>> _what_counts(r"\boxed{1}. No: \boxed{2} or \boxed{3}"), _what_counts("The answer is π/2.")
        ('\\boxed{2}, \\boxed{3}', '$π/2$')
    """
    response = _OTHER_BOX.sub(r"\\boxed", response)
    begin = response.rfind("\\boxed")
    if begin >= 0:
        boxes = [response[begin:]]
        while (before := response.rfind("\\boxed", 0, begin)) >= 0:
            if not (joined := _JOINED_BOX.fullmatch(response, before, begin)):
                break
            boxes.append(joined[1])
            begin = before
        return _WORDS_BOXED.sub(lambda match: match[1] + _digits(match[2]), ", ".join(reversed(boxes)))
    tagged, closed, _ = response.rpartition("<answer>")[2].partition("</answer>")
    if closed:
        response = tagged.strip()
        if len(response) < _LONGEST and _TAGGED.fullmatch(response) and not _QUANTITY.fullmatch(response):
            return f"${response}$"
    said = (_SAID.findall(response) or [response])[-1].strip().rstrip(".*")
    if (number := _digits(said)) != said:
        return f"${number}$"
    unread = len(said) < _LONGEST and _UNREAD.search(said) and not _QUANTITY.fullmatch(said)
    return f"${said}$" if unread and _FORMULA.fullmatch(said) else response


def _spelled(text: str) -> str:
    r"""Returns a text with roots, powers, fractions, pi, degrees, digits and signs in the spelling that the library
    reads.

    Example:
        >>> _spelled("√(1/3) + pi/2"), _spelled("1.5e3"), _spelled(r"½ x² - 0.\overline{3}")
        ('\\sqrt{1/3} + \\pi /2', '1500', '\\frac{1}{2} x^{2} - \\frac{3}{9}')
    """
    for pattern, spelling in _SPELLINGS:
        text = pattern.sub(spelling, text)
    return text


def _digits(text: str) -> str:
    """Returns a number in English words as digits, and any other text unchanged.

    Example:
        >>> _digits("One hundred and twenty-three"), _digits("minus two thousand five"), _digits("one of two")
        ('123', '-2005', 'one of two')
    """
    words = text.lower().replace("-", " ").split()
    negative = words[:1] in (["minus"], ["negative"])
    total = part = 0
    before = ""
    for word in words[negative:]:
        if word in _UNITS and (before in ("", "and", *_SCALES) or (before in _TENS and 0 < _UNITS[word] < 10)):
            part += _UNITS[word]
        elif word == "hundred" and 0 < part < 100:
            part *= 100
        elif word in _SCALES and word != "hundred" and part:
            total, part = total + part * _SCALES[word], 0
        elif word != "and" or before not in _SCALES:
            return text
        before = word
    return text if before in ("", "and") else f"{'-' * negative}{total + part}"


def _ascii(text: str) -> str:
    """Returns a text with digits, signs and full-width characters replaced by ASCII. Other characters stay
    unchanged."""
    plain = unicodedata.normalize("NFKC", text.translate(_SIGNS)).translate(_SIGNS)
    plain = "".join(str(int(each)) if each.isdecimal() else each for each in plain)
    return plain if plain.isascii() else text


def _repeating(begin: str, period: str) -> str:
    """Returns the fraction equal to a decimal whose last digits repeat forever."""
    places = len(begin.partition(".")[2])
    digits = begin.replace(".", "")
    return f"\\frac{{{int(digits + period) - int(digits or 0)}}}{{{(10 ** len(period) - 1) * 10**places}}}"


def _choice(response: str) -> str | None:
    r"""Returns the letter that a response chooses: in its last box, after its last `answer is`, after its last
    `option`, or the letter that it consists of or begins with.

    Example:
        >>> _choice(r"B looks right, but \boxed{C}"), _choice("The answer is (D), option A is not"), _choice("A or B")
        ('C', 'D', None)
    """
    for pattern in (_BOXED, *_NAMED):
        if found := pattern.findall(response):
            return str(found[-1]).upper()
    alone = _ALONE.fullmatch(response.strip())
    return alone[1] if alone else None


def _exact(expression: Any) -> Any:
    """Returns an expression with its decimals as fractions and the symbol i as the imaginary unit."""
    import sympy

    if not isinstance(expression, (sympy.Basic, sympy.MatrixBase)):
        return expression
    if unit := {each: sympy.I for each in expression.free_symbols if str(each) == "i"}:
        expression = expression.subs(unit)
    if not expression.has(sympy.Float):
        return expression
    return expression.replace(lambda part: part.is_Float, lambda part: sympy.Rational(str(part)))


def _solutions(expression: Any) -> Any:
    """Returns the set of numbers for which inequalities hold that are solved for their symbol, such as 1 < x <= 2; any
    other expression unchanged.

    An inequality that is not solved may only repeat the question, so it is not solved here.
    """
    import sympy
    from sympy.core.relational import Relational

    if not isinstance(expression, (Relational, sympy.And, sympy.Or)) or len(expression.free_symbols) != 1:
        return expression
    is_solved = all(
        not isinstance(each, (sympy.Eq, sympy.Ne))
        and (each.lhs.is_Symbol or each.lhs.is_number)
        and (each.rhs.is_Symbol or each.rhs.is_number)
        for each in expression.atoms(Relational)
    )
    return expression.as_set() if is_solved else expression


def _positive(one: Any, other: Any) -> tuple[Any, Any] | None:
    """Returns two expressions with their symbols declared positive, if no negative value makes both real. Then 1/√n
    equals √(1/n), but √(x²) does not equal x. None for any other pair."""
    import sympy

    if not all(isinstance(each, sympy.Expr) for each in (one, other)) or not (shared := one.free_symbols):
        return None
    positive = {symbol: sympy.Symbol(f"{symbol}", positive=True) for symbol in shared}
    if other.free_symbols != shared or any(
        each.subs({**dict.fromkeys(shared, 2), symbol: -2}).is_real is not False
        for each in (one, other)
        for symbol in shared
    ):
        return None
    return one.subs(positive), other.subs(positive)


@cache
def _compare_exactly() -> None:
    """Makes the library compare numbers exactly, anywhere in an expression.

    The library itself rounds to a few digits after the point, so that all small numbers are 0.
    """
    from math_verify import grader

    by_library = grader.sympy_numeric_eq

    def are_equal(gold: Any, found: Any, *rounding: int) -> bool:
        if all(getattr(each, "is_number", False) for each in (gold, found)):
            if grader.get_pct_val(gold) is None and grader.get_pct_val(found) is None:
                return _are_equal(gold, found)
        elif not hasattr(gold, "shape") or not hasattr(found, "shape"):
            return False  # then the library simplifies the difference
        return bool(by_library(gold, found, *rounding))

    grader.sympy_numeric_eq = are_equal


def _are_equal(one: Any, other: Any) -> bool:
    """Returns whether two expressions are the same number."""
    import sympy

    if not all(each.evalf(_DIGITS).is_finite for each in (one, other)):
        return bool(one.doit() == other.doit())
    difference = one - other
    parts = difference.evalf(_DIGITS, maxn=4 * _DIGITS).as_real_imag()
    if any(not part.is_zero and part._prec > 1 for part in parts):  # that many digits of it are known
        return False
    difference = difference.doit()
    return bool(difference == 0) if difference.is_Rational else not isinstance(difference, sympy.core.numbers.NaN)
