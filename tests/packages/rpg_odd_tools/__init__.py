"""Tools whose answers do not depend only on their arguments, or that do not answer."""

import os
import secrets
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from rpg.rollouters import Problem, Remark, User


def dice(number: str) -> str:  # noqa: ARG001
    """Says three random digits of two, and notes each of its answers in a directory.

    A file `hold` in it names a directory: once files there have four lines, it does not answer.

    Args:
        number: is not looked at
    """
    notes = Path(os.environ["ODD_TOOLS_NOTES"])
    if (notes / "hold").exists():
        watched = Path((notes / "hold").read_text())
        if sum(len(file.read_text().splitlines()) for file in watched.glob("*")) >= 4:
            (notes / "reached").touch()
            time.sleep(600)
    said = "".join(secrets.choice("01") for _ in range(3))
    (notes / f"said-{secrets.token_hex(8)}").write_text(said)
    return said


def sleeper(file: str) -> str:
    """Starts a process that would go on, writes its own id and that one's into a file, and does not answer.

    Args:
        file: where to write
    """
    child = subprocess.Popen(["sleep", "600"])
    Path(file).write_text(f"{os.getpid()} {child.pid} ")
    time.sleep(600)
    return "awake"


class Examiner(User):
    """Asks again until it hears the answer, and pays for it."""

    rewards_turns: ClassVar[bool] = True

    def reply(self, problem: Problem, said: Sequence[str], seed: int) -> Remark | None:  # noqa: ARG002
        """See User."""
        if said[-1] == problem.answer:
            return None
        return Remark(f"no, not {said[-1]}", reward=-0.5 * (len(said) // 2 + 1))
