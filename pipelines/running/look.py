"""The check of data and model in its own process, whose imports the later stages share."""

import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from pipelines.processes.forking import forks_stages, may_fork
from pipelines.processes.supervisor import Child, supervise
from rpg.preflight import Findings
from specs.errors import read_issue
from specs.machine.files import DiskError, read_json, write_json
from specs.schema.experiment import Experiment


def look_in_fork(experiment: Experiment, *, model: bool) -> Findings | None:
    """Runs `rpg.preflight.examine` in a fork and returns its findings; None if no fork is possible, or if it failed."""
    if not forks_stages(experiment) or not may_fork():
        return None
    with suppress(OSError, DiskError), tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        job, problems = directory / "job.json", directory / "problems.json"
        spec = experiment.model_dump(mode="json")
        write_json(job, {"stage": "look", "spec": spec, "model": model, "out": name, "problems": str(problems)})
        command = [sys.executable, "-P", "-m", "rpg.stage", str(job)]
        child = Child("look", command, directory / "look.log", directory / "process.json", forks=True)
        if supervise(child) == 0:
            kinds = read_json(directory / "found.json")
            return Findings(**{kind: [read_issue(issue) for issue in issues] for kind, issues in kinds.items()})
    return None
