"""How running work is asked to stop: by a signal to the process that runs the flow, or a file in the run's directory.

Both are only noted here. The one place that waits for children (`supervisor.supervise`) asks for the note many times a
second, so that nothing is torn down from inside a signal handler.
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
"""Between the request and the kill, where nobody chose another grace."""

GIVE_BACK_SECONDS = 60.0
"""Seconds between the request and the kill where the work is to go on later: a step of a large model and its checkpoint
take longer."""
WORKER_GRACE = "RPG_WORKER_GRACE"
"""Environment variable with other seconds than `GIVE_BACK_SECONDS`; `rpg worker --grace`."""

CANCELLED = "cancelled"
"""Why work stops that somebody asked to stop by name: `rpg cancel`, the dashboard's button."""
GIVEN_BACK = "given back by a worker that was stopped"


@dataclass(frozen=True, slots=True)
class StopRequest:
    """Why and how the work is to end."""

    reason: str
    """For the record: `cancelled`, `interrupted by SIGINT`."""
    grace: float
    """Seconds after which what still runs is killed."""
    whole_command: bool
    """Whether the whole command ends (a signal asked for it), or this run only."""
    status: Literal["cancelled", "pending"] = "cancelled"
    """What the run is on record afterwards: pending where it is to go on without being asked to."""


class Stop:
    """Knows whether to stop. One for each command; every run of it asks through `requested`.

    Args:
        gives_back: SIGTERM, by which whoever starts and ends services stops a worker, and SIGHUP, of its terminal, give
            the run back to the queue. SIGINT cancels it all the same.
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
        """Returns the request that holds now, if there is one.

        Args:
            run_directory: of the run that asks; without one, only signals count.
        """
        is_ended = self._signal in (signal.SIGTERM, signal.SIGHUP)
        gives_back = is_ended and self._gives_back
        if self._signal is not None and not gives_back:
            grace = self._grace if is_ended else GRACE_SECONDS
            return StopRequest(f"interrupted by {self._signal.name}", grace, whole_command=True)
        # Before a give-back: a run that is to be cancelled must not be begun again by another worker.
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
        """The signal handler: the first signal is noted, a second one raises KeyboardInterrupt at once.

        SIGHUP says that the terminal is gone. What was to be shown on it is dropped, and the shell that ends sends the
        signal again.
        """
        if number == signal.SIGHUP:
            _leave_terminal()
        elif self._signal is not None:
            raise KeyboardInterrupt
        if self._signal is None:
            self._signal = signal.Signals(number)

    @contextlib.contextmanager
    def on_signals(self) -> Iterator[None]:
        """Within the block SIGINT, SIGTERM and SIGHUP are noted; a SIGHUP that `nohup` has set aside stays so. Main
        thread only.

        Entered again inside the flow, as Prefect sets handlers of its own there.
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
    """From now on what this process writes to its terminal goes nowhere: to write to one that is gone is an error."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        if stat.S_ISCHR(os.fstat(stream).st_mode):  # isatty() no longer knows a terminal that is gone
            os.dup2(nowhere, stream)
    os.close(nowhere)


def give_back_grace() -> float:
    """Seconds between the request and the kill of work that is to go on later."""
    return float(os.environ.get(WORKER_GRACE, GIVE_BACK_SECONDS))


def cancel_message(grace: float) -> str:
    """Message of `rpg cancel` in the state of a flow run that it cancels on the server."""
    return f"rpg cancel --grace {grace}"


def cancel_grace(message: str | None) -> float:
    """Returns the seconds in `cancel_message`; the usual ones in any other message, as of the dashboard's button."""
    chosen = re.fullmatch(r"rpg cancel --grace ([0-9]+\.[0-9]+)", message or "")
    return float(chosen[1]) if chosen else GRACE_SECONDS


def request_cancel(directory: Path, grace: float, run_ids: Sequence[str] = ()) -> None:
    """Asks a run to stop: leaves cancel.json where the run's flow looks for it.

    Args:
        directory: the run's; or an experiment's, for a command that goes through its runs, to begin no other.
        grace: seconds after which what still runs is killed.
        run_ids: of an experiment, the runs that are meant: those of one of its versions; none: all.
    """
    write_json(directory / "cancel.json", {"grace": grace, "requested_at": now(), "runs": list(run_ids)})


def is_cancelled(directory: Path, run_ids: Iterable[str] = ()) -> bool:
    """Returns whether a request lies in the directory of a run or an experiment.

    Args:
        run_ids: of an experiment, the runs that the caller goes through: one for others alone does not count.
    """
    path = directory / "cancel.json"
    meant = read_json(path).get("runs") or ()
    return path.exists() and (not meant or not set(meant).isdisjoint(run_ids))


def clear_request(directory: Path) -> None:
    """Removes the request: it is for the execution that it met, never for the next one."""
    (directory / "cancel.json").unlink(missing_ok=True)
