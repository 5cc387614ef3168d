"""Problems as text that a stranger can act on: place, line, what was given, what is allowed, what to do."""

from collections.abc import Sequence

from specs.errors import NOTHING_DONE, Problem
from specs.positions import dotted


def render(problems: Sequence[Problem], *, noun: str = "error", done: str = NOTHING_DONE) -> str:
    """All problems in the order given, then their number and what was done; readable without colour."""
    count = f"{len(problems)} {noun}{'' if len(problems) == 1 else 's'}"
    ending = f"{count}; {done}" if noun == "error" else count
    return "\n".join([*(render_one(problem) for problem in problems), ending])


def render_one(problem: Problem) -> str:
    """One problem, of one to five lines."""
    place = f"{problem.file}:{problem.line}" if problem.line else problem.file
    lines = [": ".join(part for part in (place, dotted(problem.path), problem.message) if part)]
    if problem.line and problem.snippet:
        lines.append(f"    {problem.line} | {problem.snippet.rstrip()}")
    facts = [f"given: {problem.given}"] if problem.given else []
    facts += [f"allowed: {problem.allowed}"] if problem.allowed else []
    if facts:
        lines.append("  " + "    ".join(facts))
    if problem.hint:
        lines.append(f"  hint: {problem.hint}")
    return "\n".join(_printable(line) for line in lines)


def _printable(line: str) -> str:
    """What a terminal would obey rather than show, as an escape."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in line)
