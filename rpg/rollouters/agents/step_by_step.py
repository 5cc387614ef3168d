"""A program that has a chain of sums worked out one operation at a time."""

import re
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from rpg.rollouters.agent import AgentProgram, Running
from rpg.types import Problem

if TYPE_CHECKING:
    import httpx

_OPERATION = re.compile(r"\s*([+\-*/])\s+")
_NUMBER = re.compile(r"-?\d+")


class StepByStep(AgentProgram):
    """Asks for the first operation of an expression such as `12 + 34 - 5 =`, and for each further one with the last
    answer before it: `46 - 5 =`. Each request is a history of its own."""

    def begin(self, problem: Problem, base_url: str, api_key: str) -> Running:
        """See AgentProgram."""
        return _Steps(problem.question_text, base_url, api_key)


@dataclass(frozen=True, slots=True)
class _Steps:
    expression: str
    base_url: str
    api_key: str

    def result(self) -> str | None:
        """See Running. It ends early where an answer begins with no number."""
        first, *rest = _OPERATION.split(self.expression.rstrip("= "))
        answer = first.strip()
        for operator, number in zip(rest[::2], rest[1::2], strict=True):
            found = _NUMBER.match(self._asked(f"{answer} {operator} {number} =").strip())
            if not found:
                return None
            answer = found[0]
        return answer

    def _asked(self, question: str) -> str:
        asked = {"model": "policy", "messages": [{"role": "user", "content": question}]}
        headers = {"Authorization": f"Bearer {self.api_key}"}
        answered = _client().post(f"{self.base_url}/chat/completions", json=asked, headers=headers)
        answered.raise_for_status()
        return str(answered.json()["choices"][0]["message"]["content"])

    def end(self) -> None:
        """See Running. Its next request is refused."""


@cache
def _client() -> "httpx.Client":
    """A client that all programs share."""
    import httpx

    return httpx.Client(timeout=None, limits=httpx.Limits(max_connections=None), trust_env=False)
