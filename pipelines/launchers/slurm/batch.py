"""What sbatch is given for a run: its options, and the script."""

import os
import shlex
import sys
from pathlib import Path

from specs.schema.experiment import Experiment
from specs.schema.launchers import SlurmLauncher

_PROJECT = Path(__file__).parents[3]
_GPU_OPTIONS = ("--gres", "--gpu", "-G", "--tres-per")


def batch_options(experiment: Experiment, run_directory: Path) -> list[str]:
    """One task a node, which starts the node's ranks; the spec's own options last."""
    launcher = experiment.launcher
    assert isinstance(launcher, SlurmLauncher)
    per_node = experiment.training.ranks // launcher.nodes
    options = [
        *("--parsable", f"--job-name={run_directory.name}", f"--nodes={launcher.nodes}", "--ntasks-per-node=1"),
        *("--requeue", "--open-mode=append", f"--output={batch_log(run_directory)}"),
        f"--signal=B:TERM@{launcher.stop_before_seconds}",
    ]
    if launcher.partition:
        options.append(f"--partition={launcher.partition}")
    if launcher.time_limit_minutes:
        options.append(f"--time={launcher.time_limit_minutes}")
    if experiment.resources.threads:
        options.append(f"--cpus-per-task={experiment.resources.threads * per_node}")
    if experiment.resources.device == "cuda" and not any(
        option.startswith(_GPU_OPTIONS) for option in launcher.options
    ):
        options.append(f"--gpus-per-node={experiment.rollout.gpus(per_node)}")
    return [*options, *launcher.options]


def batch_script(experiment: Experiment, run_directory: Path) -> str:
    """Starts `pipelines.launchers.slurm.job` with this process's interpreter and code."""
    launcher = experiment.launcher
    assert isinstance(launcher, SlurmLauncher)
    path = os.pathsep.join([str(_PROJECT), *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = {**launcher.environment, "PYTHONPATH": path}
    lines = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    # exec: the signal before the time limit is for the process that Slurm started.
    start = shlex.join(
        [launcher.python or sys.executable, "-u", "-m", "pipelines.launchers.slurm.job", str(run_directory)]
    )
    return "\n".join(["#!/bin/sh", *lines, f"exec {start}", ""])


def batch_log(run_directory: Path) -> Path:
    """What the script and srun say."""
    return run_directory / "logs" / "train-slurm.log"
