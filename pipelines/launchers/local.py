"""Training ranks on this machine, under DeepSpeed's launcher."""

from collections.abc import Sequence
from pathlib import Path

from pipelines.launchers.launch_record import passed_on, write_launch
from rpg.node_ranks import free_port
from specs.schema.experiment import Experiment


class LocalLauncher:
    """As many ranks as the spec asks for, in one process group."""

    signal_children = True

    def command(self, run_directory: Path, experiment: Experiment, slots: Sequence[str]) -> list[str]:
        """What starts the ranks; they meet at a free port of this machine."""
        from rpg.launch import local_command

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
