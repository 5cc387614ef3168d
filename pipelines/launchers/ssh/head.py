"""Holds a run over ssh hosts together: `python -m pipelines.launchers.ssh.head RUN_DIR [STAGE]`, started by the
supervisor.

A lost host, or a rank or engine that a signal killed, brings training back from its last checkpoint, and evaluation
from its beginning, on the hosts that answer. Exit codes are the ranks': 0, 1, 2, 143 when stopped; 128 + the signal's
number where one killed a rank or an engine.
"""

import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from pipelines.launchers import LaunchedStage, launched_stage, passed_on, problems_file, write_launch
from pipelines.launchers.ranks import Losses, Share, log_of, number_range, verdict
from pipelines.launchers.ssh.connection import (
    POLL_SECONDS,
    Connection,
    await_answers,
    leave_token,
    receive_until,
    version_differences,
)
from pipelines.launchers.ssh.node import machine_versions
from pipelines.processes.supervisor import log_tail
from specs.errors import Issue
from specs.machine.exit_cause import SIGNALLED, STOPPED, USER_ERROR, forget_exits, leave_issues
from specs.machine.launch import ENGINES_ELSEWHERE, KEY, LOOPBACK, new_key
from specs.machine.parent import die_with_parent
from specs.schema.experiment import Experiment
from specs.schema.launchers import SshLauncher

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


