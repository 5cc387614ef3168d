"""Requests to stop running work: a signal to the process that runs the flow, or a file in the run's directory.

This module only notes them. The one place that waits for children (`supervisor.supervise`) reads the note many times a
second, so that no signal handler ends anything itself.
"""

import contextlib
import os
import re
import signal
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from specs.machine.files import now, read_json, write_json

GRACE_SECONDS = 5.0
"""Default seconds between the request and the kill."""

GIVE_BACK_SECONDS = 60.0
"""Seconds between the request and the kill for work that continues later: a step of a large model and its checkpoint
take longer."""
WORKER_GRACE = "RPG_WORKER_GRACE"
"""Environment variable that replaces `GIVE_BACK_SECONDS`; `rpg worker --grace` sets it."""

CANCELLED = "cancelled"
"""Reason of work that was asked to stop by name: `rpg cancel`, the dashboard's button."""
GIVEN_BACK = "given back by a worker that was stopped"


@dataclass(frozen=True, slots=True)
class StopRequest:
    """A request to stop: its reason, and how the work ends."""

    reason: str
    """The reason for the record: `cancelled`, `interrupted by SIGINT`."""
    grace: float
    """Seconds after which processes that still run are killed."""
    whole_command: bool
    """Whether the whole command ends (a signal asked for it), or this run only."""
    status: Literal["cancelled", "pending"] = "cancelled"
    """Recorded status of the run afterwards: pending if it continues later without a new command."""


class Stop:
    """The requests to stop that one command receives. All its runs call `requested`.

    Args:
        gives_back: SIGTERM, with which service managers stop a worker, and SIGHUP, from its terminal, give the run back
            to the queue. SIGINT still cancels it.
        grace: seconds that SIGTERM and SIGHUP leave before the kill.
    """

    def __init__(self, *, gives_back: bool = False, grace: float = GRACE_SECONDS) -> None:
        self._signal: signal.Signals | None = None
        self._gives_back = gives_back
        self._grace = grace

    @property
    def signalled(self) -> signal.Signals | None:
        """The first signal that was noted."""
        return self._signal

    def requested(self, run_directory: Path | None = None) -> StopRequest | None:
        """Returns the request that is in force now, if any.

        Args:
            run_directory: the directory of the calling run; without one, only signals count.
        """
        is_ended = self._signal in (signal.SIGTERM, signal.SIGHUP)
        gives_back = is_ended and self._gives_back
        if self._signal is not None and not gives_back:
            grace = self._grace if is_ended else GRACE_SECONDS
            return StopRequest(f"interrupted by {self._signal.name}", grace, whole_command=True)
        # Before a give-back: no other worker may begin a run that is to be cancelled.
        if run_directory is not None and (request := read_json(run_directory / "cancel.json")):
            return StopRequest(CANCELLED, float(request.get("grace", GRACE_SECONDS)), whole_command=gives_back)
        if gives_back:
            return StopRequest(GIVEN_BACK, self._grace, whole_command=True, status="pending")
        return None

    @property
    def noted(self) -> signal.Signals | None:
        """The signal that was noted, if one was."""
        return self._signal

    def note(self, number: int, _frame: FrameType | None = None) -> None:
        """Handles a signal. Notes the first one; raises KeyboardInterrupt at the second.

        SIGHUP means that the terminal is gone. Output to it is dropped, and the shell sends the signal again when it
        ends.
        """
        if number == signal.SIGHUP:
            _leave_terminal()
        elif self._signal is not None:
            raise KeyboardInterrupt
        if self._signal is None:
            self._signal = signal.Signals(number)

    @contextlib.contextmanager
    def on_signals(self) -> Iterator[None]:
        """Notes SIGINT, SIGTERM and SIGHUP within the block; a SIGHUP that `nohup` ignores stays ignored. Main thread
        only.

        The flow enters it again, since Prefect sets its own handlers there.
        """
        is_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        numbers = (signal.SIGINT, signal.SIGTERM, *(() if is_nohup else (signal.SIGHUP,)))
        before: dict[signal.Signals, Any] = {number: signal.signal(number, self.note) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _leave_terminal() -> None:
    """Discards this process's output to its terminal from now on, because writing to a terminal that is gone is an
    error."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        if stat.S_ISCHR(os.fstat(stream).st_mode):  # isatty() is false for a terminal that is gone
            os.dup2(nowhere, stream)
    os.close(nowhere)


def give_back_grace() -> float:
    """Returns the seconds between the request and the kill of work that continues later."""
    return float(os.environ.get(WORKER_GRACE, GIVE_BACK_SECONDS))


def cancel_message(grace: float) -> str:
    """Returns the message that `rpg cancel` puts into the state of a flow run that it cancels on the server."""
    return f"rpg cancel --grace {grace}"


def cancel_grace(message: str | None) -> float:
    """Returns the seconds in `cancel_message`; the default for any other message, such as that of the dashboard's
    button."""
    chosen = re.fullmatch(r"rpg cancel --grace ([0-9]+\.[0-9]+)", message or "")
    return float(chosen[1]) if chosen else GRACE_SECONDS


def request_cancel(directory: Path, grace: float, run_ids: Sequence[str] = ()) -> None:
    """Asks a run to stop: writes cancel.json, which the run's flow reads.

    Args:
        directory: the run's directory; or an experiment's, so that a command that executes its runs begins no other.
        grace: seconds after which processes that still run are killed.
        run_ids: for an experiment, the runs to stop: those of one of its versions; empty means all.
    """
    write_json(directory / "cancel.json", {"grace": grace, "requested_at": now(), "runs": list(run_ids)})


def is_cancelled(directory: Path, run_ids: Iterable[str] = ()) -> bool:
    """Returns whether the directory of a run or an experiment has a request.

    Args:
        run_ids: for an experiment, the runs that the caller executes: a request only for other runs does not count.
    """
    path = directory / "cancel.json"
    meant = read_json(path).get("runs") or ()
    return path.exists() and (not meant or not set(meant).isdisjoint(run_ids))


def clear_request(directory: Path) -> None:
    """Removes the request. It applies to the current execution, never to the next one."""
    (directory / "cancel.json").unlink(missing_ok=True)
