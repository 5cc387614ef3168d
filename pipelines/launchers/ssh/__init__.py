"""Training ranks on several hosts, each at the other end of an ssh connection."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specs.schema.experiment import Experiment


class SshRanks:
    """A process here holds the connections; the ranks end with them, so that ending it ends all."""

    signal_children = False

    def command(self, run_directory: Path, experiment: "Experiment", slots: Sequence[str]) -> list[str]:
        """What connects, starts the ranks, and stays until they have ended. GPUs are leased on the hosts."""
        del experiment, slots
        return [sys.executable, "-m", "pipelines.launchers.ssh.head", str(run_directory.absolute())]

    def environment(self, experiment: "Experiment") -> dict[str, str]:
        """Nothing beyond the present environment."""
        del experiment
        return {}

    def end(self, run_directory: Path) -> None:
        """The connections ended with the command, and what runs on the hosts with them."""
