"""Timestamps at the beginning of each line that a process prints to a log."""

import io
import os
import re
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TextIO

TIMED = "RPG_TIMED_OUTPUT"
"""Environment variable of a process whose output goes into a log."""
_TIME = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ")


def time_output() -> None:
    """Puts the time (UTC) before each line that Python prints from now on, if the output goes to a log."""
    if os.environ.get(TIMED):
        sys.stdout, sys.stderr = TimedOutput(sys.stdout), TimedOutput(sys.stderr)


def without_time(line: str) -> str:
    """Returns a line of a log without its time."""
    return _TIME.sub("", line)


class TimedOutput(io.TextIOWrapper):
    """A stream that writes at once to another stream's file, with the time before each line."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream.buffer, encoding="utf-8", errors="backslashreplace", write_through=True)
        self._in_line = False

    def write(self, text: str) -> int:
        """See TextIOWrapper."""
        super().write("".join(self._timed(text)))
        return len(text)

    def _timed(self, text: str) -> Iterator[str]:
        now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S ")
        for line in text.splitlines(keepends=True):
            yield line if self._in_line or not line.strip() else now + line
            self._in_line = not line.endswith(("\n", "\r"))
