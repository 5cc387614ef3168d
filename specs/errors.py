"""The exceptions a user can cause. Each is shown as it stands, without a traceback, and ends with exit code 2."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace


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
        from specs.errors import render_one

        return "\n".join(render_one(problem) for problem in self.problems)


Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Position:
    """One line of one file."""

    file: str
    """As the user named it, or as found from there; `--set ...` for an override."""
    line: int
    """From 1; 0: not a line of a file."""
    snippet: str
    """That line's text."""


Positions = dict[Path, Position]


def locate(problem: Problem, positions: Mapping[Path, Position]) -> Problem:
    """The problem with file, line and snippet of its path, or of the nearest ancestor that stands in a file."""
    if problem.file:
        return problem
    for length in range(len(problem.path), -1, -1):
        if position := positions.get(problem.path[:length]):
            return replace(problem, file=position.file, line=position.line, snippet=position.snippet)
    return problem


def in_file_order(problems: list[Problem]) -> list[Problem]:
    """By file in order of appearance, then by line; each problem once."""
    files = list(dict.fromkeys(problem.file for problem in problems))
    return sorted(dict.fromkeys(problems), key=lambda problem: (files.index(problem.file), problem.line))


def dotted(path: Path) -> str:
    """The path as a user writes it: data.train.0.size; a key that has dots itself is put in brackets."""
    text = ""
    for part in path:
        name = str(part)
        text += f"[{name}]" if "." in name else f".{name}" if text else name
    return text


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
