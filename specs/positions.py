"""Where each key of a spec stands, so that a problem can name its line."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from specs.errors import Problem

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
