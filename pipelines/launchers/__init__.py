"""Launchers: how the ranks that train and evaluate a run are started. `local` (whose process is `start_ranks`), `slurm`
and `ray`, on top of `ranks` and `network`.

A launcher is its section in `specs/schema/launchers.py` and the module here with the name of its `type`, whose
`LAUNCHER` implements `Launcher` below; `rpg run`, `doctor` and `cancel` find it by that name. Imports processes;
running, the services, the doctor, the proof and the command line import it. So do the processes on the nodes of a
cluster, which import only this package and `specs.machine`: no Prefect, no Pydantic and nothing of `rpg` here.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

from specs.machine.files import now, read_json, write_json
from specs.secrets import is_reference, masked, variable_of

if TYPE_CHECKING:
    from pipelines.home.home import Home
    from specs.errors import Issue
    from specs.schema.experiment import Experiment


LaunchedStage = Literal["train", "evaluate", "check"]
"""Tasks of ranks: two stages of a run, and the checks of `rpg doctor --gpu`."""


def rank_program(run_directory: Path, stage: LaunchedStage) -> list[str]:
    """Returns the module that each rank of a stage runs, and its argument."""
    if stage == "train":
        return ["rpg.train", str(run_directory)]
    module = "rpg.stage" if stage == "evaluate" else "pipelines.doctor.gpu_checks.rank"
    return [module, str(job_file(run_directory, stage))]


def is_rank(command: Sequence[str]) -> bool:
    """Returns whether a launcher's command is itself the only rank, so that it has no ranks for children."""
    return command[3] in {rank_program(Path(), stage)[0] for stage in get_args(LaunchedStage)}


def launched_stage(arguments: Sequence[str]) -> LaunchedStage:
    """Returns the stage from a launcher process's command line, in which it follows the run's directory."""
    return next((stage for stage in get_args(LaunchedStage) if list(arguments) == [stage]), "train")


def job_file(run_directory: Path, stage: str) -> Path:
    """Returns the file with the job of the ranks' program, for jobs other than training."""
    return run_directory / f"{stage}-job.json"


def concurrent_directory(run_directory: Path) -> Path:
    """Returns the directory in which the launcher of a concurrent evaluation works while the run trains, instead of the
    run's directory. It has the run's name, because Slurm names the job and the holder of GPU slots by it."""
    return run_directory / "concurrent" / run_directory.name


def problems_file(run_directory: Path, stage: str) -> Path:
    """Returns the file in which a stage's process reports errors in the user's input."""
    return run_directory / ("problems.json" if stage == "train" else f"{stage}-problems.json")


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check of `rpg doctor`."""

    name: str
    status: Literal["ok", "note", "broken"]
    """note: works, but worth knowing; broken: a requirement fails."""
    message: str


@dataclass(frozen=True, slots=True)
class Room:
    """The capacity of a launcher's machines for the ranks of one run."""

    obstacles: "tuple[Issue, ...]" = ()
    """Reasons why the machines can never hold the run. Empty if they can."""
    launches: int = 1
    """Number of such runs for which there is capacity now."""


class Launcher(Protocol):
    """An object that starts the ranks of a run. One object serves every run and every process of ours:
    it has no state."""

    ranks_run_here: bool
    """Whether the ranks compute on this machine. If so, GPU slots are leased for them before the command starts."""
    signal_children: bool
    """Whether a request to stop (SIGTERM) goes to the command's children, the ranks, because it would
    kill the command."""

    outlives_command: bool
    """Whether the ranks survive if the command is killed, and the next command continues with them. They do not check
    the lease under which they were started, so that another may follow it."""

    def command(
        self, run_directory: Path, experiment: "Experiment", slots: Sequence[str], *, stage: LaunchedStage = "train"
    ) -> list[str]:
        """Returns the command line for a stage; the supervisor starts and watches it like any other process.

        Its exit codes are those of the ranks, each of which runs `rank_program`. The trainer does the resuming: it
        finds the last checkpoint in the run's directory. The launcher records its choices (addresses, ports,
        environment) with `write_launch`.

        Args:
            slots: GPUs of this machine that are leased for the ranks and, after theirs, their engines.
            stage: all but train need the file `job_file`.
        """
        ...

    def end(self, run_directory: Path) -> None:
        """Ends the processes that a command started elsewhere and left behind, if any.

        Called after the command has ended. `rpg cancel` calls it too, for a command that was killed.
        """
        ...

    def room(self, experiment: "Experiment") -> Room:
        """Returns the capacity of the launcher's machines; called before a run starts. A launcher without such a query,
        for example one with a queue, reports no obstacle and capacity for one run at a time."""
        ...

    def examine(self, home: "Home", experiment: "Experiment | None") -> Iterator[Finding]:
        """Yields the findings of `rpg doctor` about the launcher.

        Args:
            experiment: a spec with this launcher, whose machines are tried. None: checks what this machine has for it.
        """
        ...


def launcher_of(experiment: "Experiment") -> Launcher:
    """Returns the launcher that a spec names."""
    return _named(experiment.launcher.type)


def launchers() -> list[Launcher]:
    """Returns one launcher of each kind, in the order of the schema."""
    from specs.schema.fields import literal_of, members
    from specs.schema.launchers import Launcher as Section

    sections = members(Section)
    return [_named(kind) for section in sections for kind in literal_of(section.model_fields["type"])]


def _named(kind: str) -> Launcher:
    launcher: Launcher = import_module(f"{__name__}.{kind}").LAUNCHER
    return launcher


_PASSED_ON = ("NCCL_", "GLOO_", "TORCH", "OMP_", "MKL_", "HF_", "TRANSFORMERS_", "VLLM_", "RPG_", "CUDA_", "DS_", "LD_")
_NOT_PASSED_ON = (
    *("CUDA_VISIBLE_DEVICES", "RPG_SLOTS", "RPG_SLOT_DIR", "RPG_GPUS"),
    *("RPG_READER_AUTH_STRING", "RPG_STUDIES_URL"),
)
"""The first four variables name GPUs of this machine and mean nothing on another machine; the others contain
passwords.
"""


def passed_on(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns the variables of this process that ranks on other machines get too."""
    return {
        name: value
        for name, value in sorted(environment.items())
        if name.startswith(_PASSED_ON) and name not in _NOT_PASSED_ON
    }


def sent_along(variables: Mapping[str, str], environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns the variables of launcher.environment for the process on another machine, sent over a private channel.

    These are the plain values, and the variables of this process that `env:` references name, if they are set. The
    references themselves go with a machine's share of the ranks, and are resolved there.
    """
    plain = {name: value for name, value in variables.items() if not is_reference(value)}
    return plain | {name: environment[name] for name in map(variable_of, variables.values()) if name in environment}


def write_launch(
    run_directory: Path,
    launcher: str,
    *,
    environment: Mapping[str, str],
    stage: LaunchedStage = "train",
    **chosen: Any,
) -> None:
    """Replaces the stage's record of the launcher's choices; secrets are recorded by name only."""
    record = {"launcher": launcher, "started_at": now(), **chosen, "environment": masked(environment)}
    write_json(_launch_file(run_directory, stage), record)


def read_launch(run_directory: Path, stage: LaunchedStage = "train") -> dict[str, Any]:
    """Returns the last launch of a stage, which `rpg show` shows; empty if there was none."""
    return read_json(_launch_file(run_directory, stage))


def _launch_file(run_directory: Path, stage: LaunchedStage) -> Path:
    return run_directory / ("launch.json" if stage == "train" else f"launch-{stage}.json")