class SshHead:
    """The process that holds one run's connections: it launches the ranks until they are done, fail, or are lost."""

    def __init__(self, run_directory: Path, stage: LaunchedStage) -> None:
        self._directory = run_directory
        self._stage = stage
        self._spec = Experiment.model_validate_json((run_directory / "spec.json").read_bytes())
        assert isinstance(self._spec.launcher, SshLauncher)
        self._launcher = self._spec.launcher
        self._hosts = self._launcher.read_hosts()
        self._token = leave_token(run_directory)
        self._stopping = False
        signal.signal(signal.SIGTERM, self._stop)

    def run(self) -> int:
        """Launches until the stage is done, fails, or too much was lost. Returns the exit code."""
        losses, number = Losses(), 1
        while True:
            ending = self._launch(number)
            if not ending.lost or self._stopping:
                return STOPPED if ending.lost else ending.code
            if not losses.add(self._directory, self._launcher.restarts):
                return ending.code
            origin = (losses.stood_at if self._stage == "train" else "") or "the beginning"
            _say(f"goes on from {origin} in {ending.fence_seconds:.0f} s (loss {losses.losses})")
            self._wait(ending.fence_seconds)
            forget_exits(self._directory)
            number += 1

    def _launch(self, number: int) -> LaunchEnding:
        """One launch, from connecting to the hosts to the end of what runs there."""
        connections: list[Connection] = []
        secret = {KEY: new_key(), **({ENGINES_ELSEWHERE: "1"} if self._launcher.engine_hosts else {})}
        try:
            connections += self._connect(secret, patience=self._launcher.recover_seconds if number > 1 else 0.0)
            if self._stopping:
                return LaunchEnding(STOPPED)
            if not connections:
                return LaunchEnding(1)
            if issues := self._unfit(connections):
                leave_issues(problems_file(self._directory, self._stage), issues)
                return LaunchEnding(USER_ERROR)
            self._start(connections, number)
            return self._watch(connections)
        finally:
            for connection in connections:
                connection.close()

    def _connect(self, secret: Mapping[str, str], *, patience: float) -> list[Connection]:
        """Connections to as many hosts as the ranks and then their engines need, in the spec's order; empty where too
        few answer.

        Args:
            secret: see Connection.
            patience: seconds in which all of training.ranks must find room; after these launcher.min_ranks are enough.
        """
        deadline = time.monotonic() + patience
        while not self._stopping:
            connections = [
                Connection(host, self._launcher, self._directory, self._token, secret)
                for host in (*self._hosts, *self._launcher.engine_hosts)
            ]
            await_answers(connections, self._launcher.connect_seconds)
            late = time.monotonic() >= deadline
            chosen = choose(self._spec, connections, fewest=self._launcher.min_ranks if late else 0)
            for connection in connections:
                if connection not in chosen:
                    if connection.refused or not connection.hello:
                        _say(f"{connection.host.host}: {connection.refused or 'cannot be reached'}")
                    connection.close()
            if chosen:
                return chosen
            if late:
                engines = " and their engines" if self._launcher.engine_hosts else ""
                _say(f"too few hosts answer for {self._spec.training.ranks} ranks{engines}")
                break
            self._wait(_RETRY_SECONDS)
        return []

    def _unfit(self, connections: Sequence[Connection]) -> list[Issue]:
        """Obstacle that keeps these hosts from training together."""
        here, issues = machine_versions(), []
        for connection in connections:
            name, address = connection.host.host, connection.hello["address"]
            key = "engine_hosts" if connection.engines else "hostfile" if self._launcher.hostfile else "hosts"
            path = ("launcher", key)
            if connection.engines and ":" in address:
                hint = 'write launcher.ssh: [ssh, "-4"], or a launcher.interface with an IPv4 address'
                issues.append(Issue(f"{name} has engines and is reached by IPv6", path, given=address, hint=hint))
            if not connection.hello["shared"]:
                hint = "launcher ssh needs RPG_HOME on a file system that all hosts share, at the same path"
                issues.append(Issue(f"{name} does not see the run's directory", path, hint=hint))
            if differences := version_differences(here, connection.hello["versions"]):
                issues.append(Issue(f"{name} has other versions", path, given=differences))
        return issues

    def _start(self, connections: Sequence[Connection], number: int) -> None:
        """Orders every host to start its share, and records what was chosen."""
        first, with_ranks = connections[0].hello, [each for each in connections if each.ranks]
        world_size = sum(len(each.ranks) for each in connections)
        meeting = first["address"] if len(connections) > 1 else LOOPBACK
        (self._directory / "logs").mkdir(exist_ok=True)
        hosts = []
        for node, connection in enumerate(connections):
            log = log_of(self._directory, self._stage, node, connection.host.host)
            ranks, engines = connection.ranks, connection.engines
            share = Share(
                run_dir=str(self._directory),
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
                device=self._spec.resources.device,
                gpus=len(engines) * self._spec.rollout.gpus_per_sampler or self._spec.gpus_beside(len(ranks)),
                threads=self._spec.resources.threads,
                interface=connection.hello["interface"],
                environment=self._launcher.environment,
                stage=self._stage,
            )
            connection.start(share)
            numbers = {
                name: number_range(of_host.start, len(of_host))
                for name, of_host in (("ranks", ranks), ("engines", engines))
                if of_host
            }
            address = {key: connection.hello[key] for key in ("address", "interface")}
            hosts.append({"host": connection.host.host, **numbers, **address, "log": log.name})
        environment = passed_on() | self._launcher.environment
        rendezvous = f"{meeting}:{first['port']}"
        chosen = {"go": number, "rendezvous": rendezvous, "hosts": hosts}
        write_launch(self._directory, "ssh", environment=environment, stage=self._stage, **chosen)
        fewer = f" (of {self._spec.training.ranks})" if world_size < self._spec.training.ranks else ""
        places = f"{world_size} ranks{fewer} on {_names(with_ranks)}"
        if with_engines := [each for each in connections if each.engines]:
            places += f", {sum(len(each.engines) for each in with_engines)} engines on {_names(with_engines)}"
        _say(f"{places}; they meet at {rendezvous}")

    def _watch(self, connections: Sequence[Connection]) -> LaunchEnding:
        """Until all ranks have ended; a failure or a loss on one host ends the others. How engines end that no rank
        needs any more is of no account."""
        asked_to_stop, with_ranks = False, [each for each in connections if each.ranks]
        while not all(map(self._over, with_ranks)):
            if self._stopping and not asked_to_stop:
                asked_to_stop = True
                for connection in connections:
                    connection.order("stop")
            receive_until(lambda: False, connections, POLL_SECONDS)
            if any(self._over(connection) and not _ended_well(connection) for connection in connections):
                break
        for connection in connections:
            connection.order("kill")
        receive_until(lambda: all(map(self._over, connections)), connections, float("inf"))
        return self._ending(with_ranks if all(map(_ended_well, with_ranks)) else connections)

    def _over(self, connection: Connection) -> bool:
        return bool(connection.ended or connection.refused or self._lost(connection))

    def _lost(self, connection: Connection) -> bool:
        """Whether the host went away, be it for a while: when it is back, its ranks have been ended."""
        silent = connection.silent_seconds() > self._launcher.lost_after_seconds
        if not connection.ended and not connection.refused and (connection.closed or silent):
            connection.lost = True
        return connection.lost

    def _ending(self, connections: Sequence[Connection]) -> LaunchEnding:
        for connection in connections:
            if connection.refused:
                _say(f"{connection.host.host}: {connection.refused}")
                return LaunchEnding(1)
        lost = [connection for connection in connections if self._lost(connection)]
        for connection in lost:
            _say(f"{connection.host.host}: lost, {'the connection ended' if connection.closed else 'silent'}")
        for connection in connections:
            if connection.share and connection.failures:
                kind = "a rank" if connection.ranks else "an engine"
                _say(f"{connection.host.host}: {kind} ended with {connection.failures[0]}; the end of its log:")
                _say(log_tail(Path(connection.share.log), since=connection.log_began))
        code = verdict([code for connection in connections for code in connection.codes()])
        if lost:
            return LaunchEnding(code or 1, lost=True, fence_seconds=self._launcher.lost_after_seconds + 1)
        return LaunchEnding(code, lost=code > SIGNALLED and code != STOPPED)

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self._stopping:
            time.sleep(POLL_SECONDS)

    def _stop(self, *_: object) -> None:
        self._stopping = True


