"""The exceptions a user can cause. Each is shown as it stands, without a traceback, and ends with exit code 2."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One thing wrong with what the user gave."""

    message: str
    """E.g. `unknown field`, `must be less than 1`."""
    path: tuple[str | int, ...] = ()
    """Into the spec: ("objective", "clip", "low"); empty where it is not about a field."""
    given: str = ""
    allowed: str = ""
    hint: str = ""
    """What to do."""
    file: str = ""
    line: int = 0
    """From 1; 0: unknown."""
    snippet: str = ""
    """That line's text."""


class RpgError(Exception):
    """What the user named is wrong. `str()` is the whole message."""


NOTHING_DONE = "nothing was run"


class SpecError(RpgError):
    """One or more problems with a spec, or with the data or model it names, in file order."""

    def __init__(self, *problems: Problem, done: str = NOTHING_DONE) -> None:
        super().__init__(problems)
        self.problems = problems
        self.done = done
        """What had been done when they were found, in words."""

    def __str__(self) -> str:
        from specs.render import render_one

        return "\n".join(render_one(problem) for problem in self.problems)
