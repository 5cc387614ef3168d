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
    with tempfile.TemporaryDirectory() as directory, open(Path(directory) / "output", "wb") as output:
        job, found = Path(directory) / "job.json", Path(directory) / "found.json"
        write_json(job, {"spec": experiment.model_dump(mode="json"), "model": model}, durable=False)
        program = ["rpg.look", str(job), str(found)]
        process = fork(program, imports, output, inherited=inherited(SERVER_PASSWORDS), environment={})
        if process is None or process.wait() != 0:
            return None
        kinds = read_json(found)
    return Findings(**{kind: [read_issue(issue) for issue in issues] for kind, issues in kinds.items()})
