"""Files through which the waiting command, the batch job and its nodes communicate."""

from dataclasses import dataclass
from pathlib import Path

from specs.machine.files import read_json


@dataclass(frozen=True, slots=True)
class JobFiles:
    """The files in the folder `slurm` of a run's directory."""

    directory: Path

    @classmethod
    def of(cls, run_directory: Path) -> "JobFiles":
        """Returns the job files of a run."""
        return cls(run_directory / "slurm")

    @property
    def settings(self) -> Path:
        """Returns the settings file, from the command to the job, with the parts of the spec that it needs."""
        return self.directory / "settings.json"

    @property
    def submitted(self) -> Path:
        """Returns the submission file, from the command to the next one, with the job's number and its work."""
        return self.directory / "job.json"

    @property
    def stop(self) -> Path:
        """Returns the stop file, for the job. If it exists, the run was ended on purpose and is not
        queued again. It is empty."""
        return self.directory / "stop"

    @property
    def losses(self) -> Path:
        """Returns the file of losses, from one stretch of the job to the next: how often nodes or ranks were lost."""
        return self.directory / "losses.json"

    @property
    def failed(self) -> Path:
        """From the job to the command: the nodes that it shall not be given again, the latest last."""
        return self.directory / "failed.json"

    @property
    def ended(self) -> Path:
        """Returns the file of the ending, from the job to the command: it has ended for good, with this exit code."""
        return self.directory / "ended.json"

    def share(self, stretch: str) -> Path:
        """Returns the file of shares, from the job to its nodes: the processes that each starts in one stretch."""
        return self.directory / f"{stretch}.json"

    def report(self, stretch: str, node: int) -> Path:
        """Returns the report file, from a node to the job and the nodes with engines: how its processes ended."""
        return self.directory / f"{stretch}-node-{node}.json"

    def codes(self, stretch: str, nodes: int) -> dict[int, list[int | None]]:
        """Returns the exit codes of the first nodes, for those that have reported; None for a process that was ended
        because another one ended."""
        reports = {node: read_json(self.report(stretch, node)) for node in range(nodes)}
        return {node: report["codes"] for node, report in reports.items() if report}
