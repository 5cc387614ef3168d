"""Which rewards are scored in bubblewrap, and whether this machine can."""

import sys
from collections.abc import Iterator
from pathlib import Path

from rpg import sandbox
from rpg.sandbox import room
from specs.errors import Issue
from specs.schema.reward import Reward


def refusal(reward: Reward) -> Issue | None:
    """Why this machine may not score with the reward: it may run what a response says, and cannot be sealed here; or it
    lacks something else.
    """
    if issue := next((issue for part in reward.parts() if (issue := part.lacks())), None):
        return issue
    running = next((part.type for part in reward.parts() if part.sealed == "always" or part.sandboxed), None)
    if running is None:
        return None
    programs = any(part.sandboxed for part in reward.parts())
    if lack := room.missing() if programs else sandbox.missing():
        return Issue(
            f"{running} may run what a response says, and is scored in a sandbox alone: {lack.reason}",
            path=("reward",),
            given=reward.type,
            hint=f"{lack.hint}; or take a reward that compares: exact_match, math_dapo, math_verify",
        )
    return None


def in_threads(reward: Reward) -> bool:
    """Whether all that may hang or crash is programs in the sandbox, so that the reward needs no worker process."""
    return all(part.sandboxed or part.in_process for part in reward.parts())


def runs_code(reward: Reward) -> bool:
    """Whether a text of a response may be run as code."""
    return any(part.sealed == "always" for part in reward.parts())


def is_sealed(reward: Reward) -> bool:
    """Whether the reward's workers are sealed here: one that may run a text always, others where nothing hinders it."""
    wanted = {part.sealed for part in reward.parts() if not part.in_process}
    return "always" in wanted or (wanted == {"if possible"} and sandbox.missing() is None)


def code_of(reward: Reward) -> Iterator[Path]:
    """The files and directories from which a worker imports the reward, those of the installed packages aside."""
    modules = {type(part).__module__.partition(".")[0] for part in (reward, *reward.parts())}
    for name in ("specs", *modules):
        module = sys.modules[name]
        yield from map(Path, getattr(module, "__path__", None) or [module.__file__ or ""])
