"""Findings of `rpg doctor`: installed packages, reachable services, misconfigurations."""

import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Literal

from pipelines.home.home import Home
from pipelines.launchers import Finding, launcher_of, launchers
from pipelines.prefect.server.api import Services, answers, is_healthy, running_services, status_of_answer
from pipelines.prefect.services.supervisord import ProcessState, Supervisor
from pipelines.processes.gpu_faults import gpu_faults
from rpg import sandbox
from rpg.rewards import refusals
from rpg.rewards.functions.judge import Judge
from rpg.rewards.judges.endpoint import trouble_of
from rpg.sandbox import room
from specs.errors import Issue, RpgError, SpecError
from specs.machine.files import read_json
from specs.machine.gpu_slots import holders, slots_here
from specs.machine.liveness import status_of
from specs.schema.experiment import Experiment
from specs.schema.rollout import SAMPLERS, engine_of

REQUIRED = ("torch", "transformers", "deepspeed", "datasets", "prefect", "duckdb", "pyarrow", "optuna", "pydantic")
OPTIONAL = {
    **{each.package.distributions: f"rollout.engine: {engine_of(each)}" for each in SAMPLERS if each.package},
    ("optuna-dashboard",): "a study's dashboard",
}
"""Alternative distributions, of which one is enough -> their purpose."""
_LOW_DISK_GIB = 2.0
_ANSWER_SECONDS = 10.0


def examine(home: Home, experiment: Experiment | None = None) -> list[Finding]:
    """Returns all findings, in a fixed order: this machine, then the services that a spec's launcher reaches. Without a
    spec: the requirements of every launcher.

    An examination that fails is a finding too.
    """
    examinations: dict[str, Callable[[], Iterator[Finding]]] = {
        "python": _python,
        "packages": _packages,
        "devices": _devices,
        "gpu faults": _gpu_faults,
        "sandbox": lambda: _sandbox(experiment),
        "judges": lambda: _judges(experiment),
        "environment": lambda: _environment(experiment),
        "home": lambda: _home(home),
        "database": lambda: _database(home),
        "profile": lambda: _profile(home),
        "services": lambda: _services(home),
        "gpu slots": _gpu_slots,
        "launchers": lambda: _launchers(home, experiment),
    }
    findings: list[Finding] = []
    for name, examination in examinations.items():
        try:
            findings += examination()
        except Exception as error:
            findings.append(Finding(name, "broken", f"{type(error).__name__}: {error}"))
    return findings


def _python() -> Iterator[Finding]:
    version = sys.version.split()[0]
    status: Literal["ok", "broken"] = "ok" if sys.version_info >= (3, 11) else "broken"
    yield Finding("python", status, f"{version} at {sys.executable}")
    if sys.platform != "linux":
        yield Finding("system", "note", f"{sys.platform}: a killed command's processes live until the next command")


def _packages() -> Iterator[Finding]:
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


def _devices() -> Iterator[Finding]:
    import torch

    count = torch.cuda.device_count()
    if count:
        names = ", ".join(torch.cuda.get_device_name(index) for index in range(count))
        yield Finding("devices", "ok", f"{count} CUDA: {names}")
    else:
        yield Finding("devices", "ok", f"no CUDA device; {os.cpu_count()} CPU cores")


def _gpu_faults() -> Iterator[Finding]:
    for fault in gpu_faults():
        yield Finding("gpu faults", "broken", fault)


def _sandbox(experiment: Experiment | None) -> Iterator[Finding]:
    lack = sandbox.missing() or room.missing()

    def sealing(issue: Issue) -> bool:
        return lack is not None and lack.reason in issue.message

    found = refusals(experiment) if experiment else []
    # Other problems of an environment have their own line.
    refused = next((issue for issue in found if sealing(issue) or "rollouter" not in issue.path), None)
    if experiment and refused:
        what = next((name for name in ("tool", "program") if {name, f"{name}s"} & {*refused.path}), "reward.type")
        why = f"{lack.reason}; {what} {refused.given} needs it here: {lack.hint}" if lack and sealing(refused) else ""
        message = why or f"{refused.message}: {refused.hint}"
        name = "sandbox" if sealing(refused) else what.partition(".")[0]
        yield Finding(name, "broken" if launcher_of(experiment).ranks_run_here else "note", message)
    elif lack:
        users = "reward.type: reasoning_gym and code, for the tool python and for agents' commands"
        yield Finding("sandbox", "note", f"{lack.reason}; needed for {users}: {lack.hint}")
    else:
        made = "bubblewrap provides one for rewards that may run a response's text"
        yield Finding("sandbox", "ok", f"{made}; memory is limited by process (rlimits), not by program (cgroup)")


