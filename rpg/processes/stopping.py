"""Stopping at the end of a step when asked to: by SIGTERM on any rank, or by a file."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from rpg.processes.exit_cause import STOPPED


class StopAfterStep:
    """Listens from its creation on. Outside of `held_until_asked`, where no step is under way, a signal ends all."""

    def __init__(self) -> None:
        self._received = False
        self._held = False
        signal.signal(signal.SIGTERM, self._receive)

    @property
    def by_signal(self) -> bool:
        """Whether a signal to this process asked for it."""
        return self._received

    def _receive(self, _signum: int, _frame: FrameType | None) -> None:
        self._received = True
        if not self._held:
            raise SystemExit(STOPPED)

    @contextmanager
    def held_until_asked(self) -> Iterator[None]:
        """Within the block a signal is only noted, for `agreed` to act on."""
        self._held = True
        try:
            yield
        finally:
            self._held = False

    def agreed(self, cancel: Path) -> bool:
        """Whether the ranks stop now: all of them get the same answer. A cancel file is removed once it is obeyed."""
        from rpg.processes import ranks  # torch, which takes seconds: a signal must find its handler before that

        stop = ranks.any_rank(self._received or (ranks.rank() == 0 and cancel.exists()))
        if stop and ranks.rank() == 0:
            cancel.unlink(missing_ok=True)
        return stop
