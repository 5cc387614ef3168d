"""Whether the machines that a spec's launcher names are there and fit: they answer, see this home, have this code."""

import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from pipelines.doctor import Finding
from pipelines.home import Home
from pipelines.launchers.slurm import slurm
from pipelines.launchers.slurm_batch import batch_options, batch_script
from pipelines.launchers.ssh_connection import Connection, apart
from rpg.node import versions
from rpg.slots import holders, slots_here
from specs.hostfile import hosts_of
from specs.schema.experiment import Experiment
from specs.schema.launchers import SlurmLauncher, SshLauncher

_POLL_SECONDS = 0.05


def launcher_findings(home: Home, experiment: Experiment | None) -> Iterator[Finding]:
    """This machine's GPU slots, and what a spec's launcher reaches; without a spec, what launchers need here."""
    if slots := slots_here():
        taken = holders(slots)
        yield Finding("gpu slots", "ok", f"{len(slots)}: {', '.join(slots)}" + (f"; {taken}" if taken else ""))
    launcher = experiment.launcher if experiment else None
    if isinstance(launcher, SshLauncher):
        yield from _ssh(home, launcher)
    elif isinstance(launcher, SlurmLauncher) and experiment:
        yield from _slurm(home, experiment)
    elif experiment is None:
        for name, program in (("ssh", "ssh"), ("slurm", "sbatch")):
            found = shutil.which(program)
            yield Finding(f"launcher {name}", "ok" if found else "note", found or f"no {program} here")


def _ssh(home: Home, launcher: SshLauncher) -> Iterator[Finding]:
    if not shutil.which(launcher.ssh[0]):
        yield Finding("launcher ssh", "broken", f"no {launcher.ssh[0]} here")
        return
    home.root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home.root, prefix=".doctor-") as directory:
        token = secrets.token_hex(8)
        (Path(directory) / "launch.token").write_text(token, encoding="utf-8")
        connections = [Connection(host, launcher, Path(directory), token) for host in hosts_of(launcher)]
        try:
            deadline = time.monotonic() + launcher.connect_seconds
            while time.monotonic() < deadline and not all(each.answered for each in connections):
                for connection in connections:
                    connection.receive()
                time.sleep(_POLL_SECONDS)
            for connection in connections:
                yield _host(connection)
        finally:
            for connection in connections:
                connection.close()


def _host(connection: Connection) -> Finding:
    name = f"host {connection.host.host}"
    if not connection.hello:
        return Finding(name, "broken", connection.refused or "does not answer; `ssh` must get in without a password")
    if not connection.hello["shared"]:
        return Finding(name, "broken", "does not see this home; RPG_HOME must be the same directory on all hosts")
    if other := apart(versions(), connection.hello["versions"]):
        return Finding(name, "broken", f"has other versions: {other}")
    at, interface = connection.hello["address"], connection.hello["interface"]
    return Finding(name, "ok", f"{connection.host.slots} slots; sees this home, has this code; {at} on {interface}")


def _slurm(home: Home, experiment: Experiment) -> Iterator[Finding]:
    if not shutil.which("sbatch"):
        yield Finding("launcher slurm", "broken", "no sbatch here")
        return
    options = batch_options(experiment, home.root / "runs" / "doctor")
    asked = slurm("sbatch", "--test-only", *options, given=batch_script(experiment, home.root))
    said = asked.stderr.strip().removeprefix("sbatch: ")
    yield Finding("launcher slurm", "broken" if asked.returncode else "ok", said)
    yield Finding("slurm nodes", "note", f"must see {home.root}; that is not looked at from here")
