"""A program that is a command, in a process of its own."""

import json
import shutil
import subprocess
import sys
import tempfile
from typing import IO

from pydantic import Field

from rpg.rollouters.agent import AgentProgram, Running
from rpg.sandbox import Confined, Limits, start
from rpg.types import Problem
from specs.errors import Issue
from specs.schema.base import execution, names_path

_LIMITS = Limits(memory_bytes=1 << 40, processes=0, file_bytes=1 << 40, open_files=4096)
"""The program is its user's own code, and may do what its user may."""
_MOST_OF_AN_ERROR = 500
"""Characters of what a program wrote last on standard error, that say why it failed."""


class Command(AgentProgram):
    """A command. It finds the endpoint in OPENAI_BASE_URL and OPENAI_API_KEY, where clients of OpenAI's interface look
    by themselves, and the problem on standard input: JSON with `question`, `messages` and `metadata`. What it writes on
    standard output is what it returns. It is not sealed: it may do what its user may."""

    command: tuple[str, ...] = Field(min_length=1)
    """Program and arguments. `python` is the interpreter of the run; {question} stands for the question's text, {file}
    for `file`."""
    file: str = names_path("file", "")
    """A file of the program, relative to the spec. Its content is in the fingerprint."""
    environment: tuple[str, ...] = execution(())
    """Names of environment variables that it may read, beside those of its user's home and languages."""

    @property
    def _program(self) -> str | None:
        """Path of the program; None: there is none."""
        first = self.command[0]
        return sys.executable if first == "python" else shutil.which(first.replace("{file}", self.file))

    def lacks(self) -> Issue | None:
        """See ProgramSection."""
        if self._program:
            return None
        hint = "write its whole path, or put it on the PATH of this machine"
        return Issue("no such program", ("command", 0), given=self.command[0], hint=hint)

    def begin(self, problem: Problem, base_url: str, api_key: str) -> Running:
        """See AgentProgram."""
        question = problem.question_text
        words = [word.replace("{file}", self.file).replace("{question}", question) for word in self.command]
        words[0] = self._program or words[0]
        asked = {"question": question, "messages": problem.conversation(), "metadata": problem.metadata}
        return _Process(words, json.dumps(asked), {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key}, self)


class _Process:
    """The command under way."""

    def __init__(self, words: list[str], asked: str, settings: dict[str, str], options: Command) -> None:
        self._complaints: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (`result` closes it)
        with tempfile.TemporaryFile() as given:
            given.write(asked.encode())
            given.seek(0)
            self._confined: Confined = start(
                words,
                sealed=False,
                limits=_LIMITS,
                variables=options.environment,
                settings=settings,
                stdin=given,
                stdout=subprocess.PIPE,
                stderr=self._complaints,
            )

    def result(self) -> str | None:
        """See Running."""
        with self._complaints:
            try:
                written = self._confined.stdout.read()
            except ValueError:  # it was ended meanwhile
                written = b""
            ending = self._confined.ending(60.0)
            self._complaints.seek(0)
            complaints = self._complaints.read().decode(errors="replace").strip()
        if ending != "exit 0":
            raise RuntimeError(f"{ending}: {complaints[-_MOST_OF_AN_ERROR:]}" if complaints else ending)
        return written.decode(errors="replace").strip()

    def end(self) -> None:
        """See Running."""
        self._confined.end()
