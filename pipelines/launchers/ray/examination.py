"""Checks of Ray and a spec's cluster: for `rpg doctor`, and as a program that runs before a run starts,
`python -m pipelines.launchers.ray.examination`; it reads the spec on stdin, and writes obstacles and
capacity to stdout."""

import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from pipelines.home.home import Home
from pipelines.launchers import Finding
from pipelines.launchers.ray.cluster import (
    ClusterError,
    RayChannel,
    bundles,
    connected,
    in_words,
    lacking,
    launches,
    on_gpus,
)
from pipelines.launchers.ray.connection import Connection, await_answers, examine, leave_token
from specs.errors import Issue
from specs.schema.experiment import Experiment
from specs.schema.launchers import RayLauncher

OPEN_PORTS = "Ray's ports run code of anyone who can connect: keep them behind a firewall, or set RAY_AUTH_MODE=token"


def examine_installation() -> Iterator[Finding]:
    """Checks whether Ray is installed here."""
    if find_spec("ray") is None:
        yield Finding("launcher ray", "note", "no ray here")
    else:
        yield Finding("launcher ray", "ok", f"ray {metadata.version('ray')}")


def examine_cluster(home: Home, experiment: Experiment) -> Iterator[Finding]:
    """Checks that the cluster answers and can hold the run, and that its nodes see this home and have this code."""
    launcher = experiment.launcher
    assert isinstance(launcher, RayLauncher)
    try:
        with connected(launcher) as ray:
            wanted = bundles(experiment, launcher.nodes, gpus=on_gpus(ray, experiment))
            has = in_words(ray.cluster_resources())
            yield Finding("ray cluster", "note", f"{OPEN_PORTS} ({has})")
            if why := lacking(ray, wanted):
                yield Finding("room for the run", "note" if launcher.autoscaling else "broken", why)
                return
            yield Finding("room for the run", "ok", "; ".join(map(in_words, wanted)))
            yield from _nodes(ray, home, launcher)
    except ClusterError as error:
        yield Finding("ray cluster", "broken", str(error))


def _nodes(ray: object, home: Home, launcher: RayLauncher) -> Iterator[Finding]:
    """Yields a finding for each node of the cluster, from an actor that uses none of its resources."""
    home.create()
    with tempfile.TemporaryDirectory(dir=home.root, prefix=".doctor-") as directory:
        token = leave_token(Path(directory))
        connections = [
            Connection(
                node["NodeManagerHostname"],
                RayChannel.on_node(ray, node["NodeID"], launcher.python),
                launcher,
                Path(directory),
                token,
            )
            for node in ray.nodes()  # type: ignore[attr-defined]
            if node["Alive"]
        ]
        try:
            await_answers(connections, launcher.connect_seconds)
            for connection in connections:
                yield examine(connection)
        finally:
            for connection in connections:
                connection.close()


def _room(experiment: Experiment) -> tuple[list[Issue], int]:
    """Returns the obstacles, and the number of such runs for which there is capacity now."""
    launcher = experiment.launcher
    assert isinstance(launcher, RayLauncher)
    try:
        with connected(launcher) as ray:
            wanted = bundles(experiment, launcher.nodes, gpus=on_gpus(ray, experiment))
            if not launcher.autoscaling and (why := lacking(ray, wanted)):
                hint = "request less, or set `autoscaling: true` if the cluster can add nodes"
                return [Issue("the Ray cluster cannot hold the run", ("launcher",), given=why, hint=hint)], 0
            return [], launches(ray, wanted)
    except ClusterError as error:
        return [Issue(str(error), ("launcher", "address"), given=launcher.address)], 0


if __name__ == "__main__":
    found, room = _room(Experiment.model_validate_json(sys.stdin.read()))
    print(json.dumps({"obstacles": [asdict(issue) for issue in found], "launches": room}))
