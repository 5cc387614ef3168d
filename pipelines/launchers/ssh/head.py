"""Holds a run over ssh hosts together: `python -m pipelines.launchers.ssh.head RUN_DIR [STAGE]`, started by the
supervisor.

A lost host or a rank that a signal killed brings training back from its last checkpoint, and evaluation from its
beginning, on the hosts that answer. Exit codes are the ranks': 0, 1, 2, 143 when stopped; 128 + the signal's number
where one killed a rank.
"""

import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pipelines.launchers import LaunchedStage, launched_stage, passed_on, problems_file, write_launch
from pipelines.launchers.ranks import ENDED_WELL, Losses, Share, log_of, rank_range, verdict
from pipelines.launchers.ssh.connection import (
    POLL_SECONDS,
    Connection,
    await_answers,
    leave_token,
    receive_until,
    version_differences,
)
from pipelines.launchers.ssh.node import machine_versions
from pipelines.processes.supervisor import log_size, log_tail
from rpg.processes.exit_cause import SIGNALLED, STOPPED, USER_ERROR, forget_exits, leave_issues
from rpg.processes.parent import die_with_parent
from specs.errors import Issue
from specs.schema.experiment import Experiment
from specs.schema.launchers import SshLauncher

_RETRY_SECONDS = 2.0
"""Between two tries to reach enough hosts."""


