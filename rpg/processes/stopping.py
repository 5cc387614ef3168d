"""How a trainer stops: at the end of a step, when any of its ranks gets SIGTERM or a file asks for it."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from specs.machine.exit_cause import STOPPED


class StopAfterStep:
    """Listens to SIGTERM from its creation on. Outside of `between_steps_only` a signal ends the process at once."""

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
        """Within the block a signal is only noted; the loop asks `agreed` after each step."""
        self._held = True
        try:
            yield
        finally:
            self._held = False

    def agreed(self, cancel: Path) -> bool:
        """Whether the ranks stop now. All of them call it and get the same answer.

        Args:
            cancel: a file that asks for it; removed once it is obeyed.
        """
        from rpg.processes import ranks  # imports torch, which takes seconds: the handler must be there before that

        stop = ranks.any_rank(self._received or (ranks.rank() == 0 and cancel.exists()))
        if stop and ranks.rank() == 0:
            cancel.unlink(missing_ok=True)
        return stop
