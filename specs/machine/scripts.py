"""Interpreters of scripts, named in their first lines: `#!/bin/sh`, `#!/usr/bin/env NAME`."""

import os
import shlex
import shutil
from contextlib import suppress
from pathlib import Path

from specs.errors import Issue, IssueError

_READ_BYTES = 256
"""Number of bytes of a script that the kernel reads for the first line."""


def interpreters(program: str, search: str) -> list[str]:
    """Returns the paths of the programs that run a script: its interpreter, the program that `env` starts, and their
    interpreters if these are scripts too. Empty for a program that is not a script.

    Args:
        program: absolute path of the program.
        search: the PATH that `env` searches.
    Raises:
        IssueError: one of them is not on this machine. The path of the issue is empty.
    """
    found: list[str] = []
    scripts = [program]
    while scripts:
        named = _named(scripts.pop(), search)
        new = [each for each in named if each not in found]
        found += new
        scripts += new
    return found


def _named(script: str, search: str) -> list[str]:
    """Returns the programs that a script's first line names: an interpreter, and the program that `env` starts."""
    line = _first_line(script)
    if line is None:
        return []
    interpreter, _, argument = line.replace("\t", " ").strip(" ").partition(" ")
    if not os.path.isabs(interpreter) or not _may_run(interpreter):
        raise _absent(script, line, interpreter, "the absolute path of a program on this machine")
    name = _begun_by_env(argument.strip(" ")) if os.path.basename(interpreter) == "env" else ""
    if not name:
        return [interpreter]
    begun = shutil.which(name, path=search)
    if not begun:
        raise _absent(script, line, name, f"a program on the PATH that env searches: {search}")
    return [interpreter, os.path.abspath(begun)]


def _first_line(script: str) -> str | None:
    """Returns the text after `#!`; None if the program is not a script, or cannot be read."""
    with suppress(OSError), Path(script).open("rb") as file:
        start = file.read(_READ_BYTES)
        if start.startswith(b"#!"):
            return start[2:].split(b"\n")[0].decode(errors="replace")
    return None


def _begun_by_env(argument: str) -> str:
    """Returns the name of the program that `env` starts; empty if its options leave that open."""
    words = [argument]
    for option in ("-S", "--split-string="):
        if argument.startswith(option):
            with suppress(ValueError):  # an unclosed quotation, at which env fails too
                words = shlex.split(argument.removeprefix(option))
    name = next((word for word in words if "=" not in word), "")
    is_open = name.startswith("-") or any(word.startswith("PATH=") or "$" in word or "\\" in word for word in words)
    return "" if is_open else name


def _may_run(path: str) -> bool:
    return os.path.isfile(path) and os.access(path, os.X_OK)


def _absent(script: str, line: str, name: str, allowed: str) -> IssueError:
    if line.endswith("\r"):
        hint = "save the script with the line ends of Unix: the carriage return at the end counts as part of the name"
    elif " " in name:
        hint = f"env takes the rest of the line as one name; write #!/usr/bin/env -S {name}"
    else:
        hint = "install it, fix the script's first line, or write the interpreter before the script in the command"
    shown = f"{script} begins with #!{line}".replace("\r", "\\r")
    return IssueError(Issue("the script's interpreter is not on this machine", (), shown, allowed, hint=hint))
