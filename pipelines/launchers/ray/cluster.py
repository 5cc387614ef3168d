"""A Ray cluster as a launch sees it: capacity in a placement group, a channel into each bundle, nodes
that will leave."""

import contextlib
import os
import re
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from pipelines.launchers.ray.connection import NODE, PROJECT
from pipelines.launchers.ray.node import ADDRESS
from specs.schema.experiment import Experiment
from specs.schema.launchers import RayLauncher

Resources = dict[str, float]
"""Name of a Ray resource -> its amount."""


_CONNECT_SECONDS = 10.0
_OF_RAY = re.compile("^node:|memory|_group_")


class ClusterError(Exception):
    """Error raised if the cluster does not answer or Ray is not installed; the message says which."""


@contextmanager
def connected(launcher: RayLauncher) -> Iterator[Any]:
    """Yields the `ray` module, connected to the spec's cluster. Raises ClusterError."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # otherwise it warns of bundles without a GPU
    try:
        import ray
    except ImportError:
        raise ClusterError("Ray is not installed here: pip install 'rpg-experiments[ray]'") from None
    import logging

    address = _address(launcher)
    try:
        if address != "auto":  # Ray would retry for two minutes
            host, _, port = address.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        what = " ".join(str(error).split()) or repr(error)
        raise ClusterError(f"no Ray cluster accepts this command at {address}: {what}") from None
    try:
        yield ray
    finally:
        with contextlib.suppress(Exception):
            ray.shutdown()


def _address(launcher: RayLauncher) -> str:
    """Returns the address of the cluster; for `auto` the one in RAY_ADDRESS, which Ray would use.
    Raises ClusterError."""
    address = launcher.address if launcher.address != "auto" else os.environ.get("RAY_ADDRESS") or "auto"
    if address == "auto":
        _refuse_anothers()
    if "://" in address:
        raise ClusterError(
            f"RAY_ADDRESS={address} is an address for Ray's client, which cannot start runs; use HOST:PORT"
        )
    return address


def _refuse_anothers() -> None:
    """Raises ClusterError if Ray's own search may find a cluster of another user, who could run code as this one: it
    trusts a file in a shared directory, and any local Ray process."""
    shared = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    found = [Path(shared, "ray", "ray_current_cluster")]
    found += [
        Path("/proc", str(process.pid))
        for process in psutil.process_iter(["cmdline"])
        if process.info["cmdline"] and "raylet" in process.info["cmdline"][0]
    ]
    for path in found:
        with contextlib.suppress(FileNotFoundError):
            if path.lstat().st_uid not in (0, os.geteuid()):
                raise ClusterError(
                    f"{path} belongs to user {path.owner()}: set launcher.address or RAY_ADDRESS to use that cluster"
                )


def bundles(experiment: Experiment, nodes: int, *, gpus: bool) -> list[Resources]:
    """Returns the bundles of a launch on a number of nodes: one for each node with ranks, then one for each node with
    engines.

    Args:
        gpus: whether ranks and engines compute on GPUs.
    """
    launcher = _section(experiment)
    ranks = experiment.training.ranks // launcher.nodes
    engines = launcher.engines_of_nodes(experiment.rollout.samplers(ranks * nodes))
    sizes = [(ranks, experiment.gpus_beside(ranks))] * nodes
    sizes += [(count, count * experiment.rollout.gpus_per_sampler) for count in engines]
    return [
        {
            "CPU": count * launcher.cpus_per_rank,
            **({"GPU": float(of_gpus or count)} if gpus else {}),
            **{name: count * amount for name, amount in launcher.resources.items()},
        }
        for count, of_gpus in sizes
    ]


def on_gpus(ray: Any, experiment: Experiment) -> bool:
    """Returns whether ranks compute on GPUs: as the spec says, or if the cluster has any."""
    device = experiment.resources.device
    return device == "cuda" or (device == "auto" and ray.cluster_resources().get("GPU", 0) > 0)


def lacking(ray: Any, wanted: Sequence[Resources]) -> str:
    """Returns why the cluster in its current size can never hold these bundles, in words; empty if it may.

    Each bundle lies on one node, so it must fit into the total of one node.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    for bundle in wanted:
        if not any(_fits(bundle, node) for node in nodes):
            return f"no node has {in_words(bundle)}; nodes have {'; '.join(map(in_words, nodes)) or 'nothing'}"
    sums, there = total(wanted), ray.cluster_resources()
    if not _fits(sums, there):
        return f"{in_words(sums)} are needed, the cluster has {in_words({name: there.get(name, 0) for name in sums})}"
    return ""


