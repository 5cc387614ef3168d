"""The look at data and model in a process of its own, whose imports the stages after it have too."""

import tempfile
from pathlib import Path

from pipelines.processes.forking import fork
from pipelines.processes.supervisor import SERVER_PASSWORDS, inherited
from pipelines.running.fork_imports import look_imports
from rpg.preflight import Findings
from specs.errors import read_issue
from specs.machine.files import read_json, write_json
from specs.schema.experiment import Experiment


def look_in_fork(experiment: Experiment, *, model: bool) -> Findings | None:
    """Findings of `rpg.preflight.examine` in a fork; None where there can be none, or it failed."""
    imports = look_imports(experiment)
    if imports is None:
        return None
    with tempfile.TemporaryDirectory() as directory, open(Path(directory) / "log", "wb") as output:
        job = Path(directory) / "job.json"
        spec = experiment.model_dump(mode="json")
        problems = str(job.with_name("problems.json"))
        write_json(job, {"stage": "look", "spec": spec, "model": model, "out": directory, "problems": problems})
        program, own = ["rpg.stage", str(job)], inherited(SERVER_PASSWORDS)
        process = fork(program, imports, output, inherited=own, environment={})
        if process is None or process.wait() != 0:
            return None
        kinds = read_json(job.with_name("found.json"))
    return Findings(**{kind: [read_issue(issue) for issue in issues] for kind, issues in kinds.items()})