@dataclass(frozen=True, slots=True)
class LaunchEnding:
    """How one launch of the ranks ended."""

    code: int
    lost: bool = False
    """A host or a rank went away: worth another launch, once `fence_seconds` have passed."""
    fence_seconds: float = 0.0
    """After these even a host that hears nothing has ended its ranks."""


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
        """One launch, from connecting to the hosts to the end of their ranks."""
        connections: list[Connection] = []
        try:
            connections += self._connect(patience=self._launcher.recover_seconds if number > 1 else 0.0)
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

    def _connect(self, *, patience: float) -> list[Connection]:
        """Connections to as many hosts as the ranks need, in the spec's order; empty where too few answer.

        Args:
            patience: seconds in which all of training.ranks must find room; after these launcher.min_ranks are enough.
        """
        deadline = time.monotonic() + patience
        while not self._stopping:
            connections = [Connection(host, self._launcher, self._directory, self._token) for host in self._hosts]
            await_answers(connections, self._launcher.connect_seconds)
            late = time.monotonic() >= deadline
            chosen = self._choose(connections, fewest=self._launcher.min_ranks if late else 0)
            for connection in connections:
                if connection not in chosen:
                    if connection.refused or not connection.hello:
                        _say(f"{connection.host.host}: {connection.refused or 'cannot be reached'}")
                    connection.close()
            if chosen:
                return chosen
            if late:
                _say(f"too few hosts answer for {self._spec.training.ranks} ranks")
                break
            self._wait(_RETRY_SECONDS)
        return []

    def _choose(self, connections: Sequence[Connection], *, fewest: int) -> list[Connection]:
        """The first hosts whose slots are enough, each given its ranks; `fewest` ranks will do, 0: all of them.

        Of fewer than all there are whole groups of those that share sequences.
        """
        training = self._spec.training
        chosen, placed, slots = [], 0, sum(each.host.slots for each in connections if each.hello and not each.closed)
        wanted = min(training.ranks, slots // training.sequence_parallel_size * training.sequence_parallel_size)
        for connection in connections:
            if connection.hello and not connection.closed and placed < wanted:
                connection.first_rank, connection.ranks = placed, min(connection.host.slots, wanted - placed)
                placed += connection.ranks
                chosen.append(connection)
        return chosen if placed >= max(1, fewest or training.ranks) else []

    def _unfit(self, connections: Sequence[Connection]) -> list[Issue]:
        """What keeps these hosts from training together."""
        here, issues = machine_versions(), []
        path = ("launcher", "hostfile" if self._launcher.hostfile else "hosts")
        for connection in connections:
            name = connection.host.host
            if not connection.hello["shared"]:
                hint = "launcher ssh needs RPG_HOME on a file system that all hosts share, at the same path"
                issues.append(Issue(f"{name} does not see the run's directory", path, hint=hint))
            if differences := version_differences(here, connection.hello["versions"]):
                issues.append(Issue(f"{name} has other versions", path, given=differences))
        return issues

    def _start(self, connections: Sequence[Connection], number: int) -> None:
        """Orders every host to start its ranks, and records what was chosen."""
        first, ranks = connections[0].hello, sum(connection.ranks for connection in connections)
        master, port = first["address"], first["port"]
        (self._directory / "logs").mkdir(exist_ok=True)
        hosts = []
        for node, connection in enumerate(connections):
            log = log_of(self._directory, self._stage, node, connection.host.host)
            share = Share(
                run_dir=str(self._directory),
                first_rank=connection.first_rank,
                ranks=connection.ranks,
                world_size=ranks,
                node=node,
                nodes=len(connections),
                master_address=master,
                master_port=port,
                log=str(log),
                device=self._spec.resources.device,
                gpus=self._spec.rollout.gpus(connection.ranks),
                interface=connection.hello["interface"],
                environment=self._launcher.environment,
                stage=self._stage,
            )
            connection.log, connection.log_began = log, log_size(log)
            connection.order("start", **asdict(share))
            address = {key: connection.hello[key] for key in ("address", "interface")}
            share_of_ranks = rank_range(share.first_rank, share.ranks)
            hosts.append({"host": connection.host.host, "ranks": share_of_ranks, **address, "log": log.name})
        environment = passed_on() | self._launcher.environment
        rendezvous = f"{master}:{port}"
        chosen = {"go": number, "rendezvous": rendezvous, "hosts": hosts}
        write_launch(self._directory, "ssh", environment=environment, stage=self._stage, **chosen)
        names = ", ".join(host["host"] for host in hosts)
        fewer = f" (of {self._spec.training.ranks})" if ranks < self._spec.training.ranks else ""
        _say(f"{ranks} ranks{fewer} on {names}; they meet at {rendezvous}")

    def _watch(self, connections: Sequence[Connection]) -> LaunchEnding:
        """Until all ranks have ended; a failure or a loss on one host ends the others."""
        asked_to_stop = False
        while not all(self._over(connection) for connection in connections):
            if self._stopping and not asked_to_stop:
                asked_to_stop = True
                for connection in connections:
                    connection.order("stop")
            receive_until(lambda: False, connections, POLL_SECONDS)
            if any(self._over(connection) and not _ended_well(connection) for connection in connections):
                for connection in connections:
                    connection.order("kill")
                receive_until(lambda: all(map(self._over, connections)), connections, float("inf"))
        return self._ending(connections)

    def _over(self, connection: Connection) -> bool:
        return bool(connection.ended or connection.refused or self._lost(connection))

    def _lost(self, connection: Connection) -> bool:
        silent = connection.silent_seconds() > self._launcher.lost_after_seconds
        return not connection.ended and not connection.refused and (connection.closed or silent)

    def _ending(self, connections: Sequence[Connection]) -> LaunchEnding:
        for connection in connections:
            if connection.refused:
                _say(f"{connection.host.host}: {connection.refused}")
                return LaunchEnding(1)
        lost = [connection for connection in connections if self._lost(connection)]
        for connection in lost:
            _say(f"{connection.host.host}: lost, {'the connection ended' if connection.closed else 'silent'}")
        for connection in connections:
            if failed := [code for code in connection.codes() if code not in ENDED_WELL]:
                _say(f"{connection.host.host}: a rank ended with {failed[0]}; the end of its log:")
                _say(log_tail(connection.log, since=connection.log_began))
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


def _ended_well(connection: Connection) -> bool:
    """Whether all its ranks are done, or ended as they were asked to."""
    return bool(connection.ended) and set(connection.ended["codes"]) <= set(ENDED_WELL)


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    die_with_parent()
    sys.exit(SshHead(Path(sys.argv[1]), launched_stage(sys.argv[2:])).run())
