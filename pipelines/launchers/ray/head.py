"""Holds a run on a Ray cluster together: `python -m pipelines.launchers.ray.head RUN_DIR [STAGE]`, started by the
supervisor.

It is a driver of Ray's. The placement group, its actors and what they have started end with it, however it ends.
"""

import sys
import time
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

from pipelines.launchers import LaunchedStage, launched_stage
from pipelines.launchers.hosts.connection import Connection, await_answers
from pipelines.launchers.hosts.head import Head, say
from pipelines.launchers.ray.cluster import (
    ClusterError,
    RayChannel,
    Resources,
    bundles,
    connected,
    draining,
    in_words,
    lacking,
    on_gpus,
    total,
)
from specs.machine.parent import die_with_parent
from specs.schema.launchers import RayLauncher

_LOOK_SECONDS = 2.0
"""Between two looks at which nodes are about to go."""
_RESUME = "the run saves its state and ends: `rpg resume {}` goes on from another node"


class RayHead(Head):
    """Takes what the cluster gives next, a placement group a launch."""

    def __init__(self, run_directory: Path, stage: LaunchedStage, ray: Any) -> None:
        super().__init__(run_directory, stage)
        self._ray = ray
        self._group: Any = None
        self._nodes: dict[str, str] = {}
        """Id of a node of the launch -> its name."""
        self._own = ray.get_runtime_context().get_node_id()
        """Id of the node that this driver is on, without which it cannot speak to the cluster."""
        self._looked_at = 0.0

    @property
    def launcher(self) -> RayLauncher:
        """The spec's section."""
        assert isinstance(self.spec.launcher, RayLauncher)
        return self.spec.launcher

    def connect(self, secret: Mapping[str, str], *, patience: float) -> list[Connection]:
        """A channel into each bundle of a placement group that holds all ranks and their engines.

        At the first launch the group is waited for without end: others may have the room, or the cluster grows.
        """
        self._release()
        gpus, nodes = on_gpus(self._ray, self.spec), self.launcher.nodes
        fewest = -(-self.launcher.min_ranks * nodes // self.spec.training.ranks) or nodes
        deadline = time.monotonic() + patience if patience else float("inf")
        wanted = bundles(self.spec, nodes, gpus=gpus)
        if not patience and not self.launcher.autoscaling and (why := lacking(self._ray, wanted)):
            say(f"the Ray cluster cannot hold the run: {why}")
            return []
        while not self.stopping:
            if self._granted(wanted, deadline):
                return self._channels(wanted, nodes, secret)
            if nodes <= fewest:
                say(f"the Ray cluster has no room for {in_words(total(wanted))}")
                break
            nodes -= 1
            wanted = bundles(self.spec, nodes, gpus=gpus)
        return []

    def leaving(self) -> str:
        """The nodes of the launch that the cluster drains, as before it preempts them. Where this driver's own is among
        them, or is drained without a rank on it, the run ends as one that is stopped."""
        if time.monotonic() - self._looked_at < _LOOK_SECONDS:
            return ""
        self._looked_at = time.monotonic()
        nodes = draining(self._ray)
        if self._own in nodes and not self.stopping:
            say(f"this command's own node is about to be taken away; {_RESUME.format(self.directory.name)}")
            self.stopping = True
        return "" if self.stopping else ", ".join(self._nodes[node] for node in nodes if node in self._nodes)

    def close(self) -> None:
        """Gives the placement group back."""
        self._release()

    def _granted(self, wanted: list[Resources], deadline: float) -> bool:
        """Asks for a group of these bundles and waits for it, until the deadline but a second at least."""
        from ray.util import placement_group, remove_placement_group

        group = placement_group(wanted, strategy="SPREAD", name=self.directory.name)
        said = False
        while not self.stopping:
            if group.wait(timeout_seconds=1):
                self._group = group
                return True
            self.leaving()  # this driver's own node
            if time.monotonic() >= deadline:
                break
            if not said:
                said = True
                room, free = in_words(total(wanted)), in_words(self._ray.available_resources())
                print(f"waiting: the run needs {room} of the Ray cluster, of which {free} is free", flush=True)
        remove_placement_group(group)
        return False

    def _channels(self, wanted: list[Resources], nodes: int, secret: Mapping[str, str]) -> list[Connection]:
        ranks = self.spec.training.ranks // self.launcher.nodes
        engines = self.launcher.engines_of_nodes(self.spec.rollout.samplers(ranks * nodes))
        channels = [
            RayChannel.in_bundle(self._ray, self._group, bundle, resources, self.launcher.python)
            for bundle, resources in enumerate(wanted)
        ]
        connections = []
        for bundle, channel in enumerate(channels):
            connection = Connection(
                f"node-{bundle}",
                channel,
                self.launcher,
                self.directory,
                self.token,
                slots=ranks if bundle < nodes else engines[bundle - nodes],
                for_engines=bundle >= nodes,
                secret=secret,
            )
            if bundle < nodes:
                connection.ranks = range(bundle * ranks, (bundle + 1) * ranks)
            connections.append(connection)
        for connection, end in zip(connections[nodes:], accumulate(engines), strict=True):
            connection.engines = range(end - connection.slots, end)
        await_answers(connections, self.launcher.connect_seconds)
        if silent := [each for each in connections if not each.hello]:
            for connection in silent:
                say(f"{connection.name}: {connection.refused or 'does not start'}")
            for connection in connections:
                connection.close()
            return []
        for connection in connections:
            connection.name = f"{connection.hello['host']}-{connection.hello['address']}"
        self._nodes = {channel.node(): each.name for channel, each in zip(channels, connections, strict=True)}
        return connections

    def _release(self) -> None:
        if self._group is not None:
            from ray.util import remove_placement_group

            remove_placement_group(self._group)
            self._group = None


def main(run_directory: Path, stage: LaunchedStage) -> int:
    """The program; returns the exit code."""
    from specs.reading.recorded import recorded_spec

    experiment = recorded_spec(run_directory)
    assert isinstance(experiment.launcher, RayLauncher)
    try:
        with connected(experiment.launcher) as ray:
            head = RayHead(run_directory, stage, ray)
            try:
                return head.run()
            finally:
                head.close()
    except ClusterError as error:
        say(str(error))
        return 1


if __name__ == "__main__":
    die_with_parent()
    sys.exit(main(Path(sys.argv[1]), launched_stage(sys.argv[2:])))
