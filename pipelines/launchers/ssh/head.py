"""Holds a run over ssh hosts together: `python -m pipelines.launchers.ssh.head RUN_DIR [STAGE]`, started by the
supervisor."""

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pipelines.launchers import launched_stage
from pipelines.launchers.hosts.connection import Connection, await_answers
from pipelines.launchers.hosts.head import Head, dealt, say
from pipelines.launchers.ssh.connection import connect
from specs.errors import Issue
from specs.machine.parent import die_with_parent
from specs.schema.experiment import Experiment
from specs.schema.launchers import SshLauncher

_RETRY_SECONDS = 2.0
"""Between two tries to reach enough hosts."""


class SshHead(Head):
    """Connects to the spec's hosts, in their order."""

    @property
    def launcher(self) -> SshLauncher:
        """The spec's section."""
        assert isinstance(self.spec.launcher, SshLauncher)
        return self.spec.launcher

    def key_of(self, connection: Connection) -> tuple[str, ...]:
        """The key that names the host."""
        key = "engine_hosts" if connection.engines else "hostfile" if self.launcher.hostfile else "hosts"
        return ("launcher", key)

    def unfit(self, connection: Connection) -> Iterator[Issue]:
        """Engines on a host that is reached by IPv6."""
        address = connection.hello["address"]
        if connection.engines and ":" in address:
            message = f"{connection.name} has engines and is reached by IPv6"
            hint = 'write launcher.ssh: [ssh, "-4"], or a launcher.interface with an IPv4 address'
            yield Issue(message, self.key_of(connection), given=address, hint=hint)

    def connect(self, secret: Mapping[str, str], *, patience: float) -> list[Connection]:
        """Connections to as many hosts as the ranks and then their engines need, in the spec's order; empty where too
        few answer.

        Args:
            secret: see Connection.
            patience: seconds in which all of training.ranks must find room; after these launcher.min_ranks are enough.
        """
        deadline = time.monotonic() + patience
        while not self.stopping:
            connections = connect(self.launcher, self.directory, self.token, secret)
            await_answers(connections, self.launcher.connect_seconds)
            late = time.monotonic() >= deadline
            chosen = choose(self.spec, connections, fewest=self.launcher.min_ranks if late else 0)
            for connection in connections:
                if connection not in chosen:
                    if connection.refused or not connection.hello:
                        say(f"{connection.name}: {connection.refused or 'cannot be reached'}")
                    connection.close()
            if chosen:
                return chosen
            if late:
                engines = " and their engines" if self.launcher.engine_hosts else ""
                say(f"too few hosts answer for {self.spec.training.ranks} ranks{engines}")
                break
            self.wait(_RETRY_SECONDS)
        return []


def choose(experiment: Experiment, connections: Sequence[Connection], *, fewest: int) -> list[Connection]:
    """The first hosts whose slots are enough, each given its ranks or engines; `fewest` ranks will do, 0: all.

    Of fewer than all there are whole groups of those that share sequences.
    """
    training, rollout, launcher = experiment.training, experiment.rollout, experiment.launcher
    assert isinstance(launcher, SshLauncher)
    answering = [each for each in connections if each.hello and not each.closed]
    with_engines = [each for each in answering if each.for_engines]
    with_ranks = [each for each in answering if each not in with_engines]
    slots = [each.slots for each in with_ranks]
    room, engines = sum(slots), [each.slots // rollout.gpus_per_sampler for each in with_engines]
    if launcher.engine_hosts:
        room = min(room, sum(engines) * rollout.ranks_per_sampler)
    count = min(training.ranks, room // training.sequence_parallel_size * training.sequence_parallel_size)
    if count < max(1, fewest or training.ranks):
        return []
    for connection, numbers in zip(with_ranks, dealt(count, slots), strict=True):
        connection.ranks = numbers
    for connection, numbers in zip(with_engines, dealt(rollout.samplers(count), engines), strict=True):
        connection.engines = numbers
    return [each for each in (*with_ranks, *with_engines) if each.ranks or each.engines]


if __name__ == "__main__":
    die_with_parent()
    sys.exit(SshHead(Path(sys.argv[1]), launched_stage(sys.argv[2:])).run())
