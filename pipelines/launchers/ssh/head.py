"""Holds a run over ssh hosts together: `python -m pipelines.launchers.ssh.head RUN_DIR`, started by the supervisor.

A lost host or a rank that a signal killed brings the run back from its last checkpoint, on the hosts that answer. Exit
codes are the trainer's: 0, 1, 2, 143 when stopped; 128 + the signal's number where one killed a rank.
"""

import secrets
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from pipelines.launchers.launch_record import passed_on, write_launch
from pipelines.launchers.ranks import ENDED_WELL, Share, log_of, verdict
from pipelines.launchers.ssh.connection import Connection, apart
from pipelines.launchers.ssh.node import versions
from pipelines.processes.supervisor import log_size, log_tail
from rpg.processes.exit_cause import SIGNALLED, STOPPED, USER_ERROR, forget_exits, leave_issues
from rpg.processes.parent import die_with_parent
from specs.errors import Issue
from specs.rules.launchers import hosts_of
from specs.schema.experiment import Experiment
from specs.schema.launchers import SshLauncher

_POLL_SECONDS = 0.05
_AGAIN_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class LaunchEnding:
    """How one go at training ended."""

    code: int
    lost: bool = False
    """A host or a rank went away: worth another go, which `fence_seconds` must pass before."""
    fence_seconds: float = 0.0


