"""Users, who speak with the policy in the environment `conversation`."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rpg.types import Problem
from specs.schema.rollout import UserSection


@dataclass(frozen=True, slots=True)
class Remark:
    """A user's reply to a turn of the policy."""

    text: str
    reward: float = 0.0
    """Reward of the turn that the remark answers, in reward units. It counts if `rewards_turns` is set."""


Speaking = Callable[[Problem, Sequence[str], int], Remark | None]
"""See `User.reply`."""


class User(UserSection):
    """A user; see `UserSection` for its options."""

    @abstractmethod
    def reply(self, problem: Problem, said: Sequence[str], seed: int) -> Remark | None:
        """Returns the user's next words; None ends the response.

        Called in any thread, for many responses at once. The words need not be determined by the arguments: they are
        recorded, and repeated when a step is sampled again.

        Args:
            problem: the problem that the conversation began with, including the gold answer. Only this method may see
                it: a process that runs text of the policy must get `problem.public()`.
            said: all texts after the prompt: the policy's first, then the user's and the policy's in turn.
            seed: seed of any randomness.
        """

    @contextmanager
    def speaking(self) -> Iterator[Speaking]:
        """Yields `reply`, which is used while responses are sampled. A user that holds a resource for that time
        overrides this."""
        yield self.reply
