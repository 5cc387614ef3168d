"""Errors in what the user gave: an issue, its place in a file, how it reads, and the exceptions that carry it.

These exceptions are a user's to cause. Each is shown as it stands, without a traceback, and ends with exit code 2.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path as FilePath
from typing import Any

from specs.bounds import MAX_ISSUES, MAX_TOLD

Path = tuple[str | int, ...]
"""Into a spec: ("data", "train", 0, "size")."""


@dataclass(frozen=True)
class Issue:
    """One thing wrong with what the user gave."""

    message: str
    """E.g. `unknown field`, `must be less than 1`."""
    path: Path = ()
    """Into the spec: ("objective", "clip", "low"); empty where it is not about a field."""
    given: str = ""
    allowed: str = ""
    hint: str = ""
    """What to do."""
    file: str = ""
    line: int = 0
    """From 1; 0: unknown."""
    snippet: str = ""
    """That line's text, or what is shown in its place."""
    column: int = 0
    """From 1; 0: unknown. Of the line, or of `within` before the issue is located."""
    within: str = ""
    """The value's text in which `column` is a place; empty once that place in the file is known."""


def read_issue(plain: Mapping[str, Any]) -> Issue:
    """The issue that `dataclasses.asdict` made plain data of."""
    return Issue(**{**plain, "path": tuple(plain["path"])})


@dataclass(frozen=True, slots=True)
class Position:
    """One line of one file."""

    file: str
    """The file as the user named it, or as another file leads to it; `--set ...` for an override."""
    line: int
    """From 1; 0: not a line of a file."""
    snippet: str
    """That line's text."""


Positions = dict[Path, Position]
"""Where each key and list item of a spec stands."""


def plain_positions(positions: Positions) -> list[list[Any]]:
    """The positions as plain data, which `read_positions` reads."""
    return [[list(path), at.file, at.line, at.snippet] for path, at in positions.items()]


def read_positions(plain: Iterable[Sequence[Any]]) -> Positions:
    """The positions that `plain_positions` wrote."""
    return {tuple(path): Position(file, line, snippet) for path, file, line, snippet in plain}


def locate(issue: Issue, positions: Mapping[Path, Position]) -> Issue:
    """The issue with file, line and snippet of its path, or of the nearest ancestor that stands in a file."""
    position = None if issue.file else nearest_position(issue.path, positions)
    return placed(issue, position) if position else issue


def placed(issue: Issue, position: Position) -> Issue:
    """The issue at a position; one within a text at the line and column of its character, where the file holds it."""
    if issue.within and (place := _place_within(issue, position)):
        return place
    return replace(issue, file=position.file, line=position.line, snippet=issue.snippet or position.snippet)


def _place_within(issue: Issue, position: Position) -> Issue | None:
    """The issue at line and column of its character in the file; None where the file does not hold its text.

    YAML folds lines, so that the text is searched for without its blanks, from the line of its key on.
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
    found = "".join(character for _, _, character in places).find("".join(issue.within.split()))
    if found < 0:
        return None
    before = min(len("".join(issue.within[: issue.column - 1].split())), len("".join(issue.within.split())) - 1)
    line, column, _ = places[found + before]
    return replace(issue, file=position.file, line=line, column=column, snippet=lines[line - 1], within="")


def nearest_position(path: Path, positions: Mapping[Path, Position]) -> Position | None:
    """The position of the path, or of the nearest ancestor that has one."""
    ancestors = (path[:length] for length in range(len(path), -1, -1))
    return next((positions[ancestor] for ancestor in ancestors if ancestor in positions), None)


def in_file_order(issues: Iterable[Issue]) -> list[Issue]:
    """Sorts issues by file in order of appearance, then by line; each issue once."""
    distinct = list(dict.fromkeys(issues))
    files = list(dict.fromkeys(issue.file for issue in distinct))
    return sorted(distinct, key=lambda issue: (files.index(issue.file), issue.line))


def dotted(path: Path) -> str:
    """The path as a user writes it: data.train.0.size; a key that has dots itself is put in brackets."""
    text = ""
    for part in path:
        name = str(part) or '""'
        text += f"[{name}]" if "." in name else f".{name}" if text else name
    return text


NOTHING_DONE = "nothing was run"


def render(issues: Sequence[Issue], *, noun: str = "error", done: str = NOTHING_DONE) -> str:
    """All issues in the order given, then their number and what was done; readable without colour."""
    count = f"{len(issues)} {noun}{'' if len(issues) == 1 else 's'}"
    ending = f"{count}; {done}" if noun == "error" else count
    return "\n".join([*(render_one(issue) for issue in issues), ending])


def render_one(issue: Issue) -> str:
    """One issue, of one to five lines."""
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
    """Characters that a terminal obeys instead of showing are written as escapes; a line as long as a file is cut."""
    shown = line if len(line) <= MAX_TOLD else f"{line[:MAX_TOLD]}..."
    shown = " ".join(shown.splitlines()) if "\n" in shown else shown
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in shown)


class IssueError(ValueError):
    """Raised by a validator of the schema. The issue's path is relative to the section that is validated."""

    def __init__(self, issue: Issue) -> None:
        super().__init__(issue.message)
        self.issue = issue


class RpgError(Exception):
    """Error in what the user named. `str()` is the whole message."""


class SpecError(RpgError):
    """One or more issues with a spec, or with the data or model it names, in file order."""

    def __init__(self, *issues: Issue, done: str = NOTHING_DONE) -> None:
        super().__init__(issues)
        self.issues = issues
        self.done = done
        """What had been done before the issues showed, in words."""

    def __str__(self) -> str:
        return "\n".join(render_one(issue) for issue in self.issues)


def refuse(issues: Iterable[Issue], positions: Mapping[Path, Position]) -> None:
    """Raises SpecError with the issues at their places, in file order; does nothing where there is none."""
    if located := in_file_order(locate(issue, positions) for issue in issues):
        raise SpecError(*shortened(located))


def shortened(issues: Sequence[Issue]) -> list[Issue]:
    """The first issues, so many as somebody may read, and that there are more."""
    if len(issues) <= MAX_ISSUES:
        return list(issues)
    more = Issue(f"more is wrong than these {MAX_ISSUES} problems", file=issues[0].file, hint="mend these first")
    return [*issues[:MAX_ISSUES], more]
