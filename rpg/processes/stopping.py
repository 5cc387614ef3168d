"""Stops a trainer at the end of a step after one of its ranks gets SIGTERM, or a file requests it."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from specs.machine.exit_cause import STOPPED


class StopAfterStep:
    """A listener for SIGTERM, active from its creation. Outside `between_steps_only` a signal ends the process at
    once."""

    def __init__(self) -> None:
        self._received = False
        self._held = False
        signal.signal(signal.SIGTERM, self._receive)

    @property
    def by_signal(self) -> bool:
        """Whether this process got the signal."""
        return self._received

    def _receive(self, _signum: int, _frame: FrameType | None) -> None:
        self._received = True
        if not self._held:
            raise SystemExit(STOPPED)

    @contextmanager
    def between_steps_only(self) -> Iterator[None]:
        """Only records signals within the block. The loop calls `agreed` after each step."""
        self._held = True
        try:
            yield
        finally:
            self._held = False

    def agreed(self, cancel: Path) -> bool:
        """Returns whether the ranks stop now. All ranks call it and get the same answer.

        Args:
            cancel: file that requests the stop; removed once the ranks obey it.
        """
        from rpg.processes import ranks  # imports torch, which takes seconds: the handler must be installed before

        stop = ranks.any_rank(self._received or (ranks.rank() == 0 and cancel.exists()))
        if stop and ranks.rank() == 0:
            cancel.unlink(missing_ok=True)
        return stop
