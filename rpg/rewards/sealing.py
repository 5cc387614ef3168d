"""Which rewards are scored in bubblewrap, and whether this machine can do that."""

import sys
from collections.abc import Iterator
from pathlib import Path

from rpg import sandbox
from rpg.sandbox import room
from specs.errors import Issue
from specs.schema.reward import Reward


def refusal(reward: Reward) -> Issue | None:
    """Returns why this machine may not score with the reward: the reward may run text of a response and cannot be
    sandboxed here, or it lacks something else.
    """
    if issue := next((issue for part in reward.parts() if (issue := part.lacks())), None):
        return issue
    running = next((part.type for part in reward.parts() if part.sealed == "always" or part.sandboxed), None)
    if running is None:
        return None
    programs = any(part.sandboxed for part in reward.parts())
    if lack := room.missing() if programs else sandbox.missing():
        return Issue(
            f"{running} may execute text of a response, so it scores only in a sandbox: {lack.reason}",
            path=("reward",),
            given=reward.type,
            hint=f"{lack.hint}; or take a reward that compares: exact_match, math_dapo, math_verify",
        )
    return None


def in_threads(reward: Reward) -> bool:
    """Returns whether only the reward's programs in the sandbox can hang or crash. Then it needs no worker process."""
    return all(part.sandboxed or part.in_process for part in reward.parts())


def runs_code(reward: Reward) -> bool:
    """Returns whether the reward may run text of a response as code."""
    return any(part.sealed == "always" for part in reward.parts())


def is_sealed(reward: Reward) -> bool:
    """Returns whether the reward's workers are sandboxed here: always if they may run a response's text, else if
    possible."""
    wanted = {part.sealed for part in reward.parts() if not part.in_process}
    return "always" in wanted or (wanted == {"if possible"} and sandbox.missing() is None)


def code_of(reward: Reward) -> Iterator[Path]:
    """Yields the files and directories from which a worker imports the reward, without those of installed packages."""
    modules = {type(part).__module__.partition(".")[0] for part in (reward, *reward.parts())}
    for name in ("specs", *modules):
        module = sys.modules[name]
        yield from map(Path, getattr(module, "__path__", None) or [module.__file__ or ""])
