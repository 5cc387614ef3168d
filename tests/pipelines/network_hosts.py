"""Two hosts of one's own: network namespaces on a bridge."""

import os
import shutil
import subprocess
from dataclasses import dataclass

import psutil

from tests.pipelines.trainers import trainers


def missing() -> str:
    """Why such hosts cannot be made here; empty where they can."""
    if not _program("ip"):
        return "needs ip (apt-get install iproute2)"
    if os.geteuid() != 0:
        return "needs root: it makes network namespaces"
    probe = subprocess.run([_program("ip"), "netns", "add", f"rpg-probe-{os.getpid()}"], capture_output=True, text=True)
    if probe.returncode:
        return f"network namespaces cannot be made: {probe.stderr.strip()}"
    subprocess.run([_program("ip"), "netns", "del", f"rpg-probe-{os.getpid()}"], check=True)
    return ""


def _program(name: str) -> str:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") or ""


def _run(*command: str) -> None:
    subprocess.run([_program(command[0]), *command[1:]], check=True, capture_output=True, text=True)


@dataclass
class NetworkHost:
    """One of them."""

    address: str
    namespace: str

    def processes(self) -> list[psutil.Process]:
        """All that runs on it."""
        pids = subprocess.run(
            [_program("ip"), "netns", "pids", self.namespace], capture_output=True, text=True, check=True
        ).stdout.split()
        alive = []
        for pid in map(int, pids):
            try:
                process = psutil.Process(pid)
                if process.status() != psutil.STATUS_ZOMBIE:
                    alive.append(process)
            except psutil.Error:
                continue
        return alive

    def ranks(self) -> list[psutil.Process]:
        """The trainer's processes on it."""
        return trainers(self.processes())

    def power_off(self) -> None:
        """Kills all that runs on it."""
        for process in self.processes():
            process.kill()


class NetworkHosts:
    """Both."""

    def __init__(self) -> None:
        number = os.getpid()
        self._bridge = f"rpgb{number}"
        self._net = f"10.{200 + number // 250 % 50}.{number % 250}"
        self.hosts: list[NetworkHost] = []
        try:
            _run("ip", "link", "add", self._bridge, "type", "bridge")
            _run("ip", "addr", "add", f"{self._net}.1/24", "dev", self._bridge)
            _run("ip", "link", "set", self._bridge, "up")
            for index in (0, 1):
                self.hosts.append(self._host(index, number))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Takes it all down."""
        for host in self.hosts:
            host.power_off()
            _run("ip", "netns", "del", host.namespace)
        subprocess.run([_program("ip"), "link", "del", self._bridge], capture_output=True)

    def _host(self, index: int, number: int) -> NetworkHost:
        name, inner, cable = f"rpgn{number}{index}", f"rpgi{number}{index}", f"rpgc{number}{index}"
        address = f"{self._net}.{index + 2}"
        _run("ip", "netns", "add", name)
        host = NetworkHost(address, name)
        _run("ip", "link", "add", cable, "type", "veth", "peer", "name", inner)
        _run("ip", "link", "set", inner, "netns", name)
        _run("ip", "link", "set", cable, "master", self._bridge)
        _run("ip", "link", "set", cable, "up")
        for command in (
            ("addr", "add", f"{address}/24", "dev", inner),
            ("link", "set", inner, "up"),
            ("link", "set", "lo", "up"),
        ):
            _run("ip", "netns", "exec", name, "ip", *command)
        return host
