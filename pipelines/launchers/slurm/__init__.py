"""Training ranks in a batch job of Slurm's: submitted by a head process here, started by srun there."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.state import read_json

if TYPE_CHECKING:
    from specs.schema.experiment import Experiment

DIRECTORY = "slurm"
"""In the run's directory: what the job is told, and what it tells."""
STATES_OF_THE_LIVING = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "REQUEUED", "REQUEUE_HOLD")
_COMMAND_SECONDS = 60.0


class SlurmRanks:
    """A process here submits the job and waits for it; the job outlives it if it is killed, and is found again."""

    signal_children = False

    def command(self, run_directory: Path, experiment: "Experiment", slots: Sequence[str]) -> list[str]:
        """What submits the job, or finds the run's job, and waits until it has ended. GPUs are Slurm's to give."""
        del experiment, slots
        return [sys.executable, "-m", "pipelines.launchers.slurm.head", str(run_directory.absolute())]

    def environment(self, experiment: "Experiment") -> dict[str, str]:
        """Nothing beyond the present environment."""
        del experiment
        return {}

    def end(self, run_directory: Path) -> None:
        """Ends the run's job at once, if it has not ended by itself."""
        job = submitted_job(run_directory)
        if job and not (run_directory / DIRECTORY / "ended.json").exists() and job_state(job) in STATES_OF_THE_LIVING:
            (run_directory / DIRECTORY / "stop").touch()
            # A plain scancel leaves the ranks KillWait, 30 s by default.
            slurm("scancel", "--signal=KILL", "--full", job)
            slurm("scancel", job)


def submitted_job(run_directory: Path) -> str:
    """The number of the job that was last submitted for a run; empty where there is none."""
    return str(read_json(run_directory / DIRECTORY / "job.json").get("job", ""))


def job_state(job: str) -> str:
    """As squeue has it; GONE where it knows the job no more, UNKNOWN where nobody answers."""
    asked = slurm("squeue", "--noheader", "--jobs", job, "--format=%T")
    if asked.returncode == 0:
        return asked.stdout.strip() or "GONE"
    return "GONE" if "Invalid job id" in asked.stderr else "UNKNOWN"


def slurm(*command: str, given: str = "") -> "subprocess.CompletedProcess[str]":
    """Runs one of Slurm's commands."""
    try:
        return subprocess.run(command, input=given, capture_output=True, text=True, timeout=_COMMAND_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 1, "", str(error))
