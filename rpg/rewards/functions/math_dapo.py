"""DAPO's answer rule: the last `Answer:` in the last 300 characters, normalised, must equal the normalised gold."""

import json
import re
from typing import ClassVar

from rpg.rewards.score import Score, odd_as_text
from rpg.types import Problem
from specs.schema.reward import Reward

_TAIL = 300
"""Number of characters at the end of the response that are searched."""
_ANSWER = re.compile(r"(?i)Answer\s*:\s*([^\n]+)")

# The two lists of Lewkowycz et al. 2022 (Minerva, arXiv:2206.14858, appendix D), in the form of DAPO's rule: without
# "ft".
_SUBSTITUTIONS = (
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    ("\\$", ""),
    ("\\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (",\\text{and}", ","),
    ("\\text{and}", ","),
    ("\\text{m}", "\\text{}"),
)
_WORDS = """
    square ways integers dollars mph inches hours km units \\ldots sue points feet minutes digits cents degrees cm gm
    pounds meters meals edges students childrentickets multiples
"""
_REMOVED = (
    *_WORDS.split(),
    "\\text{s}",
    "\\text{.}",
    "\\text{\ns}",
    "\\text{}^2",
    "\\text{}^3",
    "\\text{\n}",
    "\\text{}",
    "\\mathrm{th}",
    "^\\circ",
    "^{\\circ}",
    "\\;",
    ",\\!",
    "{,}",
    '"',
    "\\dots",
)
_WRAPPERS = tuple(
    re.compile(pattern)
    for pattern in (r"\\text\{(.*?)\}", r"\\textbf\{(.*?)\}", r"\\overline\{(.*?)\}", r"\\boxed\{(.*)\}")
)
_BRACED = (
    (re.compile(r"frac([^{])(.)"), r"frac{\1}{\2}"),  # \frac12 is \frac{1}{2}
    (re.compile(r"sqrt([^{])"), r"sqrt{\1}"),
)


def normalise(answer: str) -> str:
    r"""Returns an answer in the form in which answers are compared, character by character.

    Source: DAPO's reward rule (arXiv:2503.14476, its released scorer), which takes Minerva's normalisation.
    Example:
        >>> normalise(r"x = 336^\circ"), normalise("1,000 dollars")
        ('336', '1000')
    """
    answer = answer.split("=")[-1]
    for before, after in _SUBSTITUTIONS:
        answer = answer.replace(before, after)
    for expression in _REMOVED:
        answer = answer.replace(expression, "")
    answer = rewritten(answer).replace("$", "")
    if answer.replace(",", "").isdigit():
        answer = answer.replace(",", "")
    return answer.strip()


def rewritten(answer: str) -> str:
    r"""Returns a formula without its wrapping and the text around it. Takes linear time.

    Example:
        >>> rewritten(r"so $\boxed{\frac12}$ is it")
        '$\\frac{1}{2}$'
    """
    answer = "\n".join(map(_unwrapped, answer.split("\n")))
    for pattern, replacement in _BRACED:
        answer = pattern.sub(replacement, answer)
    return answer


def _unwrapped(line: str) -> str:
    if line.count("$") > 1:  # a formula inside text replaces the whole
        line = f"${line.split('$', 2)[1]}$"
    for pattern in _WRAPPERS if "\\" in line else ():
        # After the last brace nothing closes. Searching there from each opening one would take quadratic time.
        end = line.rfind("}") + 1
        line = pattern.sub(r"\1", line[:end]) + line[end:]
    return line


class MathDapo(Reward):
    """1 if the response's answer equals the gold answer after normalisation, else -1. Equal values in another form get
    -1."""

    largest: ClassVar[float] = 1.0
    in_process: ClassVar[bool] = True

    def may_be_negative(self) -> bool:
        """See Reward."""
        return True

    def doubts(self, answer: str) -> str:
        """See Reward."""
        try:
            is_list = isinstance(json.loads(answer), list)
        except (ValueError, RecursionError):
            is_list = False
        return "are lists in JSON, which are compared with their brackets" if is_list else odd_as_text(answer)

    def score(self, problem: Problem, response: str) -> Score:
        """See Reward. The extracted answer is the normalised one."""
        answers = _ANSWER.findall(response[-_TAIL:])
        if not answers:
            return Score.of(-1.0, None)
        extracted = normalise(answers[-1])
        return Score.of(1.0 if extracted == normalise(problem.answer) else -1.0, extracted)
