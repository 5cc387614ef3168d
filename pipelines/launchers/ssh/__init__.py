"""Ranks on several hosts, each at the other end of an ssh connection.

`head` runs where `rpg run` does and holds a `connection` to each host; `node` runs there and starts the ranks. Nothing
outside imports from this folder.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.launchers import Finding, LaunchedStage, Launcher, Room, find_program

if TYPE_CHECKING:
    from pipelines.home.home import Home
    from specs.schema.experiment import Experiment


class SshRanks:
    """A process here holds the connections; the ranks end with them, so that ending it ends all."""

    ranks_run_here = False
    signal_children = False
    outlives_command = False

    def command(
        self, run_directory: Path, experiment: "Experiment", slots: Sequence[str], *, stage: LaunchedStage = "train"
    ) -> list[str]:
        """Command that connects, starts the ranks, and stays until they have ended. GPUs are leased on the hosts."""
        del experiment, slots
        return [sys.executable, "-P", "-m", "pipelines.launchers.ssh.head", str(run_directory.absolute()), stage]

    def end(self, run_directory: Path) -> None:
        """Nothing: the connections end with the command, and what runs on the hosts with them."""

    def room(self, experiment: "Experiment") -> Room:
        """Nobody is asked."""
        del experiment
        return Room()

    def examine(self, home: "Home", experiment: "Experiment | None") -> Iterator[Finding]:
        """Whether the spec's hosts answer, see this home, and have this code; without a spec, whether ssh is here."""
        if experiment is None:
            yield find_program("ssh", "ssh")
            return
        from pipelines.launchers.ssh.connection import examine_hosts
        from specs.schema.launchers import SshLauncher

        assert isinstance(experiment.launcher, SshLauncher)
        yield from examine_hosts(home, experiment.launcher)


LAUNCHER: Launcher = SshRanks()
