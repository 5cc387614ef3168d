"""Ends a stalled stage, in which no process makes progress any more, and prints the stacks of its ranks to the log.

A rank that waits for others cannot tell a deadlock from a long answer that another one samples. But the processes of a
stage together always report progress: a token, a pass, a score, a part of a checkpoint, an exchange. Each report sets
the time of one file in the stage's directory, and each rank watches that file.
"""

import faulthandler
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from specs.machine.exit_cause import EarlyExit, note_exit

SIGN = "working"
"""Name of the file whose modification time shows progress."""
_VARIABLE = "RPG_SIGN_OF_WORK"
"""Environment variable with the path of that file, for this process and those that it starts."""
_EVERY_SECONDS = 1.0
"""Shortest time in seconds between two updates of the file by one process."""
_LONGEST_LOOK_SECONDS = 30.0
_LOOKS_IN_ALL = 10
_LOOKS_FOR_STACKS = 3
"""Number of checks that a rank waits after it has printed its stacks. In that time the other ranks print theirs: their
file systems may show the file's time later."""

_shown_at = 0.0


def show_work() -> None:
    """Reports that this process makes progress. It may be called at every token."""
    global _shown_at
    now = time.monotonic()
    if now - _shown_at < _EVERY_SECONDS:
        return
    _shown_at = now
    if sign := os.environ.get(_VARIABLE):
        with suppress(OSError):  # a full disk or a lost server ends the run elsewhere, not here
            os.utime(sign)


def variables_to_show_work(directory: Path) -> dict[str, str]:
    """Returns the environment variable for a process that works for a stage but is not started by one of its ranks.

    Args:
        directory: directory of the stage.
    """
    return {_VARIABLE: str(directory / SIGN)}


def watch_for_standstill(directory: Path, seconds: float) -> None:
    """Starts a watch that ends this process, with exit code 1, when no process of the stage has reported progress for
    this long.

    Args:
        directory: directory of the stage, on a file system that all its ranks share.
        seconds: longest time without progress. 0 disables the watch.
    """
    if not seconds:
        return
    (directory / SIGN).touch()
    os.environ.update(variables_to_show_work(directory))
    threading.Thread(target=_watch, args=(directory, seconds), name="standstill", daemon=True).start()


def _watch(directory: Path, seconds: float) -> None:
    look_seconds = min(seconds / _LOOKS_IN_ALL, _LONGEST_LOOK_SECONDS)
    message = f"no rank has worked for {seconds:g} s: no token, pass, score or exchange"
    # Checks are counted, not seconds: a suspended process makes no checks.
    most = round(seconds / look_seconds)
    for still in _looks_without_work(directory / SIGN, look_seconds):
        if still == most:
            rank = os.environ.get("RANK", "0")
            # In one write: all ranks print theirs now, most of them into the same log.
            print(f"rank {rank}: {message} (standstill_seconds); it is here:\n{_stacks()}", file=sys.stderr, flush=True)
        elif still == most + _LOOKS_FOR_STACKS:
            note_exit(directory, EarlyExit("hung", message))
            os._exit(1)


def _looks_without_work(sign: Path, look_seconds: float) -> Iterator[int]:
    """Yields, after each check, the number of consecutive checks that have found the file unchanged."""
    seen, still = 0, 0
    while True:
        time.sleep(look_seconds)
        with suppress(OSError):  # a file that cannot be read counts as unchanged
            shown = sign.stat().st_mtime_ns
            still = still if shown == seen else -1
            seen = shown
        still += 1
        yield still


def _stacks() -> str:
    """Returns the current stack of each thread of this process."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()
