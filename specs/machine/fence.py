"""Fences of runs. A fence stops a process that lost its run without noticing from writing into it.

The process that executes a run holds a lease on it, `leases/<number>.json` in the run's directory
(`specs.machine.lease`). A run that is taken over gets a lease with the next number. So one file lookup shows whether a
number is still valid.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path


class SupersededError(RuntimeError):
    """Error for a process whose run another process has taken over, so that it may no longer write to the run."""


def lease_file(run_directory: Path, number: int) -> Path:
    """Returns the path of the lease with this number."""
    return run_directory / "leases" / f"{number:04}.json"


@dataclass(slots=True)
class Fence:
    """The permission that a writer needs before it publishes anything in the run's directory."""

    run_directory: Path
    number: int
    """Number of the lease under which the writer works; 0 for a trainer that was started by hand, without a lease."""
    _superseded: bool = field(default=False, init=False, repr=False, compare=False)
    """The last answer. It is kept until the file system gives another one, so that a failing disk does not supersede a
    process."""

    @property
    def superseded(self) -> bool:
        """Returns whether a lease with a higher number exists. Numbers have no gaps, so that a check of the next one
        suffices. Never raises."""
        if self.number > 0 and not self._superseded:
            try:
                os.stat(lease_file(self.run_directory, self.number + 1))
                self._superseded = True
            except OSError:  # it does not exist, or that is unknown for now: ESTALE, EIO
                pass
        return self._superseded

    def check(self, superseded: bool = False) -> None:
        """Raises SupersededError if a lease with a higher number exists, or if `superseded` says that another rank has
        seen one."""
        if superseded or self.superseded:
            name = self.run_directory.name
            raise SupersededError(f"{name} was taken over (lease {self.number} is superseded): nothing more is written")
