"""The batch job of a run: `python -m pipelines.launchers.slurm.job RUN_DIR`.

sbatch starts it on the first node of the allocation. It starts the ranks with srun, passes SIGTERM on, and decides what
the end means:

- stopped (143) and nobody of ours asked for it: preempted, or the time limit is near. The job is queued again.
- a node or a rank was lost: queued again too, so many times in a row without a checkpoint between.
- anything else: RUN_DIR/slurm/ended.json tells the command that waits.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from pipelines.launchers.ranks import ENDED_WELL, address_of, free_port, verdict
from pipelines.launchers.slurm.node import DIRECTORY, source_address
from rpg.files import now, replace_json
from rpg.processes.exit_cause import SIGNALLED, STOPPED, forget_exits

STOP = "stop"
"""In the directory: the run is ended on purpose, and not to be queued again."""
ENDED = "ended.json"
_POLL_SECONDS = 0.2
_PEERS_SECONDS = 30.0
"""How long the other nodes have to end after one has failed; then they count as lost."""


class Job:
    """One stretch of a batch job: from its start to its end or its next place in the queue."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._directory = run_dir / DIRECTORY
        self._id = os.environ["SLURM_JOB_ID"]
        self._tag = f"{self._id}-{os.environ.get('SLURM_RESTART_COUNT', '0')}"
        self._settings: dict[str, Any] = json.loads((self._directory / "settings.json").read_bytes())
        self._srun: subprocess.Popen[bytes] | None = None
        self._asked_to_stop = False
        signal.signal(signal.SIGTERM, self._note)

    def run(self) -> int:
        """Trains, and queues the job again where that is called for. Returns the job's exit code."""
        forget_exits(self._run_dir)
        self._prepare()
        command = ["srun", f"--nodes={self._nodes}", f"--ntasks={self._nodes}", "--ntasks-per-node=1"]
        if cpus := os.environ.get("SLURM_CPUS_PER_TASK"):
            command.append(f"--cpus-per-task={cpus}")
        node = [sys.executable, "-u", "-m", "pipelines.launchers.slurm.node", str(self._run_dir), self._tag]
        self._srun = subprocess.Popen([*command, "--kill-on-bad-exit=1", *node], stdin=subprocess.DEVNULL)
        self._wait()
        code, lost = self._meaning()
        if (self._directory / STOP).exists() or not self._again(code, lost):
            replace_json(self._directory / ENDED, {"job": self._id, "code": code}, durable=True)
        return code

    @property
    def _nodes(self) -> int:
        return int(self._settings["nodes"])

    def _prepare(self) -> None:
        """Chooses where the ranks meet, and writes down what was chosen."""
        names = _output("scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]).split()
        address = self._address(names)
        port = free_port()
        ranks = int(self._settings["ranks"]) // self._nodes
        job = {
            "ranks": ranks,
            "world_size": self._settings["ranks"],
            "nodes": self._nodes,
            "master_address": address,
            "master_port": port,
            "interface": self._settings["interface"],
            "environment": self._settings["environment"],
        }
        replace_json(self._directory / f"{self._tag}.json", job, durable=True)
        hosts = [
            {"host": name, "ranks": f"{node * ranks}-{node * ranks + ranks - 1}"} for node, name in enumerate(names)
        ]
        chosen = {name: value for name, value in os.environ.items() if name.startswith(("NCCL_", "GLOO_", "CUDA_"))}
        launch = {
            "launcher": "slurm",
            "started_at": now(),
            "job": self._id,
            "go": 1 + int(os.environ.get("SLURM_RESTART_COUNT", "0")),
            "rendezvous": f"{address}:{port}",
            "hosts": hosts,
            "environment": chosen | self._settings["environment"],
        }
        replace_json(self._run_dir / "launch.json", launch, durable=False)
        print(
            f"job {self._tag}: {self._settings['ranks']} ranks on {', '.join(names)}, at {address}:{port}", flush=True
        )

    def _address(self, names: list[str]) -> str:
        """Of this machine, where the ranks meet."""
        if interface := self._settings["interface"]:
            return address_of(interface)
        if len(names) == 1:
            return "127.0.0.1"
        # The address by which the second node is reached: a machine's own name often means 127.0.1.1 on itself.
        with contextlib.suppress(OSError):
            return source_address(names[1])
        return socket.gethostbyname(socket.gethostname())

    def _wait(self) -> None:
        """Until srun ends; not for a node that is dead, which srun would do until Slurm has noticed."""
        assert self._srun is not None
        failed_at, told = 0.0, False
        while self._srun.poll() is None:
            if self._asked_to_stop and not told:
                told = True
                # To the ranks, by way of Slurm: srun itself would end them at once.
                subprocess.run(["scancel", "--signal=TERM", self._id])
            codes = [code for report in self._reports() for code in report["codes"]]
            if not failed_at and any(code not in (None, *ENDED_WELL) for code in codes):
                failed_at = time.monotonic()
            if failed_at and time.monotonic() - failed_at > _PEERS_SECONDS:
                self._srun.kill()
            time.sleep(_POLL_SECONDS)

    def _meaning(self) -> tuple[int, bool]:
        """The exit code, and whether a node or a rank was lost."""
        assert self._srun is not None
        reports = self._reports()
        code = verdict([code for report in reports for code in report["codes"]])
        if len(reports) < self._nodes:
            if not reports:
                print(f"srun ended with {self._srun.returncode}, and no node says how its ranks ended", flush=True)
            return code or 1, True
        return code, code > SIGNALLED and code != STOPPED

    def _reports(self) -> list[dict[str, Any]]:
        found = self._directory.glob(f"{self._tag}-node-*.json")
        return [json.loads(path.read_bytes()) for path in found]

    def _again(self, code: int, lost: bool) -> bool:
        """Queues the job again, if that is what its end asks for. Whether it did."""
        if code != STOPPED and not (lost and self._worth_it()):
            return False
        # One that its user or Slurm ends already is not ours to bring back; Slurm queues again what it preempts.
        if "RUNNING" not in _output("squeue", "--noheader", "--jobs", self._id, "--format=%T"):
            return True
        print(f"job {self._tag}: {'a node or a rank was lost' if lost else 'stopped'}; queued again", flush=True)
        return subprocess.run(["scontrol", "requeue", self._id]).returncode == 0

    def _worth_it(self) -> bool:
        """Counts the losses since the last checkpoint."""
        steps = sorted(path.name for path in (self._run_dir / "checkpoints").glob("step-*"))
        path, stood_at = self._directory / "losses.json", steps[-1] if steps else ""
        before = json.loads(path.read_bytes()) if path.exists() else {}
        losses = 1 + (before.get("losses", 0) if before.get("stood_at") == stood_at else 0)
        replace_json(path, {"losses": losses, "stood_at": stood_at}, durable=True)
        if losses > self._settings["restarts"]:
            print(f"lost {losses} times without a checkpoint between: given up (launcher.restarts)", flush=True)
        return losses <= int(self._settings["restarts"])

    def _note(self, *_: object) -> None:
        self._asked_to_stop = True


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=120).stdout


if __name__ == "__main__":
    sys.exit(Job(Path(sys.argv[1])).run())
