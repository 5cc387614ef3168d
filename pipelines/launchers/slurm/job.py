"""The batch job of a run: `python -m pipelines.launchers.slurm.job RUN_DIR`.

sbatch starts it on the first node of the allocation. It starts the ranks with srun, forwards SIGTERM, and decides by
the way they ended:

- stopped (143) without a request from us: preempted, or the time limit is near. The job is queued again.
- a node, a rank or an engine was lost: queued again too, up to `launcher.restarts` times in a row without a new
checkpoint. The node
  that failed is named to the command that waits, which excludes it.
- anything else: it has ended for good, and reports that to the waiting command.
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
from itertools import accumulate
from pathlib import Path
from typing import Any

from pipelines.launchers import LaunchedStage, write_launch
from pipelines.launchers.network import address_of, free_port, source_address
from pipelines.launchers.ranks import ENDED_WELL, Losses, number_range, verdict
from pipelines.launchers.slurm.job_files import JobFiles
from specs.machine.exit_cause import SIGNALLED, STOPPED, forget_exits
from specs.machine.files import read_json, write_json
from specs.machine.launch import ENGINES_ELSEWHERE, KEY, LOOPBACK, new_key

_POLL_SECONDS = 0.2
_PEERS_SECONDS = 30.0
"""Seconds that the other nodes have to end after one has failed, or those with engines after the ranks have ended. The
job then stops waiting for them, and in the first case counts them as lost."""


class Job:
    """One stretch of a batch job: from its start until it ends or is queued again."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._files = JobFiles.of(run_dir)
        self._id = os.environ["SLURM_JOB_ID"]
        self._restarts = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        self._stretch = f"{self._id}-{self._restarts}"
        self._settings: dict[str, Any] = json.loads(self._files.settings.read_bytes())
        self._stage: LaunchedStage = self._settings["stage"]
        self._hosts: list[str] = []
        """Names of the nodes: those with ranks, then those with engines."""
        self._srun: subprocess.Popen[bytes] | None = None
        self._stopping = False
        signal.signal(signal.SIGTERM, self._stop)

    def run(self) -> int:
        """Trains, and queues the job again if necessary. Returns the job's exit code."""
        forget_exits(self._run_dir)
        self._prepare()
        nodes, environment = self._nodes + len(self._engines), {**os.environ, KEY: new_key()}
        command = ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--export=ALL"]
        if self._engines:
            environment[ENGINES_ELSEWHERE] = "1"
        if cpus := os.environ.get("SLURM_CPUS_PER_TASK"):
            command.append(f"--cpus-per-task={cpus}")
        python = self._settings["srun_python"] or sys.executable
        node = [python, "-P", "-u", "-m", "pipelines.launchers.slurm.node", str(self._run_dir), self._stretch]
        command += ["--kill-on-bad-exit=1", *self._settings["srun_options"], *node]
        self._srun = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment)
        self._wait()
        code, lost = self._meaning()
        if self._files.stop.exists() or not self._queued_again(code, lost):
            write_json(self._files.ended, {"job": self._id, "code": code})
        return code

    @property
    def _nodes(self) -> int:
        """Returns the number of nodes with ranks."""
        return int(self._settings["nodes"])

    @property
    def _engines(self) -> list[int]:
        """Returns the number of engines on each node that has any."""
        engines: list[int] = self._settings["engines"]
        return engines

    def _prepare(self) -> None:
        """Chooses where the ranks meet, sends the nodes these choices, and records them."""
        self._hosts = names = _output("scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]).split()
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
            "engines": self._engines,
            **{name: self._settings[name] for name in ("gpus_per_engine", "device", "threads") if self._engines},
        }
        write_json(self._files.share(self._stretch), job)
        chosen = {name: value for name, value in os.environ.items() if name.startswith(("NCCL_", "GLOO_", "CUDA_"))}
        of_nodes = [("ranks", node * ranks, ranks) for node in range(self._nodes)]
        before = accumulate(self._engines, initial=0)
        of_nodes += [("engines", first, count) for first, count in zip(before, self._engines, strict=False)]
        hosts = [
            {"host": name, kind: number_range(first, count)}
            for name, (kind, first, count) in zip(names, of_nodes, strict=True)
        ]
        write_launch(
            self._run_dir,
            "slurm",
            job=self._id,
            go=1 + self._restarts,
            rendezvous=f"{address}:{port}",
            hosts=hosts,
            environment=chosen | self._settings["environment"],
            stage=self._stage,
        )
        places = f"{self._settings['ranks']} ranks on {', '.join(names[: self._nodes])}"
        if self._engines:
            places += f", {sum(self._engines)} engines on {', '.join(names[self._nodes :])}"
        self._say(f"{places}, at {address}:{port}")

    def _address(self, names: list[str]) -> str:
        """Returns the address of this machine at which the ranks meet."""
        if len(names) == 1:
            return LOOPBACK
        if interface := self._settings["interface"]:
            return address_of(interface)
        # The address from which the second node is reached: a machine's own name often means 127.0.1.1 on itself.
        with contextlib.suppress(OSError):
            return source_address(names[1])
        return socket.gethostbyname(socket.gethostname())

    def _wait(self) -> None:
        """Waits until srun ends, but not for a dead node, for which srun waits until Slurm has noticed."""
        assert self._srun is not None
        over_at, asked_to_stop = 0.0, False
        while self._srun.poll() is None:
            if self._stopping and not asked_to_stop:
                asked_to_stop = True
                # Sent to the ranks through Slurm: srun itself would end them at once.
                subprocess.run(["scancel", "--signal=TERM", self._id])
            by_node = self._codes()
            failed = any(code not in (None, *ENDED_WELL) for codes in by_node.values() for code in codes)
            if not over_at and (failed or all(node in by_node for node in range(self._nodes))):
                over_at = time.monotonic()
            if over_at and time.monotonic() - over_at > _PEERS_SECONDS:
                self._srun.kill()
            time.sleep(_POLL_SECONDS)

    def _meaning(self) -> tuple[int, bool]:
        """Returns the exit code, and whether a node, a rank or an engine was lost. The exit codes of engines that no
        rank needs any more do not count."""
        assert self._srun is not None
        by_node = self._codes()
        of_ranks = [by_node[node] for node in range(self._nodes) if node in by_node]
        if len(of_ranks) == self._nodes and all(code in ENDED_WELL for codes in of_ranks for code in codes):
            return verdict([code for codes in of_ranks for code in codes]), False
        code = verdict([code for codes in by_node.values() for code in codes])
        if len(by_node) < self._nodes + len(self._engines):
            if not by_node:
                print(f"srun ended with {self._srun.returncode}, and no node says how its ranks ended", flush=True)
            return code or 1, True
        return code, code > SIGNALLED and code != STOPPED

    def _codes(self) -> dict[int, list[int | None]]:
        """Returns the exit codes that the nodes have reported, by node."""
        return self._files.codes(self._stretch, self._nodes + len(self._engines))

    def _queued_again(self, code: int, lost: bool) -> bool:
        """Queues the job again, if its ending requires that. Returns whether it did, or Slurm does so itself."""
        if code != STOPPED and not (lost and self._worth_another()):
            return False
        # If the user or Slurm is already ending the job, it is not ours to restart; Slurm requeues the jobs that it
        # preempts.
        if "RUNNING" not in _output("squeue", "--noheader", "--jobs", self._id, "--format=%T"):
            return True
        if lost and (failed := self._failed_hosts()):
            before = [host for host in read_json(self._files.failed).get("hosts", []) if host not in failed]
            write_json(self._files.failed, {"hosts": before + failed})
        what = "a node, a rank or an engine" if self._engines else "a node or a rank"
        self._say(f"{f'{what} was lost' if lost else 'stopped'}; queued again")
        return subprocess.run(["scontrol", "requeue", self._id]).returncode == 0

    def _failed_hosts(self) -> list[str]:
        """Returns the nodes that caused a loss; empty if that is not known, or if it would be all nodes.

        These are the nodes that Slurm says are down; else those where a signal killed a rank or an engine; else the
        only one that has not reported. An abort accuses nobody: NCCL aborts the peers of a rank that was lost.
        """
        states = _output("sinfo", "--noheader", "--Node", f"--nodes={','.join(self._hosts)}", "--format=%N %T")
        down = [host for host, _, state in (line.partition(" ") for line in states.splitlines()) if _is_down(state)]
        by_node = self._codes()
        killed = [node for node, codes in by_node.items() if any(_is_kill(code) for code in codes)]
        silent = [node for node in range(len(self._hosts)) if node not in by_node]
        blamed = down or [self._hosts[node] for node in killed or (silent if len(silent) == 1 else [])]
        alone = len(self._hosts) == 1
        return list(dict.fromkeys(blamed)) if alone or len(set(blamed)) < len(self._hosts) else []

    def _worth_another(self) -> bool:
        """Counts a loss. Returns whether there were few enough in a row for another launch."""
        path = self._files.losses
        losses = Losses(**json.loads(path.read_bytes())) if path.exists() else Losses()
        worth_another = losses.add(self._run_dir, int(self._settings["restarts"]))
        write_json(path, asdict(losses))
        return worth_another

    def _say(self, text: str) -> None:
        print(f"job {self._stretch}: {text}", flush=True)

    def _stop(self, *_: object) -> None:
        self._stopping = True


def _is_down(state: str) -> bool:
    """Whether a node in this state, in sinfo's words, has failed. `*`: it does not respond."""
    return state.strip().endswith("*") or state.startswith(("down", "fail"))


def _is_kill(code: int | None) -> bool:
    """Whether a process has ended by a signal that neither asked it to stop nor was an abort of its own."""
    return code is not None and code < 0 and code not in (*ENDED_WELL, -signal.SIGABRT)


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, encoding="utf-8", timeout=120).stdout


if __name__ == "__main__":
    sys.exit(Job(Path(sys.argv[1])).run())
