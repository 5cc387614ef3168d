"""How responses are scored."""

from abc import abstractmethod
from typing import Any, ClassVar, Literal

from pydantic import Field

from specs.errors import Issue
from specs.schema.base import OpenSection, Spec, addition, execution


class Overlong(Spec):
    """DAPO's soft overlong punishment, arXiv:2503.14476 eq. 13: reward taken off as a response nears its limit."""

    buffer: int = Field(ge=1)
    """Tokens before rollout.max_response_length over which the penalty grows linearly from 0."""
    penalty: float = Field(1.0, gt=0)
    """Reward taken off at the limit."""


class Reward(OpenSection):
    """The scorer of a response. One that raises or hangs costs its response a recorded failure and reward 0."""

    group: ClassVar[str] = "rpg.rewards"
    package: ClassVar[str] = "rpg.rewards.functions"

    in_process: ClassVar[bool] = False
    """Whether a score takes microseconds and cannot hang or crash. Else it is taken in a worker process."""
    sealed: ClassVar[Literal["always", "if possible", "never"]] = "never"
    """Whether the worker process is in bubblewrap, without a network and without the machine's files. `always` where a
    text of a response may be run as code: machines that cannot seal it refuse the reward."""
    sandboxed: ClassVar[bool] = False
    """Whether it runs programs by `rpg.sandbox.Sandbox`, and nothing that may hang or crash beside them. Its scores are
    then taken in threads of the process that asks. Machines that can make no sandbox refuse the reward."""
    waits: ClassVar[bool] = False
    """Whether a score comes from a service or from a process of the reward's own. The reward then has a scorer of its
    own (`open`), and `score` is never called."""
    environment: ClassVar[tuple[str, ...]] = ()
    """Environment variables that a worker process gets beside those of a short list, such as the key of a service. A
    sealed one does not get them."""

    graded: ClassVar[bool] = False
    """Whether its values say how good a response is, and not whether it is right. Evaluations then have `score@k`, the
    mean value, and no accuracy."""
    worst: ClassVar[float | None] = None
    """Least value of a graded reward, with which a seed whose training failed counts. None: there is
    none, and nothing is claimed where a seed failed."""

    largest: ClassVar[float] = 1e6
    """Largest absolute value of a score. A score beyond it is invalid, and its response counts as one that could not be
    scored."""

    type: str
    """Name of the reward."""
    overlong: Overlong | None = addition(None)
    """A penalty on long responses, added to the score; left out: none."""
    strip_thinking: bool = addition(False)
    """Score the text behind the last `</think>` alone, without the white space that it begins with. Where a `<think>`
    stands in it, a thought was not ended: an empty text is scored."""
    timeout_seconds: float = execution(10.0, gt=0)
    """A scorer is stopped after so long on one response."""

    def parts(self) -> "tuple[Reward, ...]":
        """The rewards that score: itself, or those it is made of. They share a worker process."""
        return (self,)

    def compares(self) -> bool:
        """Whether a response is scored by comparison with the others of its group."""
        return any(part is not self and part.compares() for part in self.parts())

    def grades(self) -> bool:
        """Whether the reward is graded; of a sum, whether the term that decides is."""
        return self.graded

    def worst_value(self) -> float | None:
        """The least value that there can be; None: it is not known."""
        return self.worst

    def may_be_negative(self) -> bool:
        """Returns whether some value is known to be below 0."""
        worst = self.worst_value()
        return worst is not None and worst < 0

    def largest_value(self) -> float:
        """Returns the largest absolute value of a valid score."""
        return self.largest

    def written_in(self) -> tuple[str, ...]:
        """Files of its code beside the modules of its class: an error names the line in one of them."""
        return ()

    def prepare(self) -> None:
        """Called once in the process that scores, before its first response: the place for imports that take long."""

    def runs(self, problem: Any) -> bool:  # noqa: ARG002 (for those that override it)
        """Whether scoring a response to the problem may run a text of it as code. Such a response is scored in a
        process that ends with it, which costs milliseconds. May raise: then it may.
        """
        return self.sealed == "always"

    def open(self, place: Any) -> Any:
        """The `rpg.rewards.Scorer` of a reward that `waits`; `place` is a `rpg.rewards.score.Place`."""
        raise NotImplementedError(f"{self.type} has no scorer of its own ({place})")

    @abstractmethod
    def score(self, problem: Any, response: str) -> Any:
        """The `rpg.rewards.Score` of a response to a problem, which is an `rpg.rewards.Problem`. May raise."""

    def lacks(self) -> Issue | None:
        """What a machine that is to score must have, the sandbox aside, and this one has not."""
        return None

    def refuses(self, source: Any) -> Issue | None:  # noqa: ARG002 (for those that override it)
        """Why the problems of a `specs.schema.data.Source` cannot be scored, if they cannot."""
        return None

    def objects_to(self, problem: Any) -> Issue | None:  # noqa: ARG002 (for those that override it)
        """Why no response to the problem can be scored, where the problem shows it: it has no answer, say. Its
        `answer` and `metadata` are those of an `rpg.rewards.Problem`. Asked of a set's first problems before a run.
        """
        return None

    def doubts(self, answer: str) -> str:  # noqa: ARG002 (for those that override it)
        """Returns why right responses may not match a gold answer, or an empty text. Each of the `parts` is asked about
        a set's first problems before a run.
        """
        return ""
