"""A Ray cluster of one's own: two nodes, each in a network namespace, two CPUs each."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from network_hosts import NetworkHost, NetworkHosts
from network_hosts import missing as missing_hosts

_PORT = 6379
_RAY = Path(sys.executable).with_name("ray")


def missing() -> str:
    """Returns the reason why such a cluster cannot be created here; empty if it can."""
    return missing_hosts() if find_spec("ray") else "needs the extra ray"


class RayCluster:
    """The nodes: the first has Ray's head, and is where commands are run."""

    def __init__(self, directory: Path) -> None:
        self._hosts = NetworkHosts()
        # Names of sockets may be a hundred letters long.
        self._scratch = Path(f"/tmp/rpg-ray-{os.getpid()}")
        directory.mkdir(parents=True)
        self._log = directory / "ray.log"
        self.raylets: list[subprocess.Popen[bytes]] = []
        try:
            for number in (0, 1):
                self.add(number)
            self.await_nodes(2)
        except BaseException:
            self.close()
            raise

    @property
    def hosts(self) -> list[NetworkHost]:
        """The machines."""
        return self._hosts.hosts

    @property
    def address(self) -> str:
        """The spec's launcher.address."""
        return f"{self.hosts[0].address}:{_PORT}"

    def add(self, number: int, *before: str) -> None:
        """Starts Ray on a machine; `before`: a command for the machine's own mount namespace."""
        host = self.hosts[number]
        head = ["--head", f"--port={_PORT}", "--include-dashboard=false", f"--temp-dir={self._scratch}"]
        options = [*(head if number == 0 else [f"--address={self.address}"]), "--num-cpus=2", "--num-gpus=0"]
        start = [str(_RAY), "start", "--block", "--disable-usage-stats", f"--node-ip-address={host.address}"]
        memory = ["--object-store-memory=100000000"]
        ray = [*start, *options, *memory]
        with open(self._log, "ab") as log:
            started = subprocess.Popen(
                # `ip netns exec` gives what it runs mounts of its own.
                self.on(number, ["sh", "-c", f"{shlex.join(before) or 'true'} && exec {shlex.join(ray)}"]),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "RAY_health_check_period_ms": "1000", "RAY_health_check_failure_threshold": "3"},
            )
        self.raylets.append(started)
        if number == 0:
            self.await_nodes(1)

    def restart(self, number: int, *before: str) -> None:
        """Ends Ray on a machine, with all that it runs there, and starts it again; `before`: as for `add`."""
        for process in self.hosts[number].processes():
            process.kill()
        self.add(number, *before)
        self.await_nodes(2)

    def renew(self) -> None:
        """Creates the cluster again, as after the loss of its head."""
        for host in self.hosts:
            for process in host.processes():
                process.kill()
        for number in (0, 1):
            self.add(number)
        self.await_nodes(2)

    def drain(self, number: int) -> None:
        """Tells a machine that it is about to be taken away, as clouds tell a spot machine."""
        address = self.hosts[number].address
        node = self.ask(f"next(n['NodeID'] for n in ray.nodes() if n['NodeManagerAddress'] == {address!r})")
        which = ("--address", self.address, "--node-id", node, "--deadline-remaining-seconds", "600")
        why = ("--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot")
        done = subprocess.run(self.on(0, [str(_RAY), "drain-node", *which, *why]), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    def on(self, number: int, command: Sequence[str]) -> list[str]:
        """A command line that runs on a machine."""
        return [*self.prefix(number), *command]

    def prefix(self, number: int) -> tuple[str, ...]:
        """What runs a command on a machine."""
        return (shutil.which("ip") or "/sbin/ip", "netns", "exec", self.hosts[number].namespace)

    def pretend_version(self, version: str) -> str:
        """Has the cluster say that it is of another version of Ray's. Returns the one that it said before."""
        program = (
            "import json\nfrom ray._raylet import GcsClient\n"
            f"kv, key = GcsClient({self.address!r}), b'CLUSTER_METADATA'"
            "\ntold = json.loads(kv.internal_kv_get(key, b'cluster'))\nprint(told['ray_version'])\n"
            f"told = json.dumps(told | {{'ray_version': {version!r}}}).encode()"
            "\nkv.internal_kv_put(key, told, True, b'cluster')"
        )
        done = subprocess.run(self.on(0, [sys.executable, "-c", program]), capture_output=True, text=True, check=True)
        return done.stdout.strip()

    def ask(self, question: str) -> str:
        """What Python says of the cluster; `ray` is connected."""
        program = (
            f"import ray, logging; ray.init(address={self.address!r}, logging_level=logging.ERROR, log_to_driver=False)"
            f"\nprint({question})"
        )
        done = subprocess.run(
            self.on(0, [sys.executable, "-W", "ignore", "-c", program]), capture_output=True, text=True
        )
        return done.stdout.strip()

    def await_nodes(self, count: int) -> None:
        """Waits until this many are alive."""
        deadline = time.monotonic() + 180
        while self.ask("sum(node['Alive'] for node in ray.nodes())") != str(count):
            assert time.monotonic() < deadline, self._log.read_text()[-3000:]

    def section(self, **more: Any) -> dict[str, Any]:
        """The spec's launcher."""
        return {"type": "ray", "address": self.address, "connect_seconds": 120, "lost_after_seconds": 15, **more}

    def close(self) -> None:
        """Takes it all down."""
        for host in self.hosts:
            for process in host.processes():
                process.send_signal(signal.SIGKILL)
        for raylet in self.raylets:
            raylet.wait()
        self._hosts.close()
        shutil.rmtree(self._scratch, ignore_errors=True)