def choose(experiment: Experiment, connections: Sequence[Connection], *, fewest: int) -> list[Connection]:
    """The first hosts whose slots are enough, each given its ranks or engines; `fewest` ranks will do, 0: all.

    Of fewer than all there are whole groups of those that share sequences.
    """
    training, rollout, launcher = experiment.training, experiment.rollout, experiment.launcher
    assert isinstance(launcher, SshLauncher)
    answering = [each for each in connections if each.hello and not each.closed]
    with_engines = [each for each in answering if each.host in launcher.engine_hosts]
    with_ranks = [each for each in answering if each not in with_engines]
    slots = [each.host.slots for each in with_ranks]
    room, engines = sum(slots), [each.host.slots // rollout.gpus_per_sampler for each in with_engines]
    if launcher.engine_hosts:
        room = min(room, sum(engines) * rollout.ranks_per_sampler)
    count = min(training.ranks, room // training.sequence_parallel_size * training.sequence_parallel_size)
    if count < max(1, fewest or training.ranks):
        return []
    for connection, numbers in zip(with_ranks, _dealt(count, slots), strict=True):
        connection.ranks = numbers
    for connection, numbers in zip(with_engines, _dealt(rollout.samplers(count), engines), strict=True):
        connection.engines = numbers
    return [each for each in (*with_ranks, *with_engines) if each.ranks or each.engines]


def _ended_well(connection: Connection) -> bool:
    """Whether all its processes are done, or ended as they were asked to."""
    return bool(connection.ended) and not connection.failures and None not in connection.ended["codes"]


def _dealt(count: int, rooms: Sequence[int]) -> list[range]:
    """The numbers below `count`, dealt in order to places that have room for so many each."""
    return [range(min(count, end - room), min(count, end)) for room, end in zip(rooms, accumulate(rooms), strict=True)]


def _names(connections: Sequence[Connection]) -> str:
    return ", ".join(connection.host.host for connection in connections)


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    die_with_parent()
    sys.exit(SshHead(Path(sys.argv[1]), launched_stage(sys.argv[2:])).run())
