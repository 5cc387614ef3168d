"""How work under way is told to stop: a signal to the process that runs the flow, or a request in the run's directory.

Both are only noted here. The one place that waits for children (`supervisor.supervise`) looks at the note many times a
second, so that nothing is torn down from inside a signal handler.
"""

import contextlib
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from pipelines.home import Home
from pipelines.state import read_json, write_json
from rpg.files import now

GRACE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class StopRequest:
    """Why and how the work is to end."""

    reason: str
    """For the record: `cancelled`, `interrupted by SIGINT`."""
    grace: float
    """Seconds after which what still runs is killed."""
    whole_command: bool
    """Whether the command ends with it (a signal), or this run only."""


class Stop:
    """Whether to stop. One per command; each run asks through `requested`."""

    def __init__(self) -> None:
        self._signal: signal.Signals | None = None

    def requested(self, run_directory: Path | None = None) -> StopRequest | None:
        """The request that applies now, if any."""
        if self._signal is not None:
            return StopRequest(f"interrupted by {self._signal.name}", GRACE_SECONDS, whole_command=True)
        if run_directory is not None and (request := read_json(run_directory / "cancel.json")):
            return StopRequest("cancelled", float(request.get("grace", GRACE_SECONDS)), whole_command=False)
        return None

    def note(self, number: int, _frame: FrameType | None = None) -> None:
        """The signal handler: the first signal is noted, a second one interrupts at once."""
        if self._signal is not None:
            raise KeyboardInterrupt
        self._signal = signal.Signals(number)

    @contextlib.contextmanager
    def on_signals(self) -> Iterator[None]:
        """Notes SIGINT and SIGTERM meanwhile. Main thread only; entered anew where Prefect set a handler of its own."""
        numbers = (signal.SIGINT, signal.SIGTERM)
        before: dict[signal.Signals, Any] = {number: signal.signal(number, self.note) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def request_cancel(home: Home, run_id: str, grace: float) -> None:
    """Leaves the request where the run's flow looks for it."""
    write_json(home.run(run_id) / "cancel.json", {"grace": grace, "requested_at": now()})


def clear_request(home: Home, run_id: str) -> None:
    """A request is for the execution it met, never for the next one."""
    (home.run(run_id) / "cancel.json").unlink(missing_ok=True)
