"""Whether the machines that a spec names can hold its ranks."""

import re
from collections.abc import Iterator

from specs.errors import Issue
from specs.schema.experiment import Experiment
from specs.schema.launchers import HOST_NAME, Host, SlurmLauncher, SshLauncher

OURS = (
    *("nodes", "ntasks", "ntasks-per-node", "job-name", "output", "error", "time", "signal", "partition"),
    *("requeue", "no-requeue", "open-mode", "array", "wait", "parsable", "chdir"),
)
"""Options of sbatch that the launcher sets from the spec's own fields."""
SHORT = {"N": "nodes", "n": "ntasks", "J": "job-name", "o": "output", "e": "error", "t": "time", "p": "partition"}


def launcher_issues(experiment: Experiment) -> list[Issue]:
    """What makes the launcher impossible."""
    launcher, ranks = experiment.launcher, experiment.training.ranks
    if isinstance(launcher, SshLauncher):
        return list(_ssh(launcher, ranks))
    return list(_slurm(launcher, ranks)) if isinstance(launcher, SlurmLauncher) else []


def _ssh(launcher: SshLauncher, ranks: int) -> Iterator[Issue]:
    if bool(launcher.hosts) == bool(launcher.hostfile):
        given = "both" if launcher.hosts else "neither"
        yield Issue("needs hosts or a hostfile, one of the two", ("launcher",), given=given)
        return
    if launcher.min_ranks > ranks:
        yield Issue("is more than training.ranks", ("launcher", "min_ranks"), f"{launcher.min_ranks} of {ranks}")
    field = "hostfile" if launcher.hostfile else "hosts"
    try:
        hosts = hosts_of(launcher)
    except OSError as error:
        yield Issue("cannot be read", ("launcher", field), given=launcher.hostfile, hint=str(error.strerror))
        return
    except ValueError as error:
        hint = "a line for each host, as DeepSpeed's: worker-1 slots=8"
        yield Issue(f"is no hostfile: {error}", ("launcher", field), given=launcher.hostfile, hint=hint)
        return
    names = [host.host for host in hosts]
    for index, name in enumerate(names):
        if name in names[:index]:
            yield Issue("the host is named twice", ("launcher", field, index, "host"), given=name)
    slots = sum(host.slots for host in hosts)
    if slots < ranks:
        yield Issue(
            "the hosts have too few slots",
            ("launcher", field),
            given=f"{slots} slots for {ranks} ranks",
            hint="add hosts or slots, or lower training.ranks",
        )


def _slurm(launcher: SlurmLauncher, ranks: int) -> Iterator[Issue]:
    if ranks % launcher.nodes:
        yield Issue(
            "the ranks do not divide",
            ("launcher", "nodes"),
            given=f"{ranks} ranks on {launcher.nodes} nodes",
            hint="training.ranks must be a multiple of launcher.nodes",
        )
    limit = launcher.time_limit_minutes * 60
    if limit and launcher.stop_before_seconds >= limit:
        given = f"{launcher.stop_before_seconds} s of {limit} s"
        yield Issue("no time is left to train in", ("launcher", "stop_before_seconds"), given=given)
    for index, option in enumerate(launcher.options):
        path = ("launcher", "options", index)
        name = option.lstrip("-").partition("=")[0]
        if not option.startswith("-") or " " in option.strip():
            yield Issue("is no option", path, given=option, allowed="--name=value, one an item")
        elif name in OURS or (not option.startswith("--") and SHORT.get(option[1]) in OURS):
            hint = "launcher.nodes, .partition and .time_limit_minutes, and training.ranks, say it"
            yield Issue("the launcher sets it", path, given=option, hint=hint)


_LINE = re.compile(r"^(\S+)\s+slots=(\d+)$")


def parse_hostfile(text: str) -> tuple[Host, ...]:
    """The hosts, in the order of the file.

    Raises:
        ValueError: a line is not as it must be, a host stands there twice, or there is none; the message has the line.
    """
    hosts: list[Host] = []
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.partition("#")[0].strip()
        if not line:
            continue
        found = _LINE.match(line)
        if not found or not re.match(HOST_NAME, found[1]) or not int(found[2]):
            raise ValueError(f"line {number} is not `NAME slots=N`: {raw.strip()}")
        if found[1] in [host.host for host in hosts]:
            raise ValueError(f"line {number} names {found[1]} again")
        hosts.append(Host(host=found[1], slots=int(found[2])))
    if not hosts:
        raise ValueError("there is no host in it")
    return tuple(hosts)


def hosts_of(launcher: SshLauncher) -> tuple[Host, ...]:
    """The launcher's hosts, from the spec or its file. Raises OSError or ValueError where the file is not right."""
    if not launcher.hostfile:
        return launcher.hosts
    with open(launcher.hostfile, encoding="utf-8") as file:
        return parse_hostfile(file.read())
