"""Shortening of logs: an outage becomes one line.

`python -m pipelines.prefect.server.outage_log MODULE ARGUMENT...` runs a module with such logs.

While its database, Redis or the API is unreachable, each part of a Prefect server, and each worker, logs a traceback of
a hundred lines every few seconds. Any other error keeps its traceback.
"""

import errno
import logging
import os
import re
import runpy
import socket
import sys
import threading
import time
import traceback
from types import TracebackType
from typing import Any

from specs.machine.foreign.listeners import guard_connections

_QUIET_SECONDS = 60.0
"""Seconds for which a logged outage is not logged again."""
_OUTAGES = (ConnectionError, TimeoutError, socket.gaierror, EOFError)
_UNREACHED = {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN}
"""Error numbers of a plain OSError that mean an unreachable network."""
_SEVERAL = "Multiple exceptions: "
"""Prefix of the message of asyncio's plain OSError if none of a host's addresses answers."""
_LIBRARIES = ("redis", "sqlalchemy", "asyncpg", "httpx", "httpcore", "websockets")
"""Libraries whose errors count as outages."""
_BY_NAME = rf"(?:\w*(?:Connection|Timeout)\w*Error|(?:socket\.)?gaierror|EOFError|OSError: {_SEVERAL}|asyncio\.)"
_IN_TEXT = re.compile(rf"^(?:{_BY_NAME}|(?:{'|'.join(_LIBRARIES)})\.)", re.MULTILINE)
"""Pattern of the last line of a traceback that was logged as text."""
_TRACEBACK = "Traceback (most recent call last)"


class _Outages:
    """Filter that shortens the log record of an outage to one line, and lets it pass once a minute."""

    def __init__(self) -> None:
        self._passed: dict[str, float] = {}
        self._held: dict[str, int] = {}
        self._lock = threading.Lock()

    def passes(self, record: logging.LogRecord) -> bool:
        """Returns whether the record is to be logged. May shorten the record."""
        words = _outage_of(record)
        if not words:
            return True
        now = time.monotonic()
        with self._lock:
            if now - self._passed.get(words, -_QUIET_SECONDS) < _QUIET_SECONDS:
                self._held[words] = self._held.get(words, 0) + 1
                return False
            self._passed[words] = now
            held = self._held.pop(words, 0)
        first = record.getMessage().partition("\n")[0].partition(_TRACEBACK)[0].strip().rstrip(":")
        again = f" ({held} more within the last minutes)" if held else ""
        record.msg, record.args = f"{first}: {words}{again}", None
        record.exc_info = record.exc_text = record.stack_info = None
        return True


def install() -> None:
    """Shortens outages to one line in every logger of this process, and in errors that end the process or a thread."""
    outages, handle = _Outages(), logging.Logger.handle

    def handle_tersely(self: logging.Logger, record: logging.LogRecord) -> None:
        if outages.passes(record):
            handle(self, record)

    logging.Logger.handle = handle_tersely  # type: ignore[method-assign]
    hook = sys.excepthook

    def end_tersely(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if words := _words(error):
            print(words, file=sys.stderr)
        else:
            hook(kind, error, trace)

    def print_tersely(*arguments: Any, **options: Any) -> None:
        if words := _words(error) if (error := sys.exc_info()[1]) else "":
            print(words, file=sys.stderr)
        else:
            whole(*arguments, **options)

    sys.excepthook = end_tersely
    whole, traceback.print_exc = traceback.print_exc, print_tersely  # with which Prefect's commands end


def _outage_of(record: logging.LogRecord) -> str:
    """Returns the outage that a log record reports, in one line; empty if it reports none."""
    if record.exc_info and record.exc_info[1]:
        return _words(record.exc_info[1])
    text = record.getMessage()
    if _TRACEBACK in text and (found := list(_IN_TEXT.finditer(text))):
        return text[found[-1].start() :].partition("\n")[0]
    return ""


def _words(error: BaseException) -> str:
    """Returns an outage, or the outage that caused an error, in one line; empty for another error."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    cause: BaseException | None = error
    while cause is not None:
        if _is_outage(cause):
            return f"{type(error).__name__}: {error}".partition("\n")[0].removesuffix(": ")
        # An error raised while another was handled may be an independent fault: only `from` rules that out.
        cause = cause.__cause__
    return ""


def _is_outage(error: BaseException) -> bool:
    if isinstance(error, _OUTAGES):
        return True
    if isinstance(error, OSError) and (error.errno in _UNREACHED or str(error).startswith(_SEVERAL)):
        return True
    kinds = type(error).__mro__
    return any(
        kind.__module__.partition(".")[0] in _LIBRARIES or kind.__name__.startswith("WebSocketDisconnect")
        for kind in kinds
    )


def main() -> None:
    """Runs the module that the arguments name, as `python -m` does."""
    install()
    guard_connections(os.environ.get("PREFECT_API_URL", ""))
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
