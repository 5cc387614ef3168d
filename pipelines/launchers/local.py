"""Training ranks on this machine, under DeepSpeed's launcher."""

import base64
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from pipelines.launchers.launch_record import passed_on, write_launch
from pipelines.launchers.ranks import free_port
from specs.schema.experiment import Experiment


class LocalRanks:
    """As many ranks as the spec asks for, in one process group."""

    signal_children = True

    def command(self, run_directory: Path, experiment: Experiment, slots: Sequence[str]) -> list[str]:
        """What starts the ranks; they meet at a free port of this machine."""
        port = free_port()
        chosen = {"ranks": experiment.training.ranks, "gpus": ", ".join(slots), "environment": passed_on()}
        write_launch(run_directory, "local", rendezvous=f"127.0.0.1:{port}", **chosen)
        return local_command(run_directory, experiment.training.ranks, port, slots[: experiment.training.ranks])

    def environment(self, experiment: Experiment) -> dict[str, str]:
        """Nothing beyond the present environment."""
        del experiment
        return {}

    def end(self, run_directory: Path) -> None:
        """The ranks ended with the command."""


def local_command(run_dir: Path, ranks: int, port: int, devices: Sequence[str] = ()) -> list[str]:
    """DeepSpeed's launcher on this machine, with one process a rank.

    The launcher exits with a rank's own code when it fails or stops (143 after SIGTERM to the ranks), within a second.
    Sent a SIGTERM itself, it passes it on, waits at most 30 s, and exits with 1.

    Args:
        port: a free TCP port, at which the ranks meet.
        devices: a rank's GPU each, as CUDA_VISIBLE_DEVICES names it; empty: the first ones.
    """
    world = base64.urlsafe_b64encode(json.dumps({"localhost": list(devices) or list(range(ranks))}).encode()).decode()
    return [
        *(sys.executable, "-m", "deepspeed.launcher.launch"),
        *(f"--world_info={world}", f"--master_port={port}", "--log_level=error", "--no_local_rank"),
        *("--module", "rpg.train", str(run_dir)),
    ]
