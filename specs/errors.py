"""The exceptions a user can cause. Each is shown as it stands, without a traceback, and ends with exit code 2."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Issue:
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


class IssueError(ValueError):
    """Raised by a validator: what is wrong, its path relative to the section that is validated."""

    def __init__(self, issue: Issue) -> None:
        super().__init__(issue.message)
        self.issue = issue


class RpgError(Exception):
    """What the user named is wrong. `str()` is the whole message."""


NOTHING_DONE = "nothing was run"


class SpecError(RpgError):
    """One or more issues with a spec, or with the data or model it names, in file order."""

    def __init__(self, *issues: Issue, done: str = NOTHING_DONE) -> None:
        super().__init__(issues)
        self.issues = issues
        self.done = done
        """What had been done when they were found, in words."""

    def __str__(self) -> str:
        from specs.errors import render_one

        return "\n".join(render_one(issue) for issue in self.issues)


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


def locate(issue: Issue, positions: Mapping[Path, Position]) -> Issue:
    """The issue with file, line and snippet of its path, or of the nearest ancestor that stands in a file."""
    if issue.file:
        return issue
    for length in range(len(issue.path), -1, -1):
        if position := positions.get(issue.path[:length]):
            return replace(issue, file=position.file, line=position.line, snippet=position.snippet)
    return issue


def in_file_order(issues: list[Issue]) -> list[Issue]:
    """By file in order of appearance, then by line; each issue once."""
    files = list(dict.fromkeys(issue.file for issue in issues))
    return sorted(dict.fromkeys(issues), key=lambda issue: (files.index(issue.file), issue.line))


def dotted(path: Path) -> str:
    """The path as a user writes it: data.train.0.size; a key that has dots itself is put in brackets."""
    text = ""
    for part in path:
        name = str(part)
        text += f"[{name}]" if "." in name else f".{name}" if text else name
    return text


def render(issues: Sequence[Issue], *, noun: str = "error", done: str = NOTHING_DONE) -> str:
    """All issues in the order given, then their number and what was done; readable without colour."""
    count = f"{len(issues)} {noun}{'' if len(issues) == 1 else 's'}"
    ending = f"{count}; {done}" if noun == "error" else count
    return "\n".join([*(render_one(issue) for issue in issues), ending])


def render_one(issue: Issue) -> str:
    """One issue, of one to five lines."""
    place = f"{issue.file}:{issue.line}" if issue.line else issue.file
    lines = [": ".join(part for part in (place, dotted(issue.path), issue.message) if part)]
    if issue.line and issue.snippet:
        lines.append(f"    {issue.line} | {issue.snippet.rstrip()}")
    facts = [f"given: {issue.given}"] if issue.given else []
    facts += [f"allowed: {issue.allowed}"] if issue.allowed else []
    if facts:
        lines.append("  " + "    ".join(facts))
    if issue.hint:
        lines.append(f"  hint: {issue.hint}")
    return "\n".join(_printable(line) for line in lines)


def _printable(line: str) -> str:
    """What a terminal would obey rather than show, as an escape."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in line)
