"""The head of a run on a Ray cluster: `python -m pipelines.launchers.ray.head RUN_DIR [STAGE]`, started by the
supervisor.

It is a Ray driver. The placement group, its actors and everything that they started end with it, however it ends.

After the loss of a node, or of a rank or engine killed by a signal, training restarts from its last checkpoint, and
evaluation from its beginning, on the nodes that the cluster gives next. Exit codes are the ranks': 0, 1, 2, 143 when
stopped; 128 + the signal's number if a signal killed a rank or an engine.
"""

import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from pipelines.launchers import LaunchedStage, launched_stage, passed_on, problems_file, write_launch
from pipelines.launchers.ranks import Losses, Share, log_of, number_range, verdict
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
from pipelines.launchers.ray.connection import (
    POLL_SECONDS,
    Connection,
    await_answers,
    leave_token,
    receive_until,
    version_differences,
)
from pipelines.launchers.ray.node import machine_versions
from pipelines.processes.supervisor import log_tail
from specs.errors import Issue
from specs.machine.exit_cause import SIGNALLED, STOPPED, USER_ERROR, forget_exits, leave_issues
from specs.machine.launch import ENGINES_ELSEWHERE, KEY, LOOPBACK, new_key
from specs.machine.parent import die_with_parent
from specs.schema.experiment import Experiment
from specs.schema.launchers import RayLauncher

_LOOK_SECONDS = 2.0
"""Seconds between two checks for nodes that will leave soon."""
_PATH = ("launcher",)
_RESUME = "the run saves its state and ends: `rpg resume {}` continues from another node"


@dataclass(frozen=True, slots=True)
class LaunchEnding:
    """The ending of one launch of the ranks."""

    code: int
    lost: bool = False
    """Whether a host, a rank or an engine was lost: worth another launch, once `fence_seconds` have passed."""
    fence_seconds: float = 0.0
    """Seconds after which even an unreachable host has ended its processes."""


