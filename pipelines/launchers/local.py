"""Training ranks on this machine, under DeepSpeed's launcher."""

from pathlib import Path

from specs.schema.experiment import Experiment


class LocalLauncher:
    """`deepspeed.launcher.launch` with as many ranks as the spec asks for, in one process group."""

    signal_children = True

    def command(self, run_directory: Path, experiment: Experiment) -> list[str]:
        """What starts the ranks."""
        from rpg.launch import launch_command

        return launch_command(run_directory, experiment)

    def environment(self, experiment: Experiment) -> dict[str, str]:
        """Nothing beyond the present environment."""
        return {}
