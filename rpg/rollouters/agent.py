"""Agents' programs for the environment `agent`: code that calls the policy as it would call a model provider."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from rpg.types import Problem
from specs.schema.rollout import ProgramSection


class Running(Protocol):
    """A program that works on one response."""

    def result(self) -> str | None:
        """Waits for the program to end. Returns its result, if any.

        Raises:
            Exception: the program failed.
        """
        ...

    def end(self) -> None:
        """Ends the program, as far as possible. It is called from another thread than `result`."""
        ...


class AgentProgram(ProgramSection):
    """A program; see `ProgramSection` for its options."""

    @abstractmethod
    def begin(self, problem: Problem, base_url: str, api_key: str) -> Running:
        """Starts the program for one response. Its `result` is then called in the thread of that response.

        Args:
            problem: the task, see `Problem.public`: without the gold answer and without hidden tests.
            base_url: address of the endpoint in the form that clients of OpenAI's interface take.
            api_key: the response's own key.
        """


class FunctionProgram(AgentProgram):
    """A plain function of an installed package: `function(problem, base_url, api_key)` returns a text or nothing. It
    runs in a thread of the process that samples."""

    function: ClassVar[Callable[[Problem, str, str], str | None]]

    def begin(self, problem: Problem, base_url: str, api_key: str) -> Running:
        """See AgentProgram."""
        return Called(type(self).function, (problem, base_url, api_key))


@dataclass(frozen=True, slots=True)
class Called:
    """A call of a function in progress."""

    function: Callable[..., Any]
    arguments: tuple[Problem, str, str]

    def result(self) -> str | None:
        """See Running."""
        returned = self.function(*self.arguments)
        return None if returned is None else str(returned)

    def end(self) -> None:
        """See Running. A thread cannot be ended, but its next request is refused."""
