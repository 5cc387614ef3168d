"""A user that follows a script."""

from collections.abc import Sequence
from typing import ClassVar

from rpg.rollouters.user import Remark, User
from rpg.types import Problem


class Scripted(User):
    """A user with fixed texts: it says one after each turn of the policy, in order, and nothing after the last."""

    immediate: ClassVar[bool] = True

    says: tuple[str, ...] = ()
    """Texts of the user, the same in every conversation. If left out, those in the problem's `columns.user`."""

    def reply(self, problem: Problem, said: Sequence[str], seed: int) -> Remark | None:  # noqa: ARG002 (not random)
        """See User."""
        script = self.says or tuple(problem.metadata.get("user", ()))
        place = len(said) // 2
        return Remark(script[place]) if place < len(script) else None

    @property
    def remarks(self) -> int | None:
        """See UserSection."""
        return len(self.says) or None
