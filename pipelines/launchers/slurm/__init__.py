"""Ranks in a Slurm batch job.

`head` runs where `rpg run` does: it submits the job, or finds the running one, and waits. `job` is the batch script's
program on the first node of the allocation; it starts `node` on every node, which starts the ranks there. The three
communicate by files (`job_files`); `queue` queries Slurm. No module outside this folder imports from it.
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
    """Launcher for Slurm. A process here submits the job and waits for it; the job survives if that process is killed,
    and is found again."""

    ranks_run_here = False
    signal_children = False
    outlives_command = True

    def command(
        self, run_directory: Path, experiment: "Experiment", slots: Sequence[str], *, stage: LaunchedStage = "train"
    ) -> list[str]:
        """Returns the command that submits or finds the run's job, and waits until it has ended. Slurm
        allocates GPUs."""
        del experiment, slots
        return [sys.executable, "-P", "-m", "pipelines.launchers.slurm.head", str(run_directory.absolute()), stage]

    def end(self, run_directory: Path) -> None:
        """Ends the run's job at once, if it has not ended by itself."""
        from pipelines.launchers.slurm.queue import end_job

        end_job(run_directory)

    def room(self, experiment: "Experiment") -> Room:
        """Reports no obstacle; there is nothing to query."""
        del experiment
        return Room()

    def examine(self, home: "Home", experiment: "Experiment | None") -> Iterator[Finding]:
        """Checks whether Slurm would accept the spec's job; without a spec, whether its commands are installed here."""
        if experiment is None:
            path = shutil.which("sbatch")
            yield Finding("launcher slurm", "ok" if path else "note", path or "no sbatch here")
            return
        from pipelines.launchers.slurm.queue import examine_queue

        yield from examine_queue(home, experiment)


LAUNCHER: Launcher = SlurmRanks()
