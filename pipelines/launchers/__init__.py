"""How the ranks are started that train and evaluate a run: `local` (whose process is `start_ranks`), `slurm` and `ray`,
over `ranks` and `network`.

A launcher is its section in `specs/schema/launchers.py` and the module here that has the name of its `type`, whose
`LAUNCHER` keeps to `Launcher` below; that name is how `rpg run`, `doctor` and `cancel` find it. Imports processes;
running, the services, the doctor, the proof and the command line import it. So do the processes on the nodes of a
cluster, with the ground floor (`specs.machine`) alone: no Prefect, no Pydantic and nothing of `rpg` here.
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
"""What ranks do: two stages of a run, and the checks of `rpg doctor --gpu`."""


def rank_program(run_directory: Path, stage: LaunchedStage) -> list[str]:
    """The module that each rank of a stage runs, and its argument."""
    if stage == "train":
        return ["rpg.train", str(run_directory)]
    module = "rpg.stage" if stage == "evaluate" else "pipelines.doctor.gpu_checks.rank"
    return [module, str(job_file(run_directory, stage))]


def is_rank(command: Sequence[str]) -> bool:
    """Whether a launcher's command is itself the one rank, so that it has no ranks for children."""
    return command[3] in {rank_program(Path(), stage)[0] for stage in get_args(LaunchedStage)}


def launched_stage(arguments: Sequence[str]) -> LaunchedStage:
    """The stage that a launcher's own process is told on its command line, after the run's directory."""
    return next((stage for stage in get_args(LaunchedStage) if list(arguments) == [stage]), "train")


def job_file(run_directory: Path, stage: str) -> Path:
    """File with the job of the ranks' program, where that is not to train."""
    return run_directory / f"{stage}-job.json"


def concurrent_directory(run_directory: Path) -> Path:
    """Where the launcher works that starts an evaluation while the run trains, in the place of the run's directory. Its
    name is the run's: Slurm calls the job by it, and the holder of GPU slots is called so."""
    return run_directory / "concurrent" / run_directory.name


def problems_file(run_directory: Path, stage: str) -> Path:
    """Where a stage's process leaves what is wrong with what the user gave."""
    return run_directory / ("problems.json" if stage == "train" else f"{stage}-problems.json")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that `rpg doctor` looked at."""

    name: str
    status: Literal["ok", "note", "broken"]
    """note: works, but worth knowing; broken: something that is needed fails."""
    message: str


@dataclass(frozen=True, slots=True)
class Room:
    """What the machines that a launcher is given have for the ranks of one run."""

    obstacles: "tuple[Issue, ...]" = ()
    """Why they will never hold it."""
    launches: int = 1
    """Such runs that they have room for at this moment."""


class Launcher(Protocol):
    """Starts the ranks of a run. One object serves every run and every process of ours: it has no state."""

    ranks_run_here: bool
    """The ranks compute on this machine: GPU slots are leased for them before the command is started."""
    signal_children: bool
    """A request to stop (SIGTERM) goes to the command's children, the ranks, as it would kill the command itself."""

    outlives_command: bool
    """The ranks go on where the command is killed, and the next command goes on with them, so that the lease under
    which they were started may be followed by another: they do not ask it."""

    def command(
        self, run_directory: Path, experiment: "Experiment", slots: Sequence[str], *, stage: LaunchedStage = "train"
    ) -> list[str]:
        """The command line that does a stage; the supervisor starts it and watches over it as over any other process.

        Its exit codes are those of the ranks, each of which runs `rank_program`. Resuming is the trainer's affair: it
        finds the last checkpoint in the run's directory. What the launcher chooses (addresses, ports, environment) it
        records with `write_launch`.

        Args:
            slots: GPUs of this machine that are leased for the ranks and, after theirs, their engines.
            stage: all but train need the file `job_file`.
        """
        ...

    def end(self, run_directory: Path) -> None:
        """Ends what a command started elsewhere and did not take with it; does nothing where there is none.

        Called when the command is gone. `rpg cancel` asks it too, for a command that was killed.
        """
        ...

    def room(self, experiment: "Experiment") -> Room:
        """Answer of the machines that the launcher is given, asked before a run is begun. Where nobody is asked, as of
        a queue, none is an obstacle, and one run is begun at a time."""
        ...

    def examine(self, home: "Home", experiment: "Experiment | None") -> Iterator[Finding]:
        """Findings of `rpg doctor` about the launcher.

        Args:
            experiment: a spec with this launcher: what it would reach is tried. None: what this machine has for it.
        """
        ...


def launcher_of(experiment: "Experiment") -> Launcher:
    """The launcher that a spec names."""
    return _named(experiment.launcher.type)


def launchers() -> list[Launcher]:
    """One of each kind, in the order of the schema."""
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
"""The first four name GPUs of this machine, and mean nothing on another; the others hold passwords."""


def passed_on(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables of this process that ranks on other machines get too."""
    return {
        name: value
        for name, value in sorted(environment.items())
        if name.startswith(_PASSED_ON) and name not in _NOT_PASSED_ON
    }


def sent_along(variables: Mapping[str, str], environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables of launcher.environment for the process on another machine, over a channel that nobody else reads.

    Those are the plain values, and this process's own variables that `env:` references name, where it has them. The
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
    """Replaces the stage's record of what a launcher chose; of secrets the names alone."""
    record = {"launcher": launcher, "started_at": now(), **chosen, "environment": masked(environment)}
    write_json(_launch_file(run_directory, stage), record)


def read_launch(run_directory: Path, stage: LaunchedStage = "train") -> dict[str, Any]:
    """The last launch of a stage, which `rpg show` shows; empty where there was none."""
    return read_json(_launch_file(run_directory, stage))


def _launch_file(run_directory: Path, stage: LaunchedStage) -> Path:
    return run_directory / ("launch.json" if stage == "train" else f"launch-{stage}.json")
