"""An agent's program that is a command in its own process."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from pydantic import Field

from rpg import sandbox
from rpg.rollouters.agent import AgentProgram, Running
from rpg.rollouters.endpoint import endpoint
from rpg.sandbox import SYSTEM_PATH, Confined, Limits, start
from rpg.types import Problem
from specs.errors import Issue, IssueError
from specs.machine.proxies import EXCEPTIONS
from specs.machine.scripts import interpreters
from specs.schema.base import execution, names_path

_LIMITS = Limits(memory_bytes=1 << 40, processes=0, file_bytes=1 << 40, open_files=4096)
"""Limits of a program outside the sandbox, which has all rights of its user."""
_PROCESSES = 4096
"""Largest number of processes and threads of sandboxed programs. As root this counts all programs of a machine
together, because they run as one user."""
_SEALED_FILE_BYTES = 64 << 20
_TRIES = """
import os, sys
run, *paths = sys.argv[1:]
ways = [os.X_OK] * int(run) + [os.R_OK] * len(paths)
print(next((n for n, path in enumerate(paths) if not os.access(path, ways[n])), ""), end="")
"""
"""Program that prints the index of the first path that a sandboxed process cannot execute or read. Its first argument
is the number of paths to execute, which come first."""
_MOST_WRITTEN = 16 << 20
"""Largest number of bytes that a program may write to standard output."""
_MOST_OF_AN_ERROR = 500
"""Number of characters at the end of a program's standard error that are shown as the reason for its failure."""


