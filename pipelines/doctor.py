"""What is installed, reachable, misconfigured."""

import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from pipelines.home import Home
from pipelines.launchers.slurm import slurm
from pipelines.launchers.slurm.batch import batch_options, batch_script
from pipelines.launchers.ssh.connection import Connection, apart
from pipelines.launchers.ssh.node import versions
from pipelines.services.server import is_healthy, running_services
from pipelines.state import read_json
from rpg.processes.gpu_slots import holders, slots_here
from specs.errors import SpecError
from specs.rules.launchers import hosts_of
from specs.schema.experiment import Experiment
from specs.schema.launchers import SlurmLauncher, SshLauncher
from specs.schema.rollout import SAMPLERS, engine_of
from storage.liveness import is_alive, status_of

REQUIRED = ("torch", "transformers", "deepspeed", "datasets", "prefect", "duckdb", "pyarrow", "optuna", "pydantic")
OPTIONAL = {
    **{each.package.distributions: f"rollout.engine: {engine_of(each)}" for each in SAMPLERS if each.package},
    ("optuna-dashboard",): "a study's dashboard",
}
"""Distributions of which any one is enough -> what for."""
_LOW_DISK_GIB = 2.0


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at."""

    name: str
    status: Literal["ok", "note", "broken"]
    """note: works, but worth knowing; broken: something that is needed fails."""
    message: str


def examine(home: Home, experiment: Experiment | None = None) -> list[Finding]:
    """Everything, in a fixed order, with what a spec's launcher reaches; an examination that fails is a finding."""

    def _launchers(home: Home) -> Iterator[Finding]:
        return launcher_findings(home, experiment)

    findings: list[Finding] = []
    examinations: tuple[Callable[[Home], Iterator[Finding]], ...] = (
        *(_python, _packages, _devices),
        *(_home, _database, _profile, _services),
        _launchers,
    )
    for examination in examinations:
        try:
            findings += examination(home)
        except Exception as error:
            findings.append(Finding(examination.__name__.strip("_"), "broken", f"{type(error).__name__}: {error}"))
    return findings


def _python(_home: Home) -> Iterator[Finding]:
    version = sys.version.split()[0]
    status: Literal["ok", "broken"] = "ok" if sys.version_info >= (3, 11) else "broken"
    yield Finding("python", status, f"{version} at {sys.executable}")
    if sys.platform != "linux":
        yield Finding("system", "note", f"{sys.platform}: a killed command's processes live until the next command")


def _packages(_home: Home) -> Iterator[Finding]:
    for name in REQUIRED:
        try:
            yield Finding(name, "ok", metadata.version(name))
        except metadata.PackageNotFoundError:
            yield Finding(name, "broken", "not installed")
    for (name, *others), purpose in OPTIONAL.items():
        try:
            yield Finding(name, "ok", metadata.version(name))
        except metadata.PackageNotFoundError:
            other = next((other for other in others if any(metadata.distributions(name=other))), "")
            yield Finding(name, "note", f"installed (as {other})" if other else f"not installed; needed for {purpose}")


def _devices(_home: Home) -> Iterator[Finding]:
    import torch

    count = torch.cuda.device_count()
    if count:
        names = ", ".join(torch.cuda.get_device_name(index) for index in range(count))
        yield Finding("devices", "ok", f"{count} CUDA: {names}")
    else:
        yield Finding("devices", "ok", f"no CUDA device; {os.cpu_count()} CPU cores")


def _home(home: Home) -> Iterator[Finding]:
    existing = next(path for path in (home.root, *home.root.parents) if path.exists())
    if not os.access(existing, os.W_OK):
        yield Finding("home", "broken", f"{existing} cannot be written")
        return
    free = shutil.disk_usage(existing).free / 2**30
    low = free < _LOW_DISK_GIB
    yield Finding("home", "note" if low else "ok", f"{home.root}, {free:.1f} GiB free")
    crashed = [
        path.parent.name for path in home.root.glob("runs/*/state.json") if status_of(read_json(path)) == "crashed"
    ]
    if crashed:
        yield Finding("crashed runs", "note", f"{', '.join(sorted(crashed))}; `rpg resume` goes on with one")


def _database(home: Home) -> Iterator[Finding]:
    if not home.root.exists():
        return
    from storage import Store

    with Store.open(home.root) as store:
        runs = store.query("select count(*) from runs").rows[0][0]
    yield Finding("records", "ok", f"{runs} runs; `rpg db check` looks at every row")


def _profile(home: Home) -> Iterator[Finding]:
    name = os.environ.get("RPG_PROFILE", "")
    if name:
        from pipelines.services.submit import api_url

        try:
            yield Finding("profile", "ok", api_url(home, name))
        except SpecError as error:
            yield Finding("profile", "broken", f"RPG_PROFILE={name}: {error.issues[0].message}")


def _services(home: Home) -> Iterator[Finding]:
    services = running_services(home)
    if services is None:
        yield Finding("dashboard", "note", "not up; `rpg up` starts it, `rpg run` does without")
        return
    if not is_healthy(services.url):
        yield Finding("dashboard", "broken", f"{services.url} does not answer; see {home.logs / 'prefect-server.log'}")
        return
    yield Finding("dashboard", "ok", services.dashboard)
    if services.worker is None or not is_alive(services.worker.pid, services.worker.started):
        yield Finding(
            "worker", "broken", f"not running; `rpg up` starts it again; see {home.logs / 'prefect-worker.log'}"
        )
    else:
        yield Finding("worker", "ok", f"process {services.worker.pid}")


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