class RayHead:
    """The process that holds one run's connections: it launches the ranks until they are done, fail, or are lost.

    Each launch has its own placement group, on the nodes that the cluster gives next.
    """

    def __init__(self, run_directory: Path, stage: LaunchedStage, spec: Experiment, ray: Any) -> None:
        assert isinstance(spec.launcher, RayLauncher)
        self.directory = run_directory
        self.stage = stage
        self.spec = spec
        self.launcher = spec.launcher
        self.token = leave_token(run_directory)
        self.stopping = False
        self._ray = ray
        self._group: Any = None
        self._nodes: dict[str, str] = {}
        """Id of a node of the launch -> its name."""
        self._own = ray.get_runtime_context().get_node_id()
        """Id of the node of this driver, without which it cannot reach the cluster."""
        self._looked_at = 0.0
        signal.signal(signal.SIGTERM, self._stop)

    def run(self) -> int:
        """Launches until the stage is done, fails, or has lost too much. Returns the exit code."""
        losses, number = Losses(), 1
        while True:
            ending = self._launch(number)
            if not ending.lost or self.stopping:
                return STOPPED if ending.lost else ending.code
            if not losses.add(self.directory, self.launcher.restarts):
                return ending.code
            origin = (losses.stood_at if self.stage == "train" else "") or "the beginning"
            say(f"continues from {origin} in {ending.fence_seconds:.0f} s (loss {losses.losses})")
            self.wait(ending.fence_seconds)
            forget_exits(self.directory)
            number += 1

    def _launch(self, number: int) -> LaunchEnding:
        """Does one launch, from connecting to the hosts to the end of their processes."""
        connections: list[Connection] = []
        secret = {KEY: new_key(), **({ENGINES_ELSEWHERE: "1"} if self.launcher.engines_key else {})}
        try:
            connections += self.connect(secret, patience=self.launcher.recover_seconds if number > 1 else 0.0)
            if self.stopping:
                return LaunchEnding(STOPPED)
            if not connections:
                return LaunchEnding(1)
            if issues := self._unfit(connections):
                leave_issues(problems_file(self.directory, self.stage), issues)
                return LaunchEnding(USER_ERROR)
            self._start(connections, number)
            return self._watch(connections)
        finally:
            for connection in connections:
                connection.close()

    def connect(self, secret: Mapping[str, str], *, patience: float) -> list[Connection]:
        """Opens a channel into each bundle of a placement group that holds all ranks and their engines.

        The first launch waits for the group without limit: others may use the resources, or the cluster grows.
        """
        self.close()
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
        """Returns the nodes of the launch that the cluster drains, for example before it preempts them. If this
        driver's own node is among them, or is drained without a rank on it, the run ends as a stopped one."""
        if time.monotonic() - self._looked_at < _LOOK_SECONDS:
            return ""
        self._looked_at = time.monotonic()
        nodes = draining(self._ray)
        if self._own in nodes and not self.stopping:
            say(f"this command's own node is about to be removed; {_RESUME.format(self.directory.name)}")
            self.stopping = True
        return "" if self.stopping else ", ".join(self._nodes[node] for node in nodes if node in self._nodes)

    def _granted(self, wanted: list[Resources], deadline: float) -> bool:
        """Requests a group of these bundles and waits for it until the deadline, but at least a second."""
        from ray.util import placement_group, remove_placement_group

        group = placement_group(wanted, strategy="SPREAD", name=self.directory.name)
        said = False
        while not self.stopping:
            if group.wait(timeout_seconds=1):
                self._group = group
                return True
            self.leaving()  # checks this driver's own node
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
        connections = [
            Connection(f"node-{bundle}", channel, self.launcher, self.directory, self.token, secret)
            for bundle, channel in enumerate(channels)
        ]
        for bundle, connection in enumerate(connections[:nodes]):
            connection.ranks = range(bundle * ranks, (bundle + 1) * ranks)
        for connection, end, count in zip(connections[nodes:], accumulate(engines), engines, strict=True):
            connection.engines = range(end - count, end)
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

    def close(self) -> None:
        """Releases the placement group."""
        if self._group is not None:
            from ray.util import remove_placement_group

            remove_placement_group(self._group)
            self._group = None

    def _unfit(self, connections: Sequence[Connection]) -> list[Issue]:
        """Returns the obstacles that keep these nodes from training together."""
        here, issues = machine_versions(), list[Issue]()
        for connection in connections:
            name, hello = connection.name, connection.hello
            if connection.engines and ":" in hello["address"]:
                hint = "write a launcher.interface with an IPv4 address"
                issues.append(
                    Issue(f"{name} has engines and is reached by IPv6", _PATH, given=hello["address"], hint=hint)
                )
            if not hello["shared"]:
                hint = "launcher ray needs RPG_HOME on a file system that all hosts share, at the same path"
                issues.append(Issue(f"{name} does not see the run's directory", _PATH, hint=hint))
            if differences := version_differences(here, hello["versions"]):
                issues.append(Issue(f"{name} has other versions", _PATH, given=differences))
        return issues

    def _start(self, connections: Sequence[Connection], number: int) -> None:
        """Orders every host to start its share, and records the choices."""
        first, with_ranks = connections[0].hello, [each for each in connections if each.ranks]
        world_size = sum(len(each.ranks) for each in connections)
        meeting = first["address"] if len(connections) > 1 else LOOPBACK
        (self.directory / "logs").mkdir(exist_ok=True)
        hosts = []
        for node, connection in enumerate(connections):
            log = log_of(self.directory, self.stage, node, connection.name)
            ranks, engines = connection.ranks, connection.engines
            share = Share(
                run_dir=str(self.directory),
                world_size=world_size,
                node=node,
                nodes=len(with_ranks),
                master_address=meeting,
                master_port=first["port"],
                log=str(log),
                first_rank=ranks.start,
                ranks=len(ranks),
                first_engine=engines.start,
                engines=len(engines),
                address=connection.hello["address"],
                device=self.spec.resources.device,
                gpus=len(engines) * self.spec.rollout.gpus_per_sampler or self.spec.gpus_beside(len(ranks)),
                threads=self.spec.resources.threads,
                interface=connection.hello["interface"],
                environment=self.launcher.environment,
                stage=self.stage,
            )
            connection.start(share)
            numbers = {
                name: number_range(of_host.start, len(of_host))
                for name, of_host in (("ranks", ranks), ("engines", engines))
                if of_host
            }
            address = {key: connection.hello[key] for key in ("address", "interface")}
            hosts.append({"host": connection.name, **numbers, **address, "log": log.name})
        environment = passed_on() | self.launcher.environment
        rendezvous = f"{meeting}:{first['port']}"
        chosen = {"go": number, "rendezvous": rendezvous, "hosts": hosts}
        write_launch(self.directory, "ray", environment=environment, stage=self.stage, **chosen)
        fewer = f" (of {self.spec.training.ranks})" if world_size < self.spec.training.ranks else ""
        places = f"{world_size} ranks{fewer} on {_names(with_ranks)}"
        if with_engines := [each for each in connections if each.engines]:
            places += f", {sum(len(each.engines) for each in with_engines)} engines on {_names(with_engines)}"
        say(f"{places}; they meet at {rendezvous}")

    def _watch(self, connections: Sequence[Connection]) -> LaunchEnding:
        """Waits until all ranks have ended; a failure or a loss on one host ends the others. The exit codes of engines
        that no rank needs any more do not count."""
        asked_to_stop, going, with_ranks = False, "", [each for each in connections if each.ranks]
        while not all(map(self._over, with_ranks)):
            if not asked_to_stop and (self.stopping or (going := self.leaving())):
                asked_to_stop = True
                if going:
                    say(f"{going}: about to be removed; the run saves its state and continues elsewhere")
                for connection in connections:
                    connection.order("stop")
            receive_until(lambda: False, connections, POLL_SECONDS)
            if any(self._over(connection) and not _ended_well(connection) for connection in connections):
                break
        for connection in connections:
            connection.order("kill")
        receive_until(lambda: all(map(self._over, connections)), connections, float("inf"))
        ending = self._ending(with_ranks if all(map(_ended_well, with_ranks)) else connections)
        return replace(ending, lost=True) if going and ending.code == STOPPED else ending

    def _over(self, connection: Connection) -> bool:
        return bool(connection.ended or connection.refused or self._lost(connection))

    def _lost(self, connection: Connection) -> bool:
        """Returns whether the host was lost, even temporarily: when it is back, its ranks have been ended."""
        silent = connection.silent_seconds() > self.launcher.lost_after_seconds
        if not connection.ended and not connection.refused and (connection.closed or silent):
            connection.lost = True
        return connection.lost

    def _ending(self, connections: Sequence[Connection]) -> LaunchEnding:
        for connection in connections:
            if connection.refused:
                say(f"{connection.name}: {connection.refused}")
                return LaunchEnding(1)
        lost = [connection for connection in connections if self._lost(connection)]
        for connection in lost:
            say(f"{connection.name}: lost, {'the connection ended' if connection.closed else 'silent'}")
        for connection in connections:
            if connection.share and connection.failures:
                kind = "a rank" if connection.ranks else "an engine"
                say(f"{connection.name}: {kind} ended with {connection.failures[0]}; the end of its log:")
                say(log_tail(Path(connection.share.log), since=connection.log_began))
        code = verdict([code for connection in connections for code in connection.codes()])
        if lost:
            return LaunchEnding(code or 1, lost=True, fence_seconds=self.launcher.lost_after_seconds + 1)
        return LaunchEnding(code, lost=code > SIGNALLED and code != STOPPED)

    def wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self.stopping:
            time.sleep(POLL_SECONDS)

    def _stop(self, *_: object) -> None:
        self.stopping = True


def _ended_well(connection: Connection) -> bool:
    """Returns whether all its processes are done, or ended as requested."""
    return bool(connection.ended) and not connection.failures and None not in connection.ended["codes"]


def _names(connections: Sequence[Connection]) -> str:
    return ", ".join(connection.name for connection in connections)


def say(text: str) -> None:
    """Prints a line to the run's log."""
    print(text, flush=True)


def main(run_directory: Path, stage: LaunchedStage) -> int:
    """Runs the program; returns the exit code."""
    from specs.reading.recorded import recorded_spec

    experiment = recorded_spec(run_directory)
    assert isinstance(experiment.launcher, RayLauncher)
    try:
        with connected(experiment.launcher) as ray:
            head = RayHead(run_directory, stage, experiment, ray)
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
