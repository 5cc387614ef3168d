"""Requests to Slurm: a test of a run's job, its submission, its state, its cancellation."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from pipelines.home.home import Home
from pipelines.launchers import Finding, LaunchedStage
from pipelines.launchers.slurm.job_files import JobFiles
from specs.machine.files import read_json
from specs.machine.liveness import is_place
from specs.schema.experiment import Experiment
from specs.schema.launchers import VARIABLE_NAME, SlurmLauncher
from specs.secrets import is_reference

JOB_MODULE = "pipelines.launchers.slurm.job"
"""Module that the batch script starts."""
ALIVE = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "REQUEUED", "REQUEUE_HOLD")
"""States of a job that runs or will run."""
_PROJECT = Path(__file__).parents[3]
_COMMAND_SECONDS = 60.0


def slurm(*command: str, given: str = "") -> "subprocess.CompletedProcess[str]":
    """Runs one of Slurm's commands; if it cannot be run or does not answer, the exit code is 1.

    Args:
        given: its input.
    """
    try:
        return subprocess.run(command, input=given, capture_output=True, encoding="utf-8", timeout=_COMMAND_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 1, "", str(error))


def submitted_job(run_directory: Path) -> str:
    """Returns the number of the job that was last submitted for a run; empty without such a job."""
    files = JobFiles.of(run_directory)
    submitted = read_json(files.submitted)
    # A copy of the run's directory has the number of another run's job.
    return str(submitted.get("job", "")) if is_place(str(submitted.get("place", "")), files.directory) else ""


def job_state(job: str) -> str:
    """Returns the state of a job in squeue's words; GONE if squeue no longer knows the job, UNKNOWN if
    Slurm does not answer."""
    answer = slurm("squeue", "--noheader", "--jobs", job, "--format=%T")
    if answer.returncode == 0:
        return answer.stdout.strip() or "GONE"
    return "GONE" if "Invalid job id" in answer.stderr else "UNKNOWN"


def excluded_nodes(job: str) -> str:
    """Returns the nodes that a job must not have, in Slurm's notation: `h[1-4],h7`; empty if there are none."""
    return slurm("squeue", "--noheader", "--jobs", job, "--format=%x").stdout.strip().replace("(null)", "")


def end_job(run_directory: Path) -> None:
    """Ends the run's job at once, if there is one and it has not ended by itself."""
    files, job = JobFiles.of(run_directory), submitted_job(run_directory)
    if job and not files.ended.exists() and job_state(job) in ALIVE:
        files.stop.touch()
        # A plain scancel gives the ranks KillWait, 30 s by default.
        slurm("scancel", "--signal=KILL", "--full", job)
        slurm("scancel", job)


def sbatch(
    experiment: Experiment, run_directory: Path, stage: LaunchedStage, *options: str, excluding: str = ""
) -> "subprocess.CompletedProcess[str]":
    """Submits the run's job to Slurm; the output is the job's number, followed by `;` and the cluster's name.

    Args:
        options: of sbatch, before those of the job.
        excluding: nodes that the job must not have, whatever the spec's own options exclude.
    """
    script = batch_script(experiment, run_directory)
    last = [f"--exclude={excluding}"] if excluding else []
    return slurm("sbatch", *options, *batch_options(experiment, run_directory, stage), *last, given=script)


def examine_queue(home: Home, experiment: Experiment) -> Iterator[Finding]:
    """Checks whether Slurm would accept the job of a run of this spec; submits nothing."""
    if not shutil.which("sbatch"):
        yield Finding("launcher slurm", "broken", "no sbatch here")
        return
    answer = sbatch(experiment, home.root / "runs" / "doctor", "train", "--test-only")
    message = answer.stderr.strip().removeprefix("sbatch: ")
    yield Finding("launcher slurm", "broken" if answer.returncode else "ok", message)
    yield Finding("slurm nodes", "note", f"must see {home.root}; this check cannot test that from here")


def batch_options(experiment: Experiment, run_directory: Path, stage: LaunchedStage) -> list[str]:
    """Returns the options of sbatch for one task per node, which starts the node's ranks or engines; the
    spec's own come last."""
    launcher = experiment.launcher
    assert isinstance(launcher, SlurmLauncher)
    per_node = experiment.training.ranks // launcher.nodes
    engines = max(launcher.engines_of_nodes(experiment.samplers), default=0)
    options = [
        *("--parsable", f"--job-name={run_directory.name}", f"--nodes={launcher.nodes + launcher.engine_nodes}"),
        *("--ntasks-per-node=1", "--requeue", "--open-mode=append", f"--output={batch_log(run_directory, stage)}"),
        f"--signal=B:TERM@{launcher.stop_before_seconds}",
    ]
    if launcher.partition:
        options.append(f"--partition={launcher.partition}")
    if launcher.time_limit_minutes:
        options.append(f"--time={launcher.time_limit_minutes}")
    if experiment.resources.threads:
        options.append(f"--cpus-per-task={experiment.resources.threads * max(per_node, engines)}")
    device = experiment.resources.device
    if not launcher.asks_for_gpus and (
        device == "cuda" or (device == "auto" and _partition_has_gpus(launcher.partition))
    ):
        of_engines = engines * experiment.rollout.gpus_per_sampler
        options.append(f"--gpus-per-node={max(experiment.gpus_beside(per_node), of_engines)}")
    return [*options, *launcher.options]


def _partition_has_gpus(partition: str) -> bool:
    """Returns whether Slurm knows of GPUs on the nodes of a partition. An empty name stands for the
    default one, which Slurm marks."""
    listed = slurm("sinfo", "--noheader", "--format=%P %G").stdout.splitlines()
    lines = [line.partition(" ") for line in listed]
    chosen = [gres for name, _, gres in lines if (name.rstrip("*") == partition if partition else name.endswith("*"))]
    return any("gpu" in gres for gres in chosen)


def batch_script(experiment: Experiment, run_directory: Path) -> str:
    """Returns a script that starts the job's program with this process's interpreter and code."""
    launcher = experiment.launcher
    assert isinstance(launcher, SlurmLauncher)
    path = os.pathsep.join([str(_PROJECT), *filter(None, [os.environ.get("PYTHONPATH")])])
    # Slurm keeps the script: the process that starts the ranks resolves references to secrets on the node.
    plain = {name: value for name, value in launcher.environment.items() if not is_reference(value)}
    variables = plain | {"PYTHONPATH": path}
    if unfit := [name for name in variables if not re.fullmatch(VARIABLE_NAME, name)]:
        raise ValueError(f"launcher.environment: {unfit[0]!r} is not the name of a variable")
    lines = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    # exec: the signal before the time limit is for the process that Slurm started.
    start = shlex.join([launcher.python or sys.executable, "-P", "-u", "-m", JOB_MODULE, str(run_directory)])
    return "\n".join(["#!/bin/sh", *lines, f"exec {start}", ""])


def batch_log(run_directory: Path, stage: LaunchedStage) -> Path:
    """Returns the file with the output of the script and srun."""
    return run_directory / "logs" / f"{stage}-slurm.log"
