"""A Slurm of one's own on this machine: a controller and two nodes, started as root, with everything in a directory."""

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.pipelines.trainers import trainers

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol", "scancel")
NODES = ("rpg1", "rpg2")
CONFIG = """\
ClusterName=rpg
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SlurmctldPort={controller_port}
StateSaveLocation={directory}/state
SlurmdSpoolDir={spool}/%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd-%n.log
SlurmctldTimeout=60
SlurmdTimeout=15
MessageTimeout=60
KillWait=5
ReturnToService=2
JobRequeue=1
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=1
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName={nodes} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports} CPUs=4 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2 PreemptMode=off
"""


def missing() -> str:
    """Returns the reason why a cluster cannot be created here; empty if it can."""
    lacking = [name for name in PROGRAMS if not _program(name)]
    if lacking:
        return f"needs {', '.join(lacking)} (apt-get install slurm-wlm)"
    return "" if os.geteuid() == 0 else "needs root: it starts slurmd"


def _program(name: str) -> str:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") or ""


def _free_ports(count: int) -> list[int]:
    """Returns consecutive ports without listeners."""
    for first in range(20000 + os.getpid() % 20000, 60000):
        held = []
        try:
            for port in range(first, first + count):
                listener = socket.socket()
                held.append(listener)
                listener.bind(("127.0.0.1", port))
            return list(range(first, first + count))
        except OSError:
            continue
        finally:
            for listener in held:
                listener.close()
    raise RuntimeError("no free ports")


@dataclass
class SlurmCluster:
    """The controller and the nodes; `environment` points Slurm's commands to them."""

    directory: Path
    daemons: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)
    spool: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="slurm-")))
    """Where the nodes have the sockets of their steps: a socket's path may have 107 bytes, and a test's directory alone
    has nearly as many."""

    def __post_init__(self) -> None:
        (self.directory / "state").mkdir(parents=True)
        host = socket.gethostname().split(".")[0]
        controller, *nodes = _free_ports(1 + len(NODES))
        text = CONFIG.format(
            host=host,
            directory=self.directory,
            spool=self.spool,
            controller_port=controller,
            nodes=f"rpg[1-{len(NODES)}]",
            ports=f"[{nodes[0]}-{nodes[-1]}]",
        )
        (self.directory / "slurm.conf").write_text(text)
        try:
            self._start("slurmctld", "-D", "-f", str(self.directory / "slurm.conf"))
            for node in NODES:
                self.start_node(node)
            self._await_idle()
        except BaseException:
            self.close()
            raise

    @property
    def environment(self) -> dict[str, str]:
        """On top of the present one."""
        return {"SLURM_CONF": str(self.directory / "slurm.conf")}

    def start_node(self, node: str) -> None:
        """Starts a node's daemon."""
        self._start(f"slurmd-{node}", "-D", "-N", node, "-f", str(self.directory / "slurm.conf"))

    def kill_node(self, node: str) -> None:
        """Kills a node's daemon and all it has started."""
        daemon = self.daemons.pop(f"slurmd-{node}")
        daemon.kill()
        daemon.wait()
        for process in self.step_managers(node) + [each for each in self.processes() if self.node_of(each) == node]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def _start(self, name: str, *arguments: str) -> None:
        with open(self.directory / f"{name}.out", "ab") as log:
            command = [_program(name.partition("-")[0]), *arguments]
            self.daemons[name] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=os.environ | self.environment
            )

    def _await_idle(self) -> None:
        deadline = time.monotonic() + 60
        while self.command("sinfo", "-h", "-o", "%T", "-p", "main", "-t", "idle", "-N").split() != ["idle"] * len(
            NODES
        ):
            assert time.monotonic() < deadline, (self.directory / "slurmctld.log").read_text()[-3000:]
            time.sleep(0.2)

    def command(self, name: str, *arguments: str) -> str:
        """Returns the output of one of Slurm's commands."""
        return subprocess.run(
            [_program(name), *arguments], capture_output=True, text=True, env=os.environ | self.environment, timeout=60
        ).stdout

    def jobs(self) -> list[tuple[str, str]]:
        """Number and state of each job in the queue."""
        return [tuple(line.split()) for line in self.command("squeue", "-h", "-o", "%i %T").splitlines()]  # type: ignore[misc]

    def processes(self) -> list[psutil.Process]:
        """What runs in the jobs."""
        processes = []
        for process in psutil.process_iter():
            try:
                ours = process.environ().get("SLURM_CONF") == self.environment["SLURM_CONF"]
                if ours and "SLURM_JOB_ID" in process.environ() and process.status() != psutil.STATUS_ZOMBIE:
                    processes.append(process)
            except (psutil.Error, OSError):
                continue
        return processes

    def step_managers(self, *nodes: str) -> list[psutil.Process]:
        """The slurmstepd of each part of a job, of all nodes by default. Whose it is, its log tells: it writes over its
        own environment, and is nobody's child."""
        logs = {str(self.directory / f"slurmd-{node}.log") for node in nodes or NODES}
        processes = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.name().startswith("slurmstepd") and logs & {file.path for file in process.open_files()}:
                    processes.append(process)
        return processes

    def node_of(self, process: psutil.Process) -> str:
        """The node that a job's process runs on."""
        try:
            return process.environ().get("SLURMD_NODENAME", "")
        except (psutil.Error, OSError):
            return ""

    def ranks(self) -> list[psutil.Process]:
        """The trainer's processes."""
        return trainers(self.processes())

    def close(self) -> None:
        """Ends it all: the daemons, which could start more, then what they started.

        A step whose daemons are gone would try for minutes to tell them of its end.
        """
        for daemon in self.daemons.values():
            daemon.kill()
            daemon.wait()
        deadline = time.monotonic() + 10
        while left := self.step_managers() + self.processes():
            assert time.monotonic() < deadline, left
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            time.sleep(0.05)
        shutil.rmtree(self.spool, ignore_errors=True)
