"""An agent's program: code that asks the policy as it would ask a provider, in the environment `agent`."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from rpg.types import Problem
from specs.schema.rollout import ProgramSection


class Running(Protocol):
    """A program as it works on one response."""

    def result(self) -> str | None:
        """Waits for its end. Returns what it comes to, if anything.

        Raises:
            Exception: it failed.
        """
        ...

    def end(self) -> None:
        """Ends it, as far as that can be done. Called from another thread than `result`."""
        ...


class AgentProgram(ProgramSection):
    """A program; see `ProgramSection` for its options."""

    @abstractmethod
    def begin(self, problem: Problem, base_url: str, api_key: str) -> Running:
        """The program for one response, in whose thread `result` is then called.

        Args:
            problem: what it is to work on, see `Problem.public`: neither the gold answer nor a hidden test is in it.
            base_url: of the endpoint, as clients of OpenAI's interface want it.
            api_key: the response's own.
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
    """A call of a function under way."""

    function: Callable[..., Any]
    arguments: tuple[Problem, str, str]

    def result(self) -> str | None:
        """See Running."""
        returned = self.function(*self.arguments)
        return None if returned is None else str(returned)

    def end(self) -> None:
        """See Running. A thread cannot be ended: its next request is refused."""
