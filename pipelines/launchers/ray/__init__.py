"""Ranks on the nodes of a Ray cluster, in one placement group a launch.

`head` runs where `rpg run` does, as a Ray driver: it requests the placement group and has an actor of `carrier` in each
bundle, which starts the program `node` and carries its messages: a `connection` to each. No module outside this folder
imports from it.
"""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.launchers import Finding, LaunchedStage, Launcher, Room

if TYPE_CHECKING:
    from pipelines.home.home import Home
    from specs.schema.experiment import Experiment

_ASK_SECONDS = 120.0
"""Seconds to wait for a cluster's answer about its capacity: one on a busy machine answers in a quarter of that."""


class RayRanks:
    """Launcher for a Ray cluster. A process here is the driver; placement group, actors and ranks end with it."""

    ranks_run_here = False
    signal_children = False
    outlives_command = False

    def command(
        self, run_directory: Path, experiment: "Experiment", slots: Sequence[str], *, stage: LaunchedStage = "train"
    ) -> list[str]:
        """Returns the command that requests resources from Ray, starts the ranks there, and waits until they have
        ended. Ray allocates GPUs."""
        del experiment, slots
        return [sys.executable, "-P", "-m", "pipelines.launchers.ray.head", str(run_directory.absolute()), stage]

    def end(self, run_directory: Path) -> None:
        """Does nothing: Ray ends actors and placement groups with the driver, and their ranks with them."""

    def room(self, experiment: "Experiment") -> Room:
        """Compares the cluster's resources with those that the run needs. A separate process does this: a Ray driver
        takes over signals for good."""
        import json

        from specs.errors import Issue, read_issue

        try:
            asked = subprocess.run(
                [sys.executable, "-P", "-m", "pipelines.launchers.ray.examination"],
                input=experiment.model_dump_json(),
                capture_output=True,
                encoding="utf-8",
                timeout=_ASK_SECONDS,
            )
        except subprocess.TimeoutExpired:
            why = f"no answer within {_ASK_SECONDS:g} s"
            return Room((Issue("cannot be asked of Ray", ("launcher",), hint=why),))
        try:
            answer = json.loads(asked.stdout.splitlines()[-1])
        except (ValueError, IndexError):
            why = "".join(asked.stderr.strip().splitlines()[-1:])
            return Room((Issue("cannot be asked of Ray", ("launcher",), hint=why),))
        return Room(tuple(map(read_issue, answer["obstacles"])), answer["launches"])

    def examine(self, home: "Home", experiment: "Experiment | None") -> Iterator[Finding]:
        """Checks whether the spec's cluster answers and can ever hold its run, and whether its nodes see this home and
        have this code; without a spec, whether Ray is installed."""
        from pipelines.launchers.ray.examination import examine_cluster, examine_installation

        yield from examine_installation() if experiment is None else examine_cluster(home, experiment)


LAUNCHER: Launcher = RayRanks()