class Command(AgentProgram):
    """A command. It gets the endpoint in OPENAI_BASE_URL and OPENAI_API_KEY, which OpenAI clients read by default, and
    the problem on standard input: JSON with `question`, `messages` and `metadata`, without answers and hidden tests.
    Its standard output is its return value. It runs in the sandbox, from which it can reach only the endpoint."""

    command: tuple[str, ...] = Field(min_length=1)
    """Program and arguments. `python` is the run's interpreter; {question} stands for the question's text, {file} for
    `file`."""
    file: str = names_path("file", "")
    """Path of the program's file, relative to the spec. Its content is part of the fingerprint."""
    sealed: bool = execution(True)
    """Whether it runs in the sandbox, which needs bubblewrap. There it can reach only the endpoint, read Python, its
    packages and the system's programs, and write its own /tmp. With false, it has its user's rights."""
    readable: tuple[str, ...] = execution(())
    """Absolute paths of further files and directories that it may read in the sandbox."""
    memory_gib: float = execution(8.0, gt=0)
    """Address space in GiB of each of its processes in the sandbox."""
    environment: tuple[str, ...] = execution(())
    """Names of environment variables that it may read, in addition to those of the locale; outside the sandbox, also in
    addition to its user's variables."""

    @property
    def _program(self) -> str | None:
        """Returns the path of the program; None if it is not found."""
        first = self.command[0]
        if first == "python":
            return sys.executable
        found = shutil.which(first.replace("{file}", self._whole_file))
        return found and os.path.abspath(found)

    @property
    def _whole_file(self) -> str:
        """Returns the real path of `file`; empty if no file is given."""
        return str(Path(self.file).resolve()) if self.file else ""

    @property
    def _shown(self) -> list[Path]:
        """Returns the paths that a sandboxed program can see."""
        return [Path(path) for path in (*self.readable, self._whole_file) if path]

    def lacks(self) -> Issue | None:
        """See ProgramSection."""
        if self.sealed and (lack := sandbox.missing()):
            hint = f"{lack.hint}; or write sealed: false: it then has the rights of the run's user"
            return Issue(f"a program starts only in a sandbox: {lack.reason}", ("type",), self.type, hint=hint)
        for number, path in enumerate(self.readable):
            if not Path(path).is_absolute() or not Path(path).exists():
                return Issue("no such path", ("readable", number), path, "an absolute path on this machine")
        if not self._program:
            hint = "write its whole path, or put it on the PATH of this machine"
            return Issue("no such program", ("command", 0), given=self.command[0], hint=hint)
        found = SYSTEM_PATH if self.sealed and "PATH" not in self.environment else os.environ.get("PATH", os.defpath)
        try:
            programs = [self._program, *interpreters(self._program, found)]
        except IssueError as error:
            return replace(error.issue, path=("command", 0))
        return self._unseen(programs) if self.sealed else None

    def _unseen(self, programs: list[str]) -> Issue | None:
        """Returns an issue if the sandbox hides a file that the command needs. Tests this inside the sandbox.

        Args:
            programs: paths of the command's program and of its interpreters.
        """
        named: list[tuple[tuple[str | int, ...], str]] = [(("command", 0), program) for program in programs]
        named += [(("file",), self._whole_file)] if self.file else []
        named += [(("readable", number), path) for number, path in enumerate(self.readable)]
        tried = start(
            [sys.executable, "-I", "-S", "-c", _TRIES, str(len(programs)), *(path for _, path in named)],
            sealed=True,
            hides=True,
            readable=self._shown,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        refused = tried.stdout.read().decode()
        tried.end()
        if not refused.isdecimal():
            return None
        place, path = named[int(refused)]
        hint = "list its directory, and the targets of its links, in readable"
        if os.geteuid() == 0:
            hint += "; a run of root's has its programs be another user: let others read it (chmod o+rX)"
        return Issue("a program in the sandbox cannot read it", place, path, hint=hint)

    def begin(self, problem: Problem, base_url: str, api_key: str) -> Running:
        """See AgentProgram."""
        question = problem.question_text
        words = [word.replace("{file}", self._whole_file).replace("{question}", question) for word in self.command]
        words[0] = self._program or words[0]
        asked = {"question": question, "messages": problem.conversation(), "metadata": problem.metadata}
        direct = {name: os.environ[name] for name in EXCEPTIONS if name in os.environ}
        settings = {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key, **direct}
        return _Process(words, json.dumps(asked), settings, self)

    def start(self, words: list[str], settings: dict[str, str], **pipes: Any) -> Confined:
        """Starts the process of a program with these environment variables."""
        if not self.sealed:
            return start(words, sealed=False, limits=_LIMITS, variables=self.environment, settings=settings, **pipes)
        named = {name: os.environ[name] for name in self.environment if name in os.environ}
        at = endpoint()
        return start(
            words,
            sealed=True,
            hides=True,
            limits=Limits(
                memory_bytes=int(self.memory_gib * 2**30),
                processes=_PROCESSES,
                file_bytes=_SEALED_FILE_BYTES,
                open_files=4096,
            ),
            readable=self._shown,
            settings={"HOME": "/tmp", **named, **settings},
            door=(at.unix_socket(), at.port),
            **pipes,
        )


class _Process:
    """The running command."""

    def __init__(self, words: list[str], asked: str, settings: dict[str, str], options: Command) -> None:
        self._complaints: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (`result` closes it)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._complaints}
        self._confined = options.start(words, settings, **pipes)
        # In a file: a pipe holds only 64 KiB, and a program may never read it.
        threading.Thread(target=self._give, args=(asked.encode(),), name="an agent's input", daemon=True).start()

    def _give(self, asked: bytes) -> None:
        """Writes the program's input and closes it."""
        with suppress(OSError, ValueError), self._confined.stdin as pipe:  # it has ended, or was ended in the meantime
            pipe.write(asked)

    def result(self) -> str | None:
        """See Running."""
        with self._complaints:
            try:
                written = self._confined.stdout.read(_MOST_WRITTEN + 1)
            except ValueError:  # it was ended in the meantime
                written = b""
            if len(written) > _MOST_WRITTEN:
                self._confined.end()
                raise RuntimeError(f"it wrote more than {_MOST_WRITTEN >> 20} MiB")
            ending = self._confined.ending(60.0)
            length = self._complaints.seek(0, os.SEEK_END)
            self._complaints.seek(max(0, length - 4 * _MOST_OF_AN_ERROR))  # a character has at most 4 bytes
            complaints = self._complaints.read().decode(errors="replace").strip()
        if ending != "exit 0":
            raise RuntimeError(f"{ending}: {complaints[-_MOST_OF_AN_ERROR:]}" if complaints else ending)
        return written.decode(errors="replace").strip()

    def end(self) -> None:
        """See Running."""
        self._confined.end()
