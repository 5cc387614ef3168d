"""Holds a run over several machines together, whatever the connections to them go by.

A lost host, or a rank or engine that a signal killed, brings training back from its last checkpoint, and evaluation
from its beginning, on the hosts that answer. Exit codes are the ranks': 0, 1, 2, 143 when stopped; 128 + the signal's
number where one killed a rank or an engine.
"""

import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

from pipelines.launchers import LaunchedStage, passed_on, problems_file, write_launch
from pipelines.launchers.hosts.connection import (
    POLL_SECONDS,
    Connection,
    leave_token,
    receive_until,
    version_differences,
)
from pipelines.launchers.hosts.node import machine_versions
from pipelines.launchers.ranks import Losses, Share, log_of, number_range, verdict
from pipelines.processes.supervisor import log_tail
from specs.errors import Issue
from specs.machine.exit_cause import SIGNALLED, STOPPED, USER_ERROR, forget_exits, leave_issues
from specs.machine.launch import ENGINES_ELSEWHERE, KEY, LOOPBACK, new_key
from specs.reading.recorded import recorded_spec
from specs.schema.launchers import HostsLauncher

_RETRY_SECONDS = 2.0
"""Between two tries to reach enough hosts."""


@dataclass(frozen=True, slots=True)
class LaunchEnding:
    """How one launch of the ranks ended."""

    code: int
    lost: bool = False
    """A host, a rank or an engine went away: worth another launch, once `fence_seconds` have passed."""
    fence_seconds: float = 0.0
    """After these even a host that hears nothing has ended what runs there."""


class Head(ABC):
    """The process that holds one run's connections: it launches the ranks until they are done, fail, or are lost."""

    def __init__(self, run_directory: Path, stage: LaunchedStage) -> None:
        self.directory = run_directory
        self.stage = stage
        self.spec = recorded_spec(run_directory)
        self.token = leave_token(run_directory)
        self.stopping = False
        signal.signal(signal.SIGTERM, self._stop)

    def run(self) -> int:
        """Launches until the stage is done, fails, or too much was lost. Returns the exit code."""
        losses, number = Losses(), 1
        while True:
            ending = self._launch(number)
            if not ending.lost or self.stopping:
                return STOPPED if ending.lost else ending.code
            if not losses.add(self.directory, self.launcher.restarts):
                return ending.code
            origin = (losses.stood_at if self.stage == "train" else "") or "the beginning"
            say(f"goes on from {origin} in {ending.fence_seconds:.0f} s (loss {losses.losses})")
            self.wait(ending.fence_seconds)
            forget_exits(self.directory)
            number += 1

    def _launch(self, number: int) -> LaunchEnding:
        """One launch, from connecting to the hosts to the end of what runs there."""
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

    @property
    @abstractmethod
    def launcher(self) -> HostsLauncher:
        """The spec's section."""

    @abstractmethod
    def connect(self, secret: Mapping[str, str], *, patience: float) -> list[Connection]:
        """Connections to the machines of a launch, each with its ranks or engines, those with ranks first; empty where
        too few can be had, which has been said.

        Args:
            secret: see Connection.
            patience: seconds in which all of training.ranks must find room; after these launcher.min_ranks are enough.
        """

    def key_of(self, connection: Connection) -> tuple[str, ...]:
        """The key of the spec by which a machine came to be one of the launch's."""
        del connection
        return ("launcher",)

    def leaving(self) -> str:
        """Machines of the launch that are about to be taken away; empty where that is known of none."""
        return ""

    def unfit(self, connection: Connection) -> Iterator[Issue]:
        """Obstacles that this kind of connection puts in the way of training there."""
        del connection
        yield from ()

    def _unfit(self, connections: Sequence[Connection]) -> list[Issue]:
        """Obstacle that keeps these hosts from training together."""
        here, issues, kind = machine_versions(), list[Issue](), self.launcher.type
        for connection in connections:
            name, path = connection.name, self.key_of(connection)
            issues += self.unfit(connection)
            if not connection.hello["shared"]:
                hint = f"launcher {kind} needs RPG_HOME on a file system that all hosts share, at the same path"
                issues.append(Issue(f"{name} does not see the run's directory", path, hint=hint))
            if differences := version_differences(here, connection.hello["versions"]):
                issues.append(Issue(f"{name} has other versions", path, given=differences))
        return issues

    def _start(self, connections: Sequence[Connection], number: int) -> None:
        """Orders every host to start its share, and records what was chosen."""
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
        write_launch(self.directory, self.launcher.type, environment=environment, stage=self.stage, **chosen)
        fewer = f" (of {self.spec.training.ranks})" if world_size < self.spec.training.ranks else ""
        places = f"{world_size} ranks{fewer} on {_names(with_ranks)}"
        if with_engines := [each for each in connections if each.engines]:
            places += f", {sum(len(each.engines) for each in with_engines)} engines on {_names(with_engines)}"
        say(f"{places}; they meet at {rendezvous}")

    def _watch(self, connections: Sequence[Connection]) -> LaunchEnding:
        """Until all ranks have ended; a failure or a loss on one host ends the others. How engines end that no rank
        needs any more is of no account."""
        asked_to_stop, going, with_ranks = False, "", [each for each in connections if each.ranks]
        while not all(map(self._over, with_ranks)):
            if not asked_to_stop and (self.stopping or (going := self.leaving())):
                asked_to_stop = True
                if going:
                    say(f"{going}: about to be taken away; the run saves its state and goes on elsewhere")
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
        """Whether the host went away, be it for a while: when it is back, its ranks have been ended."""
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
    """Whether all its processes are done, or ended as they were asked to."""
    return bool(connection.ended) and not connection.failures and None not in connection.ended["codes"]


def dealt(count: int, rooms: Sequence[int]) -> list[range]:
    """The numbers below `count`, dealt in order to places that have room for so many each."""
    return [range(min(count, end - room), min(count, end)) for room, end in zip(rooms, accumulate(rooms), strict=True)]


def _names(connections: Sequence[Connection]) -> str:
    return ", ".join(connection.name for connection in connections)


def say(text: str) -> None:
    """Prints for the log of the run."""
    print(text, flush=True)
