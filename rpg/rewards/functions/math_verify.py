"""Mathematical equality, by the math-verify library. It may loop or exhaust memory: in a worker process only.

What it evaluates has digits and operators alone, no name of Python; it is sealed all the same, where that is possible.
"""

import logging
from typing import ClassVar, Literal

from rpg.rewards.score import Score, without_answer
from rpg.types import Problem
from specs.errors import Issue
from specs.schema.reward import Reward


class MathVerify(Reward):
    """1 where the response's last expression equals the gold answer as mathematics, else 0."""

    libraries: ClassVar[tuple[str, ...]] = ("math-verify", "latex2sympy2-extended", "sympy")
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

        expressions = parse(response, parsing_timeout=None, raise_on_error=True)
        if not expressions:
            return Score.of(0.0, None)
        gold = parse(f"\\boxed{{{problem.answer}}}", parsing_timeout=None, raise_on_error=True)
        if not gold:
            raise ValueError(
                f"the gold answer of problem {problem.problem_id} is no mathematical expression: {problem.answer!r}"
            )
        equal = verify(gold, expressions, timeout_seconds=None, raise_on_error=True)
        return Score.of(1.0 if equal else 0.0, str(expressions[0]))
