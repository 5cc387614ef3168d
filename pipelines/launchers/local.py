"""Training ranks on this machine, under DeepSpeed's launcher."""

import socket
from pathlib import Path

from specs.schema.experiment import Experiment


class LocalLauncher:
    """As many ranks as the spec asks for, in one process group."""

    signal_children = True

    def command(self, run_directory: Path, experiment: Experiment) -> list[str]:
        """What starts the ranks; they meet at a free port of this machine."""
        from rpg.launch import local_command

        return local_command(run_directory, experiment.training.ranks, free_port())

    def environment(self, experiment: Experiment) -> dict[str, str]:
        """Nothing beyond the present environment."""
        del experiment
        return {}


def free_port() -> int:
    """A TCP port that nobody listens at now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
