"""The ranks on one machine of several: their start, their signals, their end, and what it means for the run."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from pipelines.launchers import LaunchedStage, rank_program
from rpg.processes.exit_cause import STOPPED
from rpg.processes.parent import die_with_parent
from rpg.processes.redacted_log import redacted_log
from specs.secrets import resolved


@dataclass(frozen=True, slots=True)
class Share:
    """One machine's share of a run: the ranks that it starts, and how they find the others."""

    run_dir: str
    first_rank: int
    ranks: int
    world_size: int
    node: int
    """Which machine of the run it is, from 0."""
    nodes: int
    master_address: str
    master_port: int
    log: str
    """The ranks' output is appended to it; on the shared file system."""
    device: str = "cpu"
    """The spec's resources.device; where it is not the CPU, GPU slots are leased for the ranks."""
    gpus: int = 0
    """Those of the ranks and their engines; 0: one a rank."""
    interface: str = ""
    """Network interface over which the ranks meet (gloo); empty: the library's choice. NCCL chooses its own, among
    them InfiniBand, which is no interface of this kind."""
    environment: dict[str, str] = field(default_factory=dict)
    """The spec's variables for every rank, secrets as references."""
    stage: LaunchedStage = "train"

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> "Share":
        """From plain data that may hold more."""
        return cls(**{name: fields[name] for name in cls.__dataclass_fields__ if name in fields})

    def rank_environment(self, local_rank: int) -> dict[str, str]:
        """What torch.distributed, DeepSpeed and the trainer read."""
        return {
            **({"GLOO_SOCKET_IFNAME": self.interface} if self.interface else {}),
            **self.environment,
            "MASTER_ADDR": self.master_address,
            "MASTER_PORT": str(self.master_port),
            "RANK": str(self.first_rank + local_rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_SIZE": str(self.ranks),
            "CROSS_RANK": str(self.node),
            "CROSS_SIZE": str(self.nodes),
            "PYTHONUNBUFFERED": "1",
        }


ENDED_WELL = (0, STOPPED, -signal.SIGTERM)
"""Exit codes of a rank that is done or was asked to stop; the last one, where the signal met it before it listened or
when it listened no more."""


class Ranks:
    """One process a rank, output in the machine's log. They die with this process, however it ends."""

    def __init__(self, share: Share, slots: Sequence[str] = ()) -> None:
        """Starts them. Raises SecretError where this machine lacks a secret that the spec's environment refers to."""
        environment = {**os.environ, **({"CUDA_VISIBLE_DEVICES": ",".join(slots)} if slots else {})}
        self.processes: list[subprocess.Popen[bytes]] = []
        share = replace(share, environment=resolved(share.environment))
        with contextlib.ExitStack() as stack:
            log = stack.enter_context(redacted_log(Path(share.log), environment | share.environment))
            last = share.first_rank + share.ranks - 1
            machine = f"node {share.node} of {share.nodes}, {socket.gethostname()}"
            log.write(f"{machine}: ranks {share.first_rank} to {last}\n".encode())
            for local_rank in range(share.ranks):
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", *rank_program(Path(share.run_dir), share.stage)],
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        env=environment | share.rank_environment(local_rank),
                        preexec_fn=partial(die_with_parent, os.getpid()),
                    )
                )
            self._output = stack.pop_all()

    def codes(self) -> list[int | None]:
        """Exit codes; None while a rank runs, negative where a signal ended it."""
        return [process.poll() for process in self.processes]

    def over(self) -> bool:
        """Whether all have ended, or one has failed, so that the others wait for it in vain."""
        codes = self.codes()
        return None not in codes or any(code not in (None, *ENDED_WELL) for code in codes)

    def stop(self) -> None:
        """Asks them to save their state and end."""
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)

    def kill(self, *, settle_seconds: float = 0.0) -> list[int | None]:
        """Ends what still runs, and all it started. Returns the codes of those that had ended by themselves, else None.

        Args:
            settle_seconds: how long a rank may yet end by itself, so that its own code is seen.
        """
        deadline = time.monotonic() + settle_seconds
        while None in self.codes() and time.monotonic() < deadline:
            time.sleep(0.05)
        codes = self.codes()
        running = [process for process, code in zip(self.processes, codes, strict=True) if code is None]
        families: list[psutil.Process] = []
        for process in running:
            with contextlib.suppress(psutil.Error):
                families += [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        for member in families:
            with contextlib.suppress(psutil.Error):
                member.kill()
        for process in running:
            process.wait()
        self._output.close()
        return codes


def verdict(codes: Sequence[int | None]) -> int:
    """One exit code for many, as a shell has it: the first that tells of a failure, 143 if any was stopped, else 0.

    None is no code: the rank was killed because of another's end.
    """
    failures = [code for code in codes if code is not None and code not in ENDED_WELL]
    # A rank that a signal ended is the cause of its peers' complaints.
    if killed := [code for code in failures if code < 0]:
        return 128 - killed[0]
    if failures:
        return failures[0]
    return STOPPED if any(codes) else 0


@dataclass
class Losses:
    """How often in a row a machine or a rank was lost without a checkpoint between."""

    losses: int = 0
    stood_at: str = ""
    """The last checkpoint when it last happened; empty: there was none."""

    def add(self, run_dir: Path, most: int) -> bool:
        """Counts one more. Whether the run is worth another launch; says so where it is not.

        Args:
            most: launcher.restarts.
        """
        steps = sorted(path.name for path in (run_dir / "checkpoints").glob("step-*"))
        stands_at = steps[-1] if steps else ""
        self.losses = 1 + (self.losses if stands_at == self.stood_at else 0)
        self.stood_at = stands_at
        if self.losses > most:
            print(f"lost {self.losses} times without a checkpoint between: given up (launcher.restarts)", flush=True)
        return self.losses <= most


def rank_range(first: int, ranks: int) -> str:
    """The first and the last of a machine's ranks, for launch.json: `4-7`."""
    return f"{first}-{first + ranks - 1}"


def log_of(run_dir: Path, stage: LaunchedStage, node: int, host: str) -> Path:
    """Where the ranks of a machine write: a file that `rpg logs` shows."""
    name = "".join(letter if letter.isalnum() or letter in ".-" else "_" for letter in host)
    return run_dir / "logs" / f"{stage}-{node}-{name}.log"
