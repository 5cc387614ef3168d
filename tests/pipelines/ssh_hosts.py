"""Two hosts of one's own: network namespaces on a bridge, an ssh server in each, keys of their own."""

import os
import shlex
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.pipelines.trainers import trainers

PROGRAMS = ("ip", "sshd", "ssh", "ssh-keygen")


def missing() -> str:
    """Why such hosts cannot be made here; empty where they can."""
    lacking = [name for name in PROGRAMS if not _program(name)]
    if lacking:
        return f"needs {', '.join(lacking)} (apt-get install openssh-server openssh-client iproute2)"
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
class SshHost:
    """One of them."""

    address: str
    namespace: str
    cable: str
    """The bridge's end of its only link."""
    config: Path
    server: "subprocess.Popen[bytes] | None" = None

    def serve(self, *before: str) -> None:
        """Starts its ssh server; `before`: a command for the host's own mount namespace."""
        serve = [_program("sshd"), "-D", "-e", "-f", str(self.config)]
        # `ip netns exec` gives what it runs mounts of its own.
        script = f"{shlex.join(before) or 'true'} && exec {shlex.join(serve)}"
        command = [_program("ip"), "netns", "exec", self.namespace, "sh", "-c", script]
        with open(self.config.with_suffix(".log"), "ab") as log:
            self.server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def processes(self) -> list[psutil.Process]:
        """All that runs on it but the ssh server that waits for connections."""
        pids = subprocess.run(
            [_program("ip"), "netns", "pids", self.namespace], capture_output=True, text=True, check=True
        ).stdout.split()
        keep = {self.server.pid} if self.server else set()
        alive = []
        for pid in map(int, pids):
            try:
                process = psutil.Process(pid)
                if pid not in keep and process.status() != psutil.STATUS_ZOMBIE:
                    alive.append(process)
            except psutil.Error:
                continue
        return alive

    def ranks(self) -> list[psutil.Process]:
        """The trainer's processes on it."""
        return trainers(self.processes())

    def hide(self, directory: Path, behind: Path) -> None:
        """From now on it sees another directory in the place of one."""
        self.power_off()
        self.serve("mount", "--bind", str(behind), str(directory))

    def cut(self) -> None:
        """Nothing goes in or out any more."""
        _run("ip", "link", "set", self.cable, "down")

    def mend(self) -> None:
        """The link is back."""
        _run("ip", "link", "set", self.cable, "up")

    def power_off(self) -> None:
        """Kills all that runs on it, the server included."""
        if self.server:
            self.server.kill()
            self.server.wait()
            self.server = None
        for process in self.processes():
            process.kill()


class SshHosts:
    """Both, and how to reach them."""

    def __init__(self, directory: Path) -> None:
        number = os.getpid()
        self._bridge = f"rpgb{number}"
        self._net = f"10.{200 + number // 250 % 50}.{number % 250}"
        self.directory = directory
        self.hosts: list[SshHost] = []
        directory.mkdir(parents=True)
        directory.chmod(0o700)
        Path("/run/sshd").mkdir(exist_ok=True)
        try:
            self._keys()
            _run("ip", "link", "add", self._bridge, "type", "bridge")
            _run("ip", "addr", "add", f"{self._net}.1/24", "dev", self._bridge)
            _run("ip", "link", "set", self._bridge, "up")
            for index in (0, 1):
                self.hosts.append(self._host(index, number))
            for host in self.hosts:
                self.await_answer(host)
        except BaseException:
            self.close()
            raise

    @property
    def ssh(self) -> list[str]:
        """The spec's launcher.ssh."""
        return ["ssh", "-F", str(self.directory / "ssh_config")]

    def spec(self, *, extra: str = "") -> str:
        """The section of a spec that trains a rank on each; `extra`: more fields, `, name: value`."""
        hosts = ", ".join(f"{{host: {host.address}}}" for host in self.hosts)
        ssh = ", ".join(self.ssh)
        return f"launcher: {{type: ssh, hosts: [{hosts}], ssh: [{ssh}]{extra}}}\n"

    def close(self) -> None:
        """Takes it all down."""
        for host in self.hosts:
            host.power_off()
            _run("ip", "netns", "del", host.namespace)
        subprocess.run([_program("ip"), "link", "del", self._bridge], capture_output=True)

    def _keys(self) -> None:
        for name in ("host", "user"):
            _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.directory / name))
        (self.directory / "authorized").write_text((self.directory / "user.pub").read_text())
        (self.directory / "ssh_config").write_text(
            f"Host *\n  Port 2222\n  IdentityFile {self.directory}/user\n  IdentitiesOnly yes\n"
            "  StrictHostKeyChecking no\n  UserKnownHostsFile /dev/null\n  LogLevel ERROR\n"
        )

    def _host(self, index: int, number: int) -> SshHost:
        name, inner, cable = f"rpgn{number}{index}", f"rpgi{number}{index}", f"rpgc{number}{index}"
        address = f"{self._net}.{index + 2}"
        config = self.directory / f"sshd{index}.conf"
        config.write_text(
            f"Port 2222\nListenAddress {address}\nHostKey {self.directory}/host\n"
            f"AuthorizedKeysFile {self.directory}/authorized\nStrictModes no\nPermitRootLogin yes\nUsePAM no\n"
            "PasswordAuthentication no\nPidFile none\nMaxStartups 100\n"
        )
        _run("ip", "netns", "add", name)
        host = SshHost(address, name, cable, config)
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
        host.serve()
        return host

    def await_answer(self, host: SshHost) -> None:
        """Until its server lets one in."""
        deadline = time.monotonic() + 30
        while True:
            tried = subprocess.run([*self.ssh, host.address, "true"], capture_output=True, text=True)
            if tried.returncode == 0:
                return
            assert time.monotonic() < deadline, tried.stderr + host.config.with_suffix(".log").read_text()
            time.sleep(0.2)


def terminate(process: psutil.Process, number: signal.Signals = signal.SIGKILL) -> None:
    """Sends a signal to a process that may be gone."""
    try:
        process.send_signal(number)
    except psutil.Error:
        return
