"""How responses are scored."""

from abc import abstractmethod
from typing import Any, ClassVar, Literal

from pydantic import Field

from specs.errors import Issue
from specs.schema.base import OpenSection, Spec, addition, execution


class Overlong(Spec):
    """DAPO's soft overlong punishment, arXiv:2503.14476 eq. 13: a penalty that grows as a response nears its limit."""

    buffer: int = Field(ge=1)
    """Tokens before rollout.max_response_length over which the penalty grows linearly from 0."""
    penalty: float = Field(1.0, gt=0)
    """Penalty at the limit, in reward units."""


class Reward(OpenSection):
    """A scorer of responses. If it raises or hangs, the response gets reward 0 and the failure is recorded."""

    group: ClassVar[str] = "rpg.rewards"
    package: ClassVar[str] = "rpg.rewards.functions"

    in_process: ClassVar[bool] = False
    """Whether scoring takes microseconds and cannot hang or crash. Otherwise it happens in a worker process."""
    sealed: ClassVar[Literal["always", "if possible", "never"]] = "never"
    """Whether the worker process runs in bubblewrap, without a network and without the machine's files. `always` for
    rewards that may run a response's text as code: machines without bubblewrap refuse the reward."""
    sandboxed: ClassVar[bool] = False
    """Whether the reward runs programs in `rpg.sandbox.Sandbox`, and nothing outside it that may hang or crash. It then
    scores in threads of the calling process. Machines without a sandbox refuse the reward."""
    waits: ClassVar[bool] = False
    """Whether scores come from a service or from the reward's own process. The reward then has its own scorer (`open`),
    and `score` is never called."""
    environment: ClassVar[tuple[str, ...]] = ()
    """Environment variables, such as the key of a service, that a worker process gets in addition to a short list. A
    sealed process does not get them."""

    graded: ClassVar[bool] = False
    """Whether the reward's values grade a response instead of marking it right or wrong. Evaluations then have
    `score@k`, the mean value, and no accuracy."""
    worst: ClassVar[float | None] = None
    """Least value of a graded reward, used for a seed whose training failed. None if there is no least value; then
    nothing is claimed if a seed failed."""

    largest: ClassVar[float] = 1e6
    """Largest absolute value of a score. A larger score is invalid, and its response counts as unscored."""

    type: str
    """Name of the reward."""
    overlong: Overlong | None = addition(None)
    """Penalty on long responses, added to the score. Leave it out for no penalty."""
    strip_thinking: bool = addition(False)
    """Score only the text after the last `</think>`, without leading white space. If that text contains a `<think>`,
    the thought has no end, and an empty text is scored."""
    timeout_seconds: float = execution(10.0, gt=0)
    """Seconds that scoring a response may take. After that the scorer is stopped."""

    def parts(self) -> "tuple[Reward, ...]":
        """Returns the rewards that score: this reward itself, or its terms. They share a worker process."""
        return (self,)

    def compares(self) -> bool:
        """Returns whether a response is scored by comparison with the other responses of its group."""
        return any(part is not self and part.compares() for part in self.parts())

    def grades(self) -> bool:
        """Returns whether the reward is graded. For a sum, whether its deciding term is graded."""
        return self.graded

    def worst_value(self) -> float | None:
        """Returns the least possible value; None if it is unknown."""
        return self.worst

    def may_be_negative(self) -> bool:
        """Returns whether some value is known to be below 0."""
        worst = self.worst_value()
        return worst is not None and worst < 0

    def largest_value(self) -> float:
        """Returns the largest absolute value of a valid score."""
        return self.largest

    def written_in(self) -> tuple[str, ...]:
        """Returns further files of the reward's code, in addition to its class's module. Error messages name lines in
        them."""
        return ()

    def prepare(self) -> None:
        """Prepares the scoring process, once, before its first response. Slow imports belong here."""

    def runs(self, problem: Any) -> bool:  # noqa: ARG002 (for those that override it)
        """Returns whether scoring a response to the problem may run its text as code. Such a response is scored in its
        own process, which costs milliseconds. If this method raises, that counts as true.
        """
        return self.sealed == "always"

    def open(self, place: Any) -> Any:
        """Returns the `rpg.rewards.Scorer` of a reward that `waits`; `place` is a `rpg.rewards.score.Place`."""
        raise NotImplementedError(f"{self.type} has no scorer of its own ({place})")

    @abstractmethod
    def score(self, problem: Any, response: str) -> Any:
        """Returns the `rpg.rewards.Score` of a response to an `rpg.rewards.Problem`. May raise."""

    def lacks(self) -> Issue | None:
        """Returns an issue if this machine lacks a requirement for scoring, other than the sandbox."""
        return None

    def refuses(self, source: Any) -> Issue | None:  # noqa: ARG002 (for those that override it)
        """Returns an issue if the problems of a `specs.schema.data.Source` cannot be scored."""
        return None

    def objects_to(self, problem: Any) -> Issue | None:  # noqa: ARG002 (for those that override it)
        """Returns an issue if the problem shows that no response to it can be scored, for example because it has no
        answer. The problem has the `answer` and `metadata` of an `rpg.rewards.Problem`. It is called with a set's first
        problems before a run.
        """
        return None

    def doubts(self, answer: str) -> str:  # noqa: ARG002 (for those that override it)
        """Returns the reason why right responses may not match a gold answer, or an empty text. It is called on each of
        the `parts` with a set's first problems before a run.
        """
        return ""
