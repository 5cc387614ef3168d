"""The fence of a run: keeps a process that lost its run, and does not know it yet, from writing into it.

Who executes a run holds a lease on it, `leases/<number>.json` in the run's directory (`specs.machine.lease`). A
run that is taken over gets a lease of the next number. So one look at the disk tells whether a number still counts.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path


class SupersededError(RuntimeError):
    """The run was taken over: this process may write nothing more into it."""


def lease_file(run_directory: Path, number: int) -> Path:
    """Where the lease of a number lies."""
    return run_directory / "leases" / f"{number:04}.json"


@dataclass(slots=True)
class Fence:
    """Permission that a writer asks for before it gives anything in the run's directory its name."""

    run_directory: Path
    number: int
    """Number of the lease under which the writer works; 0: none, as for a trainer that was started by hand."""
    _superseded: bool = field(default=False, init=False, repr=False, compare=False)
    """The last answer. It holds while the file system does not give another: a disk that is away supersedes nobody."""

    @property
    def superseded(self) -> bool:
        """Whether a lease of a higher number exists. Numbers have no gaps, so the next one tells. Raises nothing."""
        if self.number > 0 and not self._superseded:
            try:
                os.stat(lease_file(self.run_directory, self.number + 1))
                self._superseded = True
            except OSError:  # not there, or for a while nobody can tell: ESTALE, EIO
                pass
        return self._superseded

    def check(self, superseded: bool = False) -> None:
        """Raises SupersededError where a lease of a higher number exists, or another rank is known to have seen one."""
        if superseded or self.superseded:
            name = self.run_directory.name
            raise SupersededError(f"{name} was taken over (lease {self.number} is superseded): nothing more is written")