def _judges(experiment: Experiment | None) -> Iterator[Finding]:
    """Checks whether the endpoints of the spec's judges answer, from this machine."""
    parts = [(at, part) for at, reward in experiment.rewards() for part in reward.parts()] if experiment else []
    judges = {part.endpoint: (at, part) for at, part in parts if isinstance(part, Judge) and part.endpoint}
    for url, (at, judge) in judges.items():
        trouble = trouble_of(url, judge.key or "", at, seconds=_ANSWER_SECONDS)
        yield Finding("judge", "broken" if trouble else "ok", f"{url}: {trouble or 'answers'}; {judge.model}")


def _environment(experiment: Experiment | None) -> Iterator[Finding]:
    """Checks whether the tools and users of the spec's rollouter answer."""
    if experiment:
        broken: Literal["broken", "note"] = "broken" if launcher_of(experiment).ranks_run_here else "note"
        for kind, name, trouble in experiment.rollout.rollouter.answering(_ANSWER_SECONDS):
            yield Finding(kind, broken if trouble else "ok", f"{name}: {trouble or 'answers'}")


def _home(home: Home) -> Iterator[Finding]:
    existing = next(path for path in (home.root, *home.root.parents) if path.exists())
    if not os.access(existing, os.W_OK):
        yield Finding("home", "broken", f"{existing} cannot be written")
        return
    free = shutil.disk_usage(existing).free / 2**30
    low = free < _LOW_DISK_GIB
    yield Finding("home", "note" if low else "ok", f"{home.root}, {free:.1f} GiB free")
    mode = stat.S_IMODE(home.root.stat().st_mode) if home.root.exists() else 0
    # Its group may enter, if PostgreSQL must run as a separate user.
    if mode & 0o067:
        message = f"other users can access {home.root} (mode {mode:o}): `chmod 700` prevents it"
        yield Finding("home's mode", "note", message)
    crashed = [
        path.parent.name
        for path in home.root.glob("runs/*/state.json")
        if status_of(path.parent, read_json(path)) == "crashed"
    ]
    if crashed:
        yield Finding("crashed runs", "note", f"{', '.join(sorted(crashed))}; `rpg resume` continues with one")


def _database(home: Home) -> Iterator[Finding]:
    if not home.root.exists():
        return
    from storage import Store

    with Store.open(home.root) as store:
        runs = store.query("select count(*) from runs").rows[0][0]
    yield Finding("records", "ok", f"{runs} runs; `rpg db check --full` reads every row")


def _profile(home: Home) -> Iterator[Finding]:
    name = os.environ.get("RPG_PROFILE", "")
    if name:
        from pipelines.prefect.server.client import api_url

        try:
            yield Finding("profile", "ok", api_url(home, name))
        except RpgError as error:
            message = error.issues[0].message if isinstance(error, SpecError) else str(error)
            yield Finding("profile", "broken", f"RPG_PROFILE={name}: {message}")


def _services(home: Home) -> Iterator[Finding]:
    services = running_services(home)
    if services is None:
        yield Finding("dashboard", "note", "not running; `rpg up` starts it, but `rpg run` does not need it")
        return
    if is_healthy(services.url):
        yield Finding("dashboard", "ok", services.dashboard)
    else:
        without = "its database does not answer" if answers(f"{services.url}/health") else "does not answer"
        yield Finding("dashboard", "broken", f"{services.url}: {without}; see {home.logs / 'prefect-server.log'}")
    states = Supervisor(home, services.control_port).states()
    for program in dict.fromkeys(process.program for process in states):
        yield _program(home, services, [process for process in states if process.program == program])
    refuses = status_of_answer(f"{services.url}/admin/version") == 401
    message = "the API refuses requests without a password" if refuses else "the API answers without a password"
    yield Finding("password", "ok" if refuses else "broken", message)


def _program(home: Home, services: Services, processes: list[ProcessState]) -> Finding:
    """Returns the finding about a program: running, with its address, or not running, with its log."""
    name = processes[0].program
    addresses = {"studies": services.studies_url, "record": services.record_url}
    if all(process.state == "RUNNING" for process in processes):
        pids = ", ".join(str(process.pid) for process in processes)
        return Finding(name, "ok", addresses.get(name) or f"process {pids}")
    states = ", ".join(process.state.lower() for process in processes)
    log = home.logs / processes[0].log
    return Finding(name, "note" if name == "studies" else "broken", f"{states}; `rpg up` starts it again; see {log}")


def _gpu_slots() -> Iterator[Finding]:
    if slots := slots_here():
        taken = holders(slots)
        yield Finding("gpu slots", "ok", f"{len(slots)}: {', '.join(slots)}" + (f"; {taken}" if taken else ""))


def _launchers(home: Home, experiment: Experiment | None) -> Iterator[Finding]:
    for launcher in [launcher_of(experiment)] if experiment else launchers():
        yield from launcher.examine(home, experiment)
