"""Logs without secrets: a process's output, and Python's log records, which Prefect sends to its server."""

import logging
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from specs.secrets import HIDDEN, hide, secrets_in

_DRAIN_SECONDS = 5.0
"""Seconds that the log stays open after a process has ended if another process still holds its output open."""


@contextmanager
def redacted_log(log: Path, environment: Mapping[str, str]) -> Iterator[BinaryIO]:
    """Yields a file for a process's stdout or stderr. The log gets the output without the environment's secrets.

    At the end of the block the log holds the whole output, so leave the block when the process has ended. If there is
    no secret to hide, the file is the log itself; else it is a pipe, which a thread of this process copies into the
    log.

    Args:
        environment: environment of the process.
    """
    with open(log, "ab", buffering=0) as file:
        secrets = [secret.encode() for secret in secrets_in(environment)]
        if not secrets:
            yield file
            return
        out, into = os.pipe()
        copier = threading.Thread(
            target=_copy, args=(out, os.dup(file.fileno()), secrets), daemon=True, name=f"log {log.name}"
        )
        copier.start()
        try:
            with open(into, "wb", buffering=0) as pipe:
                yield pipe
        finally:
            copier.join(_DRAIN_SECONDS)


def _copy(out: int, log: int, secrets: Sequence[bytes]) -> None:
    """Copies a pipe to the log until all its writers are gone, then closes both. A writer may outlive the block."""
    rest = b""
    try:
        while part := os.read(out, 1 << 16):
            hidden = _hide(rest + part, secrets)
            held = _begun(hidden, secrets)
            rest = hidden[len(hidden) - held :]
            _write(log, hidden[: len(hidden) - held])
        _write(log, rest)
    finally:
        os.close(out)
        os.close(log)


def _write(log: int, data: bytes) -> None:
    """Writes to the log. If that fails because the disk is full, the logged process can still continue."""
    try:
        while data:
            data = data[os.write(log, data) :]
    except OSError:
        return


def _hide(data: bytes, secrets: Sequence[bytes]) -> bytes:
    for secret in secrets:
        data = data.replace(secret, HIDDEN.encode())
    return data


def _begun(data: bytes, secrets: Sequence[bytes]) -> int:
    """Returns the number of bytes at the end that may be the beginning of a secret, which the next part would
    complete."""
    longest = min(len(data), max(map(len, secrets)) - 1)
    for size in range(longest, 0, -1):
        if any(secret.startswith(data[-size:]) for secret in secrets):
            return size
    return 0


class _RedactedRecord(logging.LogRecord):
    """A record of Python's logging whose message and traceback contain no secret of this process."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.exc_info:
            self.exc_text = hide(logging.Formatter().formatException(self.exc_info))

    def getMessage(self) -> str:  # noqa: N802
        """Returns the message with its arguments filled in."""
        return hide(super().getMessage())


def redact_log_records() -> None:
    """Removes this process's secrets from all later log records, in every handler."""
    logging.setLogRecordFactory(_RedactedRecord)