def launches(ray: Any, wanted: Sequence[Resources]) -> int:
    """Returns the number of runs with these bundles that fit into the cluster's free resources, counted as one node."""
    free = ray.available_resources()
    return int(min(free.get(name, 0) // amount for name, amount in total(wanted).items() if amount))


def total(wanted: Sequence[Resources]) -> Resources:
    """Returns the sums over bundles."""
    names = {name for bundle in wanted for name in bundle}
    return {name: sum(bundle.get(name, 0) for bundle in wanted) for name in names}


def in_words(resources: Mapping[str, float]) -> str:
    """Returns resources as messages name them: `8 GPU, 16 CPU`. Ray's internal resource names are left out."""
    shown = {name: amount for name, amount in resources.items() if not _OF_RAY.search(name)}
    return ", ".join(f"{amount:g} {name}" for name, amount in sorted(shown.items(), reverse=True)) or "nothing"


class RayChannel:
    """A channel to the node program in one bundle."""

    def __init__(self, ray: Any, python: str, **options: Any) -> None:
        """Starts an actor, which starts the program.

        Args:
            python: the interpreter there; empty: this one's path.
            options: options of the actor, as Ray names them.
        """
        from pipelines.launchers.ray import carrier

        ray.cloudpickle.register_pickle_by_value(carrier)
        path = os.pathsep.join([str(PROJECT), *filter(None, [os.environ.get("PYTHONPATH")])])
        # Two groups: an order must not wait until the program has written something.
        actor = ray.remote(concurrency_groups={"orders": 1, "reports": 1}, **options)(carrier.Carrier)
        command = [python or sys.executable, "-P", "-u", "-m", NODE]
        self._ray, self._end = ray, carrier.END
        self._actor = actor.remote(command, {"PYTHONPATH": path}, ADDRESS)
        self._node = self._actor.node.remote()
        self._report = self._receive()
        self.closed = False

    @classmethod
    def in_bundle(cls, ray: Any, group: Any, bundle: int, resources: Resources, python: str) -> "RayChannel":
        """Opens a channel in a bundle of a placement group, and uses all of its resources."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return cls(
            ray,
            python,
            num_cpus=resources["CPU"],
            num_gpus=resources.get("GPU", 0),
            resources={name: amount for name, amount in resources.items() if name not in ("CPU", "GPU")},
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
        )

    @classmethod
    def on_node(cls, ray: Any, node: str, python: str) -> "RayChannel":
        """Opens a channel on a node, and uses none of its resources."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        return cls(ray, python, num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))

    def node(self) -> str:
        """Returns the id of the actor's node; empty if the actor has ended."""
        try:
            return str(self._ray.get(self._node))
        except self._ray.exceptions.RayError:
            return ""

    def send(self, data: bytes) -> None:
        """Sends bytes to the program."""
        if not self.closed:
            self._actor.send.options(concurrency_group="orders").remote(data)

    def receive(self) -> bytes:
        """Returns the bytes that have arrived."""
        if self.closed or not self._ray.wait([self._report], timeout=0)[0]:
            return b""
        try:
            part: bytes = self._ray.get(self._report)
        except self._ray.exceptions.RayError:
            self.closed = True
            return b""
        if part == self._end:
            self.closed = True
            return b""
        self._report = self._receive()
        return part

    def close(self) -> None:
        """Ends the actor, and with it the program."""
        self.closed = True
        with contextlib.suppress(Exception):
            self._ray.kill(self._actor)

    def _receive(self) -> Any:
        return self._actor.receive.options(concurrency_group="reports").remote()


def draining(ray: Any) -> set[str]:
    """Returns the ids of the nodes that the cluster will remove soon. Ray does not document this query;
    a test checks it."""
    return set(ray._private.state.state.get_draining_nodes())


def _section(experiment: Experiment) -> RayLauncher:
    assert isinstance(experiment.launcher, RayLauncher)
    return experiment.launcher


def _fits(wanted: Mapping[str, float], room: Mapping[str, float]) -> bool:
    return all(room.get(name, 0) >= amount for name, amount in wanted.items())
