"""Errors in the user's input: an issue, its place in a file, its text, and the exceptions that carry it.

Users cause these exceptions. Each is shown without a traceback and ends with exit code 2.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path as FilePath
from typing import Any

from specs.bounds import MAX_ISSUES, MAX_TOLD

Path = tuple[str | int, ...]
"""Path into a spec: ("data", "train", 0, "size")."""


@dataclass(frozen=True)
class Issue:
    """One error in the user's input."""

    message: str
    """The problem, e.g. `unknown field`, `must be less than 1`."""
    path: Path = ()
    """Path into the spec: ("objective", "clip", "low"); empty if the issue is not about a field."""
    given: str = ""
    allowed: str = ""
    hint: str = ""
    """Advice on what to do."""
    file: str = ""
    line: int = 0
    """Line number, from 1; 0 if unknown."""
    snippet: str = ""
    """Text of that line, or a replacement for it."""
    column: int = 0
    """Column, from 1, in the line, or in `within` before the issue is located; 0 if unknown."""
    within: str = ""
    """Text of the value to which `column` refers; empty once the place in the file is known."""


def read_issue(plain: Mapping[str, Any]) -> Issue:
    """Returns the issue from the plain data of `dataclasses.asdict`."""
    return Issue(**{**plain, "path": tuple(plain["path"])})


@dataclass(frozen=True, slots=True)
class Position:
    """One line of one file."""

    file: str
    """Path of the file as the user named it, or as another file refers to it; `--set ...` for an override."""
    line: int
    """Line number, from 1; 0 if it is not in a file."""
    snippet: str
    """Text of that line."""


Positions = dict[Path, Position]
"""Position of each key and list item of a spec."""


def plain_positions(positions: Positions) -> list[list[Any]]:
    """Returns the positions as plain data, which `read_positions` reads."""
    return [[list(path), at.file, at.line, at.snippet] for path, at in positions.items()]


def read_positions(plain: Iterable[Sequence[Any]]) -> Positions:
    """Returns the positions that `plain_positions` wrote."""
    return {tuple(path): Position(file, line, snippet) for path, file, line, snippet in plain}


def locate(issue: Issue, positions: Mapping[Path, Position]) -> Issue:
    """Returns the issue with file, line and snippet of its path, or of the nearest ancestor in a file."""
    position = None if issue.file else nearest_position(issue.path, positions)
    return placed(issue, position) if position else issue


def placed(issue: Issue, position: Position) -> Issue:
    """Returns the issue at a position. An issue within a text gets the line and column of its character, if the file
    contains the text."""
    if issue.within and (place := _place_within(issue, position)):
        return place
    return replace(issue, file=position.file, line=position.line, snippet=issue.snippet or position.snippet)


def _place_within(issue: Issue, position: Position) -> Issue | None:
    """Returns the issue at line and column of its character in the file; None if the file does not contain its text.

    YAML folds lines, so the search ignores white space. It starts at the line of the issue's key.
    """
    try:
        lines = FilePath(position.file).read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError):
        return None
    key = f"{issue.path[-1]}:" if issue.path else ""
    after_key = (position.line, max(lines[position.line - 1].find(key), 0) + len(key))
    places = [
        (number, column, character)
        for number, line in enumerate(lines[position.line - 1 :], position.line)
        for column, character in enumerate(line, 1)
        if not character.isspace() and (number, column) > after_key
    ]
    text = "".join(issue.within.split())
    found = "".join(character for _, _, character in places).find(text)
    if found < 0 or not text:
        return None
    before = min(len("".join(issue.within[: issue.column - 1].split())), len(text) - 1)
    line, column, _ = places[found + before]
    return replace(issue, file=position.file, line=line, column=column, snippet=lines[line - 1], within="")


def nearest_position(path: Path, positions: Mapping[Path, Position]) -> Position | None:
    """Returns the position of the path, or of the nearest ancestor that has one."""
    ancestors = (path[:length] for length in range(len(path), -1, -1))
    return next((positions[ancestor] for ancestor in ancestors if ancestor in positions), None)


def in_file_order(issues: Iterable[Issue]) -> list[Issue]:
    """Returns the distinct issues, sorted by file in order of appearance, then by line."""
    distinct = list(dict.fromkeys(issues))
    files = list(dict.fromkeys(issue.file for issue in distinct))
    return sorted(distinct, key=lambda issue: (files.index(issue.file), issue.line))


def dotted(path: Path) -> str:
    """Returns the path as a user writes it: data.train.0.size; a key with dots is put in brackets."""
    text = ""
    for part in path:
        name = str(part) or '""'
        text += f"[{name}]" if "." in name else f".{name}" if text else name
    return text


NOTHING_DONE = "nothing was run"


def render(issues: Sequence[Issue], *, noun: str = "error", done: str = NOTHING_DONE) -> str:
    """Returns the text of all issues in the given order, then their number and the consequence; readable without
    colour."""
    count = f"{len(issues)} {noun}{'' if len(issues) == 1 else 's'}"
    ending = f"{count}; {done}" if noun == "error" else count
    return "\n".join([*(render_one(issue) for issue in issues), ending])


def render_one(issue: Issue) -> str:
    """Returns the text of one issue, one to five lines."""
    place = ":".join(
        filter(None, [issue.file, *(str(at) for at in (issue.line, not issue.within and issue.column) if at)])
    )
    lines = [": ".join(part for part in (place, dotted(issue.path), issue.message) if part)]
    if issue.line and issue.snippet:
        lines.append(f"    {issue.line} | {issue.snippet.rstrip()}")
    given = f"{issue.given}, at column {issue.column} of the text".removeprefix(", ") if issue.within else issue.given
    facts = [f"given: {given}"] if given else []
    facts += [f"allowed: {issue.allowed}"] if issue.allowed else []
    if facts:
        lines.append("  " + "    ".join(facts))
    if issue.hint:
        lines.append(f"  hint: {issue.hint}")
    return "\n".join(_printable(line) for line in lines)


def _printable(line: str) -> str:
    """Returns a line in which control characters are escaped and that is cut at MAX_TOLD characters."""
    shown = line if len(line) <= MAX_TOLD else f"{line[:MAX_TOLD]}..."
    shown = " ".join(shown.splitlines()) if "\n" in shown else shown
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in shown)


class IssueError(ValueError):
    """Error raised by a validator of the schema. The issue's path is relative to the validated section."""

    def __init__(self, issue: Issue) -> None:
        super().__init__(issue.message)
        self.issue = issue


class RpgError(Exception):
    """Error in the user's input. `str()` is the whole message."""


class SpecError(RpgError):
    """Error with one or more issues of a spec, or of the data or model it names, in file order."""

    def __init__(self, *issues: Issue, done: str = NOTHING_DONE) -> None:
        super().__init__(issues)
        self.issues = issues
        self.done = done
        """Text about the work that was done before the issues appeared."""

    def __str__(self) -> str:
        return "\n".join(render_one(issue) for issue in self.issues)


def refuse(issues: Iterable[Issue], positions: Mapping[Path, Position]) -> None:
    """Raises SpecError with the issues at their places, in file order; does nothing without issues."""
    if located := in_file_order(locate(issue, positions) for issue in issues):
        raise SpecError(*shortened(located))


def shortened(issues: Sequence[Issue]) -> list[Issue]:
    """Returns at most MAX_ISSUES issues, followed by one that says how many more there are."""
    if len(issues) <= MAX_ISSUES:
        return list(issues)
    more = Issue(
        f"there are more problems than these {MAX_ISSUES} problems", file=issues[0].file, hint="fix these first"
    )
    return [*issues[:MAX_ISSUES], more]
