"""Ranks on this machine; DeepSpeed's launcher starts them if there are several."""

import base64
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from pipelines.home.home import Home
from pipelines.launchers import Finding, LaunchedStage, Launcher, Room, passed_on, rank_program, write_launch
from pipelines.launchers.network import free_port
from pipelines.processes.forking import may_fork
from specs.machine.launch import LOOPBACK
from specs.schema.experiment import Experiment


class LocalRanks:
    """Launcher for ranks on this machine, as many as the spec asks for, in one process group."""

    ranks_run_here = True
    signal_children = True
    outlives_command = False

    def command(
        self, run_directory: Path, experiment: Experiment, slots: Sequence[str], *, stage: LaunchedStage = "train"
    ) -> list[str]:
        """Returns the command that starts the ranks, which meet at a free port of this machine.

        A single rank without a GPU to assign needs neither launcher nor port: the command is the rank itself.
        """
        port, ranks = free_port(), experiment.training.ranks
        write_launch(
            run_directory,
            "local",
            rendezvous=f"{LOOPBACK}:{port}",
            ranks=ranks,
            gpus=", ".join(slots),
            environment=passed_on(),
            stage=stage,
        )
        if ranks == 1 and not slots and may_fork():
            return [sys.executable, "-P", "-m", *rank_program(run_directory, stage)]
        return local_command(run_directory, ranks, port, slots[:ranks], stage=stage)

    def end(self, run_directory: Path) -> None:
        """Does nothing: the ranks end with the command."""

    def room(self, experiment: "Experiment") -> Room:
        """Reports no obstacle; there is nothing to query."""
        del experiment
        return Room()

    def examine(self, home: Home, experiment: Experiment | None) -> Iterator[Finding]:
        """Yields nothing: this launcher needs nothing beyond the requirements of every command here."""
        del home, experiment
        yield from ()


LAUNCHER: Launcher = LocalRanks()


def local_command(
    run_directory: Path, ranks: int, port: int, devices: Sequence[str] = (), *, stage: LaunchedStage = "train"
) -> list[str]:
    """Returns the command line of DeepSpeed's launcher on this machine, with one process per rank.

    The launcher exits with a rank's own code when it fails or stops (143 after SIGTERM to the ranks), within a second.
    If it gets a SIGTERM itself, it forwards it, waits at most 30 s, and exits with 1.

    Args:
        port: a free TCP port, at which the ranks meet.
        devices: one GPU for each rank, as CUDA_VISIBLE_DEVICES names it. Empty means the first ones.
    """
    world = base64.urlsafe_b64encode(json.dumps({"localhost": list(devices) or list(range(ranks))}).encode()).decode()
    return [
        *(sys.executable, "-P", "-m", "pipelines.launchers.start_ranks"),
        *(f"--world_info={world}", f"--master_port={port}", "--log_level=error", "--no_local_rank"),
        *("--module", *rank_program(run_directory, stage)),
    ]
