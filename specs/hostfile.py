"""A file of hosts as DeepSpeed's launcher reads it: a line `NAME slots=N` for each, # begins a comment."""

import re

from specs.schema.launchers import HOST_NAME, Host, SshLauncher

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
