"""Budget of a run's calls to its judges, over all attempts of the run."""

import contextlib
from pathlib import Path

from filelock import FileLock

from specs.errors import Issue, SpecError
from specs.machine.files import read_json, write_json

SPENT = "judged.json"
"""File in a run's directory with the number of calls to its judges, and their cost."""


class Budget:
    """The budget of a run. It counts the calls of all ranks, attempts and stages together, and ends the run at the
    bound.

    A call is counted before it is made, so the number of calls never exceeds its bound. Its cost is counted once it is
    known, so calls that are in progress when the bound on money is reached may exceed that bound.
    """

    def __init__(self, run: Path | None, *, calls: int, money: float, path: tuple[str | int, ...]) -> None:
        """Takes the bounds.

        Args:
            run: the run's directory; None: nothing is counted.
            calls: most calls; 0: any number.
            money: most that they may cost; 0: any amount.
            path: place of the budget in the spec.
        """
        self._file = run / SPENT if run else None
        self._calls, self._money, self._path = calls, money, path

    def take(self) -> None:
        """Counts a call that is about to be made. Raises SpecError if the bound is reached and the call may not be
        made."""
        if self._file is None:
            return
        with FileLock(f"{self._file}.lock"):
            calls, cost = self._spent()
            for name, spent, most in (("calls", calls, self._calls), ("money", cost, self._money)):
                if most and spent >= most:
                    hint = "raise it, and `rpg run` continues: earlier verdicts are not requested again"
                    raise SpecError(Issue("the judge's budget is spent", (*self._path, name), f"{most:g}", hint=hint))
            self._write(calls + 1, cost)

    def pay(self, cost: float) -> None:
        """Adds the cost of a call."""
        if self._file is None or not cost:
            return
        with FileLock(f"{self._file}.lock"):
            calls, before = self._spent()
            self._write(calls, before + cost)

    def _spent(self) -> tuple[int, float]:
        assert self._file is not None
        noted = read_json(self._file)
        return noted.get("calls", 0), noted.get("cost", 0.0)

    def _write(self, calls: int, cost: float) -> None:
        assert self._file is not None
        with contextlib.suppress(FileNotFoundError):  # the run is being removed
            write_json(self._file, {"calls": calls, "cost": cost}, durable=False)
