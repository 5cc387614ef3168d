"""Ranks in a batch job of Slurm's.

`head` runs where `rpg run` does: it submits the job, or finds the one that runs, and waits. `job` is the batch script's
program on the first node of the allocation; it starts `node` on every node, which starts the ranks there. The three
leave each other files (`job_files`); `queue` asks Slurm. Nothing outside imports from this folder.
"""

import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.launchers import Finding, LaunchedStage, Launcher, Room

if TYPE_CHECKING:
    from pipelines.home.home import Home
    from specs.schema.experiment import Experiment


class SlurmRanks:
    """A process here submits the job and waits for it; the job outlives it if it is killed, and is found again."""

    ranks_run_here = False
    signal_children = False
    outlives_command = True

    def command(
        self, run_directory: Path, experiment: "Experiment", slots: Sequence[str], *, stage: LaunchedStage = "train"
    ) -> list[str]:
        """Command that submits or finds the run's job, and waits until it has ended. GPUs are Slurm's to give."""
        del experiment, slots
        return [sys.executable, "-P", "-m", "pipelines.launchers.slurm.head", str(run_directory.absolute()), stage]

    def end(self, run_directory: Path) -> None:
        """Ends the run's job at once, if it has not ended by itself."""
        from pipelines.launchers.slurm.queue import end_job

        end_job(run_directory)

    def room(self, experiment: "Experiment") -> Room:
        """Nobody is asked."""
        del experiment
        return Room()

    def examine(self, home: "Home", experiment: "Experiment | None") -> Iterator[Finding]:
        """Whether Slurm would take the spec's job; without a spec, whether its commands are here."""
        if experiment is None:
            path = shutil.which("sbatch")
            yield Finding("launcher slurm", "ok" if path else "note", path or "no sbatch here")
            return
        from pipelines.launchers.slurm.queue import examine_queue

        yield from examine_queue(home, experiment)


LAUNCHER: Launcher = SlurmRanks()
