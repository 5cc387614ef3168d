"""Files by which the command that waits, the batch job and its nodes tell each other what they need."""

from dataclasses import dataclass
from pathlib import Path

from specs.machine.files import read_json


@dataclass(frozen=True, slots=True)
class JobFiles:
    """The files in the folder `slurm` of a run's directory."""

    directory: Path

    @classmethod
    def of(cls, run_directory: Path) -> "JobFiles":
        """The job files of a run."""
        return cls(run_directory / "slurm")

    @property
    def settings(self) -> Path:
        """From the command to the job: what it needs of the spec."""
        return self.directory / "settings.json"

    @property
    def submitted(self) -> Path:
        """From the command to the next one: the job's number, and what work it was submitted for."""
        return self.directory / "job.json"

    @property
    def stop(self) -> Path:
        """To the job: the run is ended on purpose, so it is not to be queued again. Empty."""
        return self.directory / "stop"

    @property
    def losses(self) -> Path:
        """From one stretch of the job to the next: how often nodes or ranks were lost."""
        return self.directory / "losses.json"

    @property
    def failed(self) -> Path:
        """From the job to the command: the nodes that it shall not be given again, the latest last."""
        return self.directory / "failed.json"

    @property
    def ended(self) -> Path:
        """From the job to the command: it has ended for good, with this exit code."""
        return self.directory / "ended.json"

    def share(self, stretch: str) -> Path:
        """From the job to its nodes: what each has to start in one stretch of it."""
        return self.directory / f"{stretch}.json"

    def report(self, stretch: str, node: int) -> Path:
        """From a node to the job and the nodes with engines: how its processes ended."""
        return self.directory / f"{stretch}-node-{node}.json"

    def codes(self, stretch: str, nodes: int) -> dict[int, list[int | None]]:
        """Exit codes by node, of the first nodes that have reported; None for what another's end has ended."""
        reports = {node: read_json(self.report(stretch, node)) for node in range(nodes)}
        return {node: report["codes"] for node, report in reports.items() if report}
