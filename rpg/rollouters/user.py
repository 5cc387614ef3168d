"""A user: who speaks with the policy in the environment `conversation`."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rpg.types import Problem
from specs.schema.rollout import UserSection


@dataclass(frozen=True, slots=True)
class Remark:
    """What a user says to a turn of the policy."""

    text: str
    reward: float = 0.0
    """Reward of the turn that it answers, reward units; counts with `rewards_turns`."""


Speaking = Callable[[Problem, Sequence[str], int], Remark | None]
"""See `User.reply`."""


class User(UserSection):
    """A user; see `UserSection` for its options."""

    @abstractmethod
    def reply(self, problem: Problem, said: Sequence[str], seed: int) -> Remark | None:
        """The user's next words; None: there is no more to say, and the response ends.

        Called in any thread, for many responses at once. What it says counts as it is said, and is said again to a step
        that is sampled again; it need not follow from the arguments.

        Args:
            problem: what the conversation began with, the gold answer in it. It is this method's alone: a process that
                runs what the policy says is to be given `problem.public()`.
            said: all after the prompt, the policy's text first, then the user's and the policy's in turn.
            seed: for what is random in it.
        """

    @contextmanager
    def speaking(self) -> Iterator[Speaking]:
        """`reply` for as long as responses come about. A user that keeps something open for it overrides this."""
        yield self.reply
