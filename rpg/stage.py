"""Runs one stage of a run in its own process (evaluate also in several ranks): `python -m rpg.stage JOB.json`.

JOB: {stage: data|base|evaluate|look, spec: the run's spec, inputs: {data?, base?, run?}, out: directory to fill,
problems: file for the user's errors, run_id?, fingerprint?, kept?: directory for an interrupted evaluation's answers}.
The stage evaluate_exported does a part of evaluate's work while the run trains; its JOB also has exported: [{step,
weights, attempt}, ...] and lease, the number of the run's lease. The stage look checks the data before there is a run,
and the model too if the JOB's model is true; it writes found.json.
Exit code 0: `out` is filled; 2: the user's input is wrong, and `problems` says how; any other: a failure, with its
traceback on stderr.
"""

import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specs.document import experiment_of
from specs.errors import SpecError
from specs.machine.exit_cause import USER_ERROR, leave_issues
from specs.machine.fence import Fence
from specs.machine.files import write_json
from specs.machine.parent import before_torch, die_with_parent
from specs.machine.standstill import watch_for_standstill
from specs.machine.timed_output import time_output


def main(job_file: str) -> int:
    """Runs the job and returns the exit code."""
    die_with_parent()
    before_torch()
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    start = time.monotonic()
    is_first_rank = os.environ.get("RANK", "0") == "0"
    if is_first_rank:
        print(f"{job['stage']}: started", flush=True)
    try:
        if job["stage"].startswith("evaluate"):
            policy = experiment_of(job["spec"], {}).stages.evaluate
            watch_for_standstill(Path(job_file).parent, policy.standstill_seconds)
        run(job)
    except SpecError as error:
        leave_issues(Path(job["problems"]), error.issues)
        print(f"{job['stage']}: {error}", flush=True)
        return USER_ERROR
    if is_first_rank:
        print(f"{job['stage']}: done in {time.monotonic() - start:.1f} s", flush=True)
    return 0


def run(job: dict[str, Any]) -> None:
    """Fills the job's `out`. Imports only the module of the job's stage."""
    experiment = experiment_of(job["spec"], {})
    inputs = {name: Path(path) for name, path in job.get("inputs", {}).items()}
    out = Path(job["out"])
    out.mkdir(parents=True, exist_ok=True)
    if job["stage"] == "data":
        from rpg.data import staging

        staging.stage(experiment.data, out)
    elif job["stage"] == "base":
        from rpg.base.stage import make

        make(experiment, inputs.get("data"), out)
    elif job["stage"] == "evaluate":
        from rpg.evaluation.stage import evaluate

        kept = Path(job["kept"]) if "kept" in job else None
        evaluate(experiment, inputs, out, run_id=job["run_id"], fingerprint=job["fingerprint"], kept=kept)
    elif job["stage"] == "look":
        from rpg.preflight import examine

        write_json(out / "found.json", asdict(examine(experiment, model=job["model"])), durable=False)
    elif job["stage"] == "evaluate_exported":
        from rpg.evaluation.concurrent import ExportedPolicy, evaluate_exported

        exported = [ExportedPolicy.parse(policy) for policy in job["exported"]]
        evaluate_exported(
            experiment,
            inputs,
            exported,
            run_id=job["run_id"],
            fingerprint=job["fingerprint"],
            fence=Fence(inputs["run"], job["lease"]),
        )
    else:
        raise ValueError(f"no stage `{job['stage']}`")


if __name__ == "__main__":
    time_output()
    sys.exit(main(sys.argv[1]))
