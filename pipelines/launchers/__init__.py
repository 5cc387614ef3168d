"""How the training ranks of a run are started: one module per kind, joined by the spec's `launcher.type`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from specs.schema.experiment import Experiment


class Launcher(Protocol):
    """Gives the command that trains a run; it is started and watched by the supervisor like any other stage."""

    signal_children: bool
    """SIGTERM goes to the command's children (the ranks), not to the command, which would kill them."""

    def command(self, run_directory: Path, experiment: "Experiment", slots: Sequence[str]) -> list[str]:
        """The command line. Resuming is the trainer's affair: it finds the last checkpoint in the run's directory.

        What it chooses (addresses, ports, environment) it records in the run's launch.json.

        Args:
            slots: GPUs of this machine that are leased for the ranks and, after theirs, their engines.
        """
        ...

    def environment(self, experiment: "Experiment") -> dict[str, str]:
        """On top of the present environment."""
        ...

    def end(self, run_directory: Path) -> None:
        """Ends what the command started elsewhere and did not take with it; called when the command is gone."""
        ...


def launcher_of(experiment: "Experiment") -> Launcher:
    """The launcher that a spec names."""
    from pipelines.launchers.local import LocalRanks
    from pipelines.launchers.slurm import SlurmRanks
    from pipelines.launchers.ssh import SshRanks

    launchers: dict[str, type[Launcher]] = {"local": LocalRanks, "ssh": SshRanks, "slurm": SlurmRanks}
    return launchers[experiment.launcher.type]()
