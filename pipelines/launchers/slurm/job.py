"""The batch job of a run: `python -m pipelines.launchers.slurm.job RUN_DIR`.

sbatch starts it on the first node of the allocation. It starts the ranks with srun, passes SIGTERM on, and decides what
the end means:

- stopped (143) and nobody of ours asked for it: preempted, or the time limit is near. The job is queued again.
- a node or a rank was lost: queued again too, so many times in a row without a checkpoint between.
- anything else: it has ended for good, and tells the command that waits.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipelines.launchers import LaunchedStage, write_launch
from pipelines.launchers.network import address_of, free_port, source_address
from pipelines.launchers.ranks import ENDED_WELL, Losses, rank_range, verdict
from pipelines.launchers.slurm.job_files import JobFiles
from rpg.files import write_json
from rpg.processes.exit_cause import SIGNALLED, STOPPED, forget_exits

_POLL_SECONDS = 0.2
_PEERS_SECONDS = 30.0
"""How long the other nodes have to end after one has failed; then they count as lost."""


class Job:
    """One stretch of a batch job: from its start to its end or its next place in the queue."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._files = JobFiles.of(run_dir)
        self._id = os.environ["SLURM_JOB_ID"]
        self._restarts = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        self._stretch = f"{self._id}-{self._restarts}"
        self._settings: dict[str, Any] = json.loads(self._files.settings.read_bytes())
        # A job that an earlier version of this code has queued trains.
        self._stage: LaunchedStage = self._settings.get("stage", "train")
        self._srun: subprocess.Popen[bytes] | None = None
        self._stopping = False
        signal.signal(signal.SIGTERM, self._stop)

    def run(self) -> int:
        """Trains, and queues the job again where that is called for. Returns the job's exit code."""
        forget_exits(self._run_dir)
        self._prepare()
        command = ["srun", f"--nodes={self._nodes}", f"--ntasks={self._nodes}", "--ntasks-per-node=1"]
        if cpus := os.environ.get("SLURM_CPUS_PER_TASK"):
            command.append(f"--cpus-per-task={cpus}")
        node = [sys.executable, "-u", "-m", "pipelines.launchers.slurm.node", str(self._run_dir), self._stretch]
        self._srun = subprocess.Popen([*command, "--kill-on-bad-exit=1", *node], stdin=subprocess.DEVNULL)
        self._wait()
        code, lost = self._meaning()
        if self._files.stop.exists() or not self._queued_again(code, lost):
            write_json(self._files.ended, {"job": self._id, "code": code})
        return code

    @property
    def _nodes(self) -> int:
        return int(self._settings["nodes"])

    def _prepare(self) -> None:
        """Chooses where the ranks meet, tells the nodes, and records what was chosen."""
        names = _output("scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]).split()
        address, port = self._address(names), free_port()
        ranks = int(self._settings["ranks"]) // self._nodes
        job = {
            "ranks": ranks,
            "world_size": self._settings["ranks"],
            "nodes": self._nodes,
            "master_address": address,
            "master_port": port,
            "interface": self._settings["interface"],
            "environment": self._settings["environment"],
            "stage": self._stage,
        }
        write_json(self._files.share(self._stretch), job)
        chosen = {name: value for name, value in os.environ.items() if name.startswith(("NCCL_", "GLOO_", "CUDA_"))}
        write_launch(
            self._run_dir,
            "slurm",
            job=self._id,
            go=1 + self._restarts,
            rendezvous=f"{address}:{port}",
            hosts=[{"host": name, "ranks": rank_range(node * ranks, ranks)} for node, name in enumerate(names)],
            environment=chosen | self._settings["environment"],
            stage=self._stage,
        )
        self._say(f"{self._settings['ranks']} ranks on {', '.join(names)}, at {address}:{port}")

    def _address(self, names: list[str]) -> str:
        """This machine's address, where the ranks meet."""
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
        failed_at, asked_to_stop = 0.0, False
        while self._srun.poll() is None:
            if self._stopping and not asked_to_stop:
                asked_to_stop = True
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
        return [json.loads(path.read_bytes()) for path in self._files.reports(self._stretch)]

    def _queued_again(self, code: int, lost: bool) -> bool:
        """Queues the job again, if that is what its end asks for. Whether it did, or Slurm does by itself."""
        if code != STOPPED and not (lost and self._worth_another()):
            return False
        # One that its user or Slurm ends already is not ours to bring back; Slurm queues again what it preempts.
        if "RUNNING" not in _output("squeue", "--noheader", "--jobs", self._id, "--format=%T"):
            return True
        self._say(f"{'a node or a rank was lost' if lost else 'stopped'}; queued again")
        return subprocess.run(["scontrol", "requeue", self._id]).returncode == 0

    def _worth_another(self) -> bool:
        """Counts a loss. Whether there were not too many in a row."""
        path = self._files.losses
        losses = Losses(**json.loads(path.read_bytes())) if path.exists() else Losses()
        worth_another = losses.add(self._run_dir, int(self._settings["restarts"]))
        write_json(path, asdict(losses))
        return worth_another

    def _say(self, text: str) -> None:
        print(f"job {self._stretch}: {text}", flush=True)

    def _stop(self, *_: object) -> None:
        self._stopping = True


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=120).stdout


if __name__ == "__main__":
    sys.exit(Job(Path(sys.argv[1])).run())
