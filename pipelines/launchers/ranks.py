"""The ranks or engines on one machine of several: their start, their signals, their end, and its
consequence for the run."""

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
from specs.machine.exit_cause import STOPPED
from specs.machine.gpu_slots import gpu_at, gpus_of_run, slots_here
from specs.machine.launch import LOOPBACK, ON_LOOPBACK
from specs.machine.parent import die_with_parent, own_threads
from specs.machine.redacted_log import redacted_log
from specs.machine.standstill import variables_to_show_work
from specs.secrets import resolved


@dataclass(frozen=True, slots=True)
class Share:
    """One machine's share of a run: the ranks or engines that it starts, and how they find the others."""

    run_dir: str
    world_size: int
    """Number of ranks in the run."""
    node: int
    """Index of the machine in the run, from 0; those with engines come after those with ranks."""
    nodes: int
    """Number of machines with ranks."""
    master_address: str
    """Address at which the ranks meet: this machine's own if all ranks and engines are on one machine."""
    master_port: int
    log: str
    """File on the shared file system to which the processes' output is appended."""
    first_rank: int = 0
    ranks: int = 0
    """Number of ranks here. 0 on a machine that has engines."""
    first_engine: int = 0
    engines: int = 0
    """Number of engines here. 0 on a machine that has ranks, which start their engines themselves."""
    address: str = ""
    """The machine's own address, at which ranks reach its engines."""
    device: str = "cpu"
    """The spec's resources.device; for any value other than the CPU, GPU slots are leased for the processes."""
    gpus: int = 0
    """Number of GPUs of the ranks and their engines, or of the engines alone. 0: one per rank."""
    threads: int = 0
    """The spec's resources.threads."""
    interface: str = ""
    """Network interface over which the ranks meet (gloo). Empty: the library's choice. NCCL chooses its own, for
    example InfiniBand, which is no interface of this kind."""
    environment: dict[str, str] = field(default_factory=dict)
    """The spec's variables for every rank and engine, secrets as references."""
    stage: LaunchedStage = "train"

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> "Share":
        """Builds a share from plain data, and ignores unknown keys."""
        return cls(**{name: fields[name] for name in cls.__dataclass_fields__ if name in fields})

    @property
    def ended_well(self) -> tuple[int, ...]:
        """Returns the exit codes that are no failure of its processes. An engine is not asked to stop
        before its rank has ended."""
        return ENDED_WELL if self.ranks else (0,)

    def commands(self, environment: Mapping[str, str]) -> list[tuple[list[str], dict[str, str]]]:
        """Returns the module and arguments that each process runs, with its variables beside `environment`."""
        if self.ranks:
            program = rank_program(Path(self.run_dir), self.stage)
            return [(program, self.rank_environment(local_rank)) for local_rank in range(self.ranks)]
        return [
            (["rpg.engine", str(self.first_engine + place), self.address], self._engine_environment(place, environment))
            for place in range(self.engines)
        ]

    def __str__(self) -> str:
        if self.engines:
            return f"engines {self.first_engine} to {self.first_engine + self.engines - 1}"
        return f"ranks {self.first_rank} to {self.first_rank + self.ranks - 1}"

    def rank_environment(self, local_rank: int) -> dict[str, str]:
        """Returns the variables that torch.distributed, DeepSpeed and the trainer read."""
        return self._meeting_environment() | {
            "RANK": str(self.first_rank + local_rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_SIZE": str(self.ranks),
            "CROSS_RANK": str(self.node),
            "CROSS_SIZE": str(self.nodes),
        }

    def _engine_environment(self, place: int, environment: Mapping[str, str]) -> dict[str, str]:
        """Returns the engine's GPUs, in the order of those that this machine gives the run, its threads, and the file
        of its sign of life."""
        known, size = gpus_of_run(environment), self.gpus // self.engines
        if self.device == "auto" and not known:  # Slurm lists no GPUs if it does not allocate them
            known = slots_here(environment)
        own = [gpu_at(known, gpu) for gpu in range(place * size, (place + 1) * size)]
        on_gpus = self.device == "cuda" or (self.device == "auto" and known)
        variables = self._meeting_environment()
        return {
            **variables,
            **variables_to_show_work(Path(self.run_dir)),
            "OMP_NUM_THREADS": str(own_threads(self.threads, self.engines, {**environment, **variables})),
            **({"CUDA_VISIBLE_DEVICES": ",".join(own)} if on_gpus else {}),
        }

    def _meeting_environment(self) -> dict[str, str]:
        """Returns the spec's variables, and those by which the processes find each other. A run on a single machine
        uses loopback only."""
        return {
            **({"GLOO_SOCKET_IFNAME": self.interface} if self.interface else {}),
            **self.environment,
            **(ON_LOOPBACK if self.master_address == LOOPBACK else {}),
            "MASTER_ADDR": self.master_address,
            "MASTER_PORT": str(self.master_port),
            "PYTHONUNBUFFERED": "1",
        }


ENDED_WELL = (0, STOPPED, -signal.SIGTERM)
"""Exit codes of a rank that is done or was asked to stop. The last one: the signal arrived before the rank had its
handler, or after it removed it."""


class Processes:
    """The processes of a share, one per rank or engine, with output in the machine's log. They die with this process,
    however it ends."""

    def __init__(self, share: Share, slots: Sequence[str] = ()) -> None:
        """Starts them. Raises SecretError if this machine lacks a secret that the spec's environment refers to."""
        self._share = share
        environment = {**os.environ, **({"CUDA_VISIBLE_DEVICES": ",".join(slots)} if slots else {})}
        self.processes: list[subprocess.Popen[bytes]] = []
        share = replace(share, environment=resolved(share.environment))
        with contextlib.ExitStack() as stack:
            log = stack.enter_context(redacted_log(Path(share.log), environment | share.environment))
            node = f"node {share.node} of {share.nodes}" if share.ranks else f"node {share.node}"
            log.write(f"{node}, {socket.gethostname()}: {share}\n".encode())
            for program, variables in share.commands(environment):
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, "-P", "-m", *program],
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        env=environment | variables,
                        preexec_fn=partial(die_with_parent, os.getpid()),
                    )
                )
            self._output = stack.pop_all()

    def codes(self) -> list[int | None]:
        """Returns the exit codes; None while a process runs, negative if a signal ended it."""
        return [process.poll() for process in self.processes]

    def over(self) -> bool:
        """Returns whether all have ended, or one has failed, so that the others would wait for it forever."""
        codes = self.codes()
        return None not in codes or any(code not in (None, *self._share.ended_well) for code in codes)

    def stop(self) -> None:
        """Asks ranks to save their state and end. Engines serve them until then."""
        for process in self.processes:
            if self._share.ranks and process.poll() is None:
                process.send_signal(signal.SIGTERM)

    def kill(self, *, settle_seconds: float = 0.0) -> list[int | None]:
        """Kills the remaining processes and everything that they started. Returns the exit codes of those that had
        ended by themselves, None for the others.

        Args:
            settle_seconds: time in which a process may still end by itself, so that its own code is seen.
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
    """Returns one exit code for many, as a shell has it: the first failure, else 143 if any was stopped, else 0.

    None is ignored: that process was killed because another one ended.
    """
    failures = [code for code in codes if code is not None and code not in ENDED_WELL]
    # A process that a signal ended is the cause of its peers' errors.
    if killed := [code for code in failures if code < 0]:
        return 128 - killed[0]
    if failures:
        return failures[0]
    return STOPPED if any(codes) else 0


@dataclass
class Losses:
    """Counter of consecutive losses of a machine or a rank without a new checkpoint between them."""

    losses: int = 0
    stood_at: str = ""
    """The last checkpoint at the last loss. Empty if there was no checkpoint."""

    def add(self, run_dir: Path, most: int) -> bool:
        """Counts one more loss. Returns whether the run is worth another launch, and prints the reason if it is not.

        Args:
            most: launcher.restarts.
        """
        steps = sorted(path.name for path in (run_dir / "checkpoints").glob("step-*"))
        stands_at = steps[-1] if steps else ""
        self.losses = 1 + (self.losses if stands_at == self.stood_at else 0)
        self.stood_at = stands_at
        if self.losses > most:
            print(f"lost {self.losses} times without a new checkpoint: gives up (launcher.restarts)", flush=True)
        return self.losses <= most


def number_range(first: int, count: int) -> str:
    """Returns the first and the last of a machine's ranks or engines, for launch.json: `4-7`."""
    return f"{first}-{first + count - 1}"


def log_of(run_dir: Path, stage: LaunchedStage, node: int, host: str) -> Path:
    """Returns the log file of a machine's ranks or engines, which `rpg logs` shows."""
    name = "".join(letter if letter.isalnum() or letter in ".-" else "_" for letter in host)
    return run_dir / "logs" / f"{stage}-{node}-{name}.log"