class SshHead:
    """One run on its hosts."""

    def __init__(self, run_directory: Path) -> None:
        self._directory = run_directory
        self._spec = Experiment.model_validate_json((run_directory / "spec.json").read_bytes())
        assert isinstance(self._spec.launcher, SshLauncher)
        self._launcher = self._spec.launcher
        self._hosts = hosts_of(self._launcher)
        self._token = secrets.token_hex(8)
        self._stopping = False
        signal.signal(signal.SIGTERM, self._stop)

    def run(self) -> int:
        """Trains until it is done, fails, or too much was lost."""
        (self._directory / "launch.token").write_text(self._token, encoding="utf-8")
        losses, stood_at, go = 0, self._last_checkpoint(), 1
        while True:
            ending = self._go(go)
            if not ending.lost or self._stopping:
                return STOPPED if ending.lost else ending.code
            losses = 1 + (losses if self._last_checkpoint() == stood_at else 0)
            stood_at = self._last_checkpoint()
            if losses > self._launcher.restarts:
                _say(f"lost {losses} times without a checkpoint between: given up (launcher.restarts)")
                return ending.code
            _say(f"goes on from {stood_at or 'the beginning'} in {ending.fence_seconds:.0f} s (loss {losses})")
            self._wait(ending.fence_seconds)
            forget_exits(self._directory)
            go += 1

    def _go(self, go: int) -> LaunchEnding:
        connections: list[Connection] = []
        try:
            connections += self._connect(patience=self._launcher.recover_seconds if go > 1 else 0.0)
            if self._stopping:
                return LaunchEnding(STOPPED)
            if not connections:
                return LaunchEnding(1)
            if issues := self._unlike(connections):
                leave_issues(self._directory / "problems.json", issues)
                return LaunchEnding(USER_ERROR)
            self._start(connections, go)
            return self._watch(connections)
        finally:
            for connection in connections:
                connection.close()

    def _connect(self, *, patience: float) -> list[Connection]:
        """Connections to as many hosts as the ranks need, in the spec's order; empty where there are too few."""
        deadline = time.monotonic() + patience
        while not self._stopping:
            everyone = [Connection(host, self._launcher, self._directory, self._token) for host in self._hosts]
            self._until(partial(_all_answered, everyone), everyone, self._launcher.connect_seconds)
            late = time.monotonic() >= deadline
            chosen = self._chosen(everyone, fewest=self._launcher.min_ranks if late else 0)
            for connection in everyone:
                if connection not in chosen:
                    if connection.refused or not connection.hello:
                        _say(f"{connection.host.host}: {connection.refused or 'cannot be reached'}")
                    connection.close()
            if chosen:
                return chosen
            if late:
                _say(f"too few hosts answer for {self._spec.training.ranks} ranks")
                break
            self._wait(_AGAIN_SECONDS)
        return []

    def _chosen(self, connections: Sequence[Connection], *, fewest: int) -> list[Connection]:
        """The first hosts whose slots are enough, each with its ranks; `fewest` ranks will do, 0: all of them."""
        chosen, placed, wanted = [], 0, self._spec.training.ranks
        for connection in connections:
            if connection.hello and not connection.closed and placed < wanted:
                connection.first_rank, connection.ranks = placed, min(connection.host.slots, wanted - placed)
                placed += connection.ranks
                chosen.append(connection)
        return chosen if placed >= (fewest or wanted) else []

    def _unlike(self, connections: Sequence[Connection]) -> list[Issue]:
        """What keeps these hosts from training together."""
        here, problems = versions(), []
        where = ("launcher", "hostfile" if self._launcher.hostfile else "hosts")
        for connection in connections:
            name = connection.host.host
            if not connection.hello["shared"]:
                hint = "launcher ssh needs RPG_HOME on a file system that all hosts share, at the same path"
                problems.append(Issue(f"{name} does not see the run's directory", where, hint=hint))
            if other := apart(here, connection.hello["versions"]):
                problems.append(Issue(f"{name} has other versions", where, given=other))
        return problems

    def _start(self, connections: Sequence[Connection], go: int) -> None:
        first, ranks = connections[0].hello, sum(connection.ranks for connection in connections)
        master, port = first["address"], first["port"]
        (self._directory / "logs").mkdir(exist_ok=True)
        hosts = []
        for node, connection in enumerate(connections):
            log = log_of(self._directory, node, connection.host.host)
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
            )
            connection.log, connection.log_began = log, log_size(log)
            connection.order("start", **asdict(share))
            found = {key: connection.hello[key] for key in ("address", "interface")}
            ranks_here = f"{share.first_rank}-{share.first_rank + share.ranks - 1}"
            hosts.append({"host": connection.host.host, "ranks": ranks_here, **found, "log": log.name})
        environment = passed_on() | self._launcher.environment
        write_launch(self._directory, "ssh", go=go, rendezvous=f"{master}:{port}", hosts=hosts, environment=environment)
        names = ", ".join(host["host"] for host in hosts)
        fewer = f" (of {self._spec.training.ranks})" if ranks < self._spec.training.ranks else ""
        _say(f"{ranks} ranks{fewer} on {names}; they meet at {master}:{port}")

    def _watch(self, connections: Sequence[Connection]) -> LaunchEnding:
        """Until all ranks have ended; a failure or a loss on one host ends the others."""
        told = False
        while not all(self._over(each) for each in connections):
            if self._stopping and not told:
                told = True
                for connection in connections:
                    connection.order("stop")
            self._until(lambda: False, connections, _POLL_SECONDS)
            if any(self._over(each) and not _well(each) for each in connections):
                for connection in connections:
                    connection.order("kill")
                self._until(lambda: all(self._over(each) for each in connections), connections, float("inf"))
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
        lost = [each for each in connections if self._lost(each)]
        for connection in lost:
            _say(f"{connection.host.host}: lost, {'the connection ended' if connection.closed else 'silent'}")
        for connection in connections:
            if failed := [code for code in connection.codes() if code not in ENDED_WELL]:
                _say(f"{connection.host.host}: a rank ended with {failed[0]}; the end of its log:")
                _say(log_tail(connection.log, since=connection.log_began))
        code = verdict([code for each in connections for code in each.codes()])
        if lost:
            return LaunchEnding(code or 1, lost=True, fence_seconds=self._launcher.lost_after_seconds + 1)
        return LaunchEnding(code, lost=code > SIGNALLED and code != STOPPED)

    def _until(self, done: Callable[[], bool], connections: Sequence[Connection], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not done() and time.monotonic() < deadline:
            for connection in connections:
                connection.receive()
            time.sleep(_POLL_SECONDS)

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self._stopping:
            time.sleep(_POLL_SECONDS)

    def _last_checkpoint(self) -> str:
        found = sorted((self._directory / "checkpoints").glob("step-*"))
        return found[-1].name if found else ""

    def _stop(self, *_: object) -> None:
        self._stopping = True


def _all_answered(connections: Sequence[Connection]) -> bool:
    return all(each.answered for each in connections)


def _well(connection: Connection) -> bool:
    """Whether its ranks ended as they should, or were asked to."""
    return bool(connection.ended) and set(connection.ended["codes"]) <= set(ENDED_WELL)


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    die_with_parent()
    sys.exit(SshHead(Path(sys.argv[1])).run())
